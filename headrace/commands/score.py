"""`headrace score`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from headrace.commands import prompts
from headrace.commands.flags import read_text_file, runtime_config, runtime_flags
from headrace.commands.terminal import print_facts, say
from headrace.errors import UsageError


@click.command(name="score")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@runtime_flags(
    "ctx", "lanes", "pool", "target_threads", "target_cpus", "exactness", "ram", "reserve"
)
@click.option("--tokens", is_flag=True, help="Print each token's log-probability too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, tokens included.")
def command(bundle: Path, file: Path | None, tokens: bool, as_json: bool, **flags: Any) -> None:
    """Measure how well a model expects a text.

    The text is FILE, or else stdin. Prints its perplexity under the model of BUNDLE and the sum
    of its tokens' natural-log probabilities, each after the tokens before it.
    """
    # nothing is generated, so nothing needs to be measured for speculation
    config = dataclasses.replace(runtime_config(flags), speculate="off")
    if file is None or str(file) == prompts.STDIN:
        text = prompts.read_stdin("the text on stdin")
    else:
        text = read_text_file("FILE", file)
    if not text:
        raise UsageError("the text is empty; a score needs at least two tokens")

    from headrace.commands.figures import print_logprobs
    from headrace.runtime.llm import LLM

    with LLM(bundle, config, say=say) as llm:
        score = llm.score(text)
        name = llm.bundle.manifest.name
    if as_json:
        print(json.dumps({"model": name, **score.to_json()}, ensure_ascii=False))
        return
    if tokens:
        print_logprobs(score.tokens)
    print_facts(
        "",
        [
            ("tokens", f"{len(score.tokens):,}"),
            ("total log-probability", f"{score.total_logprob:.4f}"),
            ("perplexity", f"{score.perplexity:.4f}"),
        ],
    )
