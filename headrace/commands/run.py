"""`headrace run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from headrace.commands import prompts
from headrace.commands.flags import (
    PLACEMENT,
    json_value,
    key_values,
    read_text_file,
    runtime_config,
    runtime_flags,
    sampling_flags,
    sampling_settings,
)
from headrace.commands.terminal import say
from headrace.errors import UsageError
from headrace.runtime.request import SamplingParams
from headrace.runtime.trace import Trace


@click.command(name="run")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="The system message of the chat.")
@click.option(
    "--pin-system",
    is_flag=True,
    help="Compute the beginning that the system message gives all chats ahead of the first one, "
    "and keep its keys and values for good.",
)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without chat template.")
@click.option(
    "--chat-template",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A Jinja template to use instead of the model's own.",
)
@click.option(
    "--template-arg",
    "template_args",
    metavar="K=V",
    multiple=True,
    help="A variable for the chat template; V is read as JSON where it is JSON "
    "(enable_thinking=false). Repeatable.",
)
@click.option(
    "--sampling",
    type=click.Choice(["headrace", "model"]),
    default="headrace",
    help="Whose defaults the sampling flags have: those named below, or the model's "
    "generation_config. Default: headrace.",
)
@sampling_flags
@runtime_flags(
    "ctx",
    "lanes",
    "pool",
    "prefix_cache",
    *PLACEMENT,
    "exactness",
    "speculate",
    "defer",
    "prior",
    "ram",
    "reserve",
    "mlock",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--stats", is_flag=True, help="Print speed and memory on stderr afterwards.")
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write what draft, target and host did when, for chrome://tracing or Perfetto.",
)
def command(bundle: Path, prompt: str | None, **flags: Any) -> None:
    r"""Answer a prompt, or chat.

    The answer of the model in BUNDLE streams to stdout; with --logprobs a table follows it there.

    Without PROMPT, or with `-`, the prompt is read from stdin; if stdin is a terminal, without
    PROMPT, a chat begins, in which /help lists the commands and Ctrl-C ends an answer.

    Names of control tokens in a prompt stay text. In --stop, \n, \r, \t and \\ are escapes.
    """
    as_json, stats, trace_file = (flags.pop(name) for name in ("as_json", "stats", "trace_file"))
    pin_system = flags.pop("pin_system")
    sampling, user = flags.pop("sampling"), sampling_settings(flags)
    style = _style(flags)
    if pin_system and style["raw"]:
        raise UsageError("--pin-system has no meaning with --raw, which has no system message")
    config = runtime_config(flags)
    # a mistake should show before a model is loaded
    params = SamplingParams.resolve(user)
    text = prompts.given_prompt(prompt)
    if text is None and as_json:
        raise UsageError("--json needs a PROMPT, or one on stdin: a chat is not one JSON object")

    if trace_file is not None:
        require_writable("--trace", trace_file)

    from headrace.commands.chat import Chat
    from headrace.commands.talk import Talk
    from headrace.runtime.llm import LLM

    with _saved_to(trace_file) as trace, LLM(bundle, config, say=say, trace=trace) as llm:
        if sampling == "model":
            params = SamplingParams.resolve(user, llm.sampling_defaults)
        talk = Talk(llm, params.seeded(), **style)
        if params.seed is None and params.temperature > 0 and not as_json:
            say(f"seed {talk.params.seed}")
        if pin_system:
            say(f"{talk.pin_system()} tokens of the system message are pinned")
        if text is None:
            Chat(talk, stats).run()
        elif as_json:
            measured = talk.finish(talk.ask(text))
            answer = {"model": llm.bundle.manifest.name, **measured.completion.to_json()}
            print(json.dumps(answer, ensure_ascii=False), flush=True)
            talk.print_figures(measured, stats=stats, logprobs=False)
        else:
            measured = talk.finish(talk.ask(text), sys.stdout)
            talk.print_figures(measured, stats=stats)


def require_writable(flag: str, path: Path) -> None:
    """Raises UsageError for a file that cannot be written; leaves none behind."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"{flag}: {path} cannot be written: {error.strerror}") from error
    if is_new:
        path.unlink()


@contextmanager
def _saved_to(path: Path | None) -> Iterator[Trace | None]:
    """A trace that is written when all that fills it has ended, however it ends."""
    if path is None:
        yield None
        return
    trace = Trace()
    try:
        yield trace
    finally:
        trace.save(path)


def _style(flags: dict[str, Any]) -> dict[str, Any]:
    """What `Talk` wants to know; takes it out of `flags`. Raises UsageError."""
    raw, system = flags.pop("raw"), flags.pop("system")
    template, pairs = flags.pop("chat_template"), flags.pop("template_args")
    for flag, value in (("--system", system), ("--chat-template", template)):
        if raw and value is not None:
            raise UsageError(f"{flag} has no meaning with --raw, which uses no chat template")
    if raw and pairs:
        raise UsageError("--template-arg has no meaning with --raw, which uses no chat template")
    values = key_values("--template-arg", pairs)
    return {
        "raw": raw,
        "system": system,
        "template": None if template is None else read_text_file("--chat-template", template),
        "template_args": {key: json_value(value) for key, value in values.items()},
    }
