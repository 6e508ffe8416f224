"""A run of `headrace distill` on a tiny target: what interrupts it changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tiny_checkpoints import TINY
from tiny_distilled import Enough, StopsAtTraining

from headrace.errors import SourceError, UsageError
from headrace.export.distill.evaluate import MAX_DEPTH, evaluate
from headrace.export.distill.options import DistillOptions
from headrace.export.distill.run import distill, work_folder
from headrace.export.report import Silent
from headrace.models.plantlog import sample_log

SOURCE = str(TINY / "llama")
OPTIONS = DistillOptions(layers=1, vocab_keep=270, tokens=24_000, seed=3)


COPYING = "gemma3_scalar"
"""A target of which three layers are not all, so that a student is taught to copy."""


def content(folder: Path) -> dict[str, str]:
    """Of what decides the draft: all but the times in the card and in draft.json."""
    files = ("model.safetensors", "config.json")
    hashes = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    note = json.loads((folder / "draft.json").read_text())
    log = [{k: v for k, v in line.items() if k != "seconds"} for line in note["training"]["log"]]
    return {**hashes, "head_ids": str(note["head_ids"]), "log": json.dumps(log)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole") / "draft"
    distill(SOURCE, out, OPTIONS, Silent())
    return out


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run that has taught its student to copy."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("copying") / "draft"
    distill(str(TINY / COPYING), out, dataclasses.replace(OPTIONS, layers=3), Silent())
    assert json.loads((out / "draft.json").read_text())["training"]["copying"]
    return out


def command(source: str, layers: int, out: Path, *more: str) -> list[str]:
    options = ["--layers", str(layers), "--vocab-keep", "270", "--tokens", "24000", "--seed", "3"]
    asked = ["--resume"] if "--resume" in more else options
    return [sys.executable, "-c", _OFTEN_SAVED, "distill", source, "-o", str(out), *asked]


_OFTEN_SAVED = """
import sys
from headrace.cli import main
from headrace.export.distill import training

training.SAVE_EVERY_S = 0.2
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGKILL))
@pytest.mark.parametrize(("name", "layers"), (("llama", 1), (COPYING, 3)))
def test_interrupted_equals_uninterrupted(
    name: str,
    layers: int,
    number: signal.Signals,
    whole: Path,
    copying: Path,
    tmp_path: Path,
) -> None:
    """At random moments, again and again, until it is done: the same weights, bit for bit."""
    whole = copying if name == COPYING else whole
    run_it = partial(command, str(TINY / name), layers)
    # machines differ by a factor of ten: a first moment within half a training is before its end
    trained = json.loads((whole / "draft.json").read_text())["training"]["log"][-1]["seconds"]
    out, draws = tmp_path / "draft", random.Random(int(number))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments, interrupted, work = run_it(out), 0, work_folder(out)
    while not out.exists():
        with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE) as run:
            # the first time amid the texts, then twice in the training, behind a save of that run
            if not interrupted:
                _await(run, work.exists)
                most = trained / 2
            elif interrupted < 3:
                before = _saved(work)
                _await(run, partial(_is_saved, work, before))
                most = 0.3
            else:
                most = None
            try:
                run.wait(most and draws.uniform(0, most))
            except subprocess.TimeoutExpired:
                run.send_signal(number)
                interrupted += 1
            _, error = run.communicate()
        assert out.exists() or run.returncode in (130, -number), error
        arguments = run_it(out, "--resume")
    assert interrupted
    assert not work.exists()
    assert content(out) == content(whole)


def _await(run: subprocess.Popen[bytes], happens: Callable[[], bool]) -> None:
    """Or the end of the run."""
    patience = time.monotonic() + 300
    while not happens() and run.poll() is None:
        assert time.monotonic() < patience
        time.sleep(0.02)


def _is_saved(work: Path, before: int | None) -> bool:
    return _saved(work) != before


def _saved(work: Path) -> int | None:
    """When the training was last saved."""
    try:
        return (work / "training.pt").stat().st_mtime_ns
    except FileNotFoundError:
        return None


def test_another_seed_is_another_draft(whole: Path, tmp_path: Path) -> None:
    distill(SOURCE, tmp_path / "draft", dataclasses.replace(OPTIONS, seed=4), Silent())
    assert content(tmp_path / "draft") != content(whole)


def test_it_learns(whole: Path) -> None:
    log = json.loads((whole / "draft.json").read_text())["training"]["log"]
    assert log[-1]["overlap"] > log[0]["overlap"] + 0.01
    assert log[-1]["loss"] < log[0]["loss"]


def test_transformers_reads_the_layers(whole: Path) -> None:
    """With the target's embeddings and head put in, it is a model like any other there."""
    config = transformers.AutoConfig.from_pretrained(whole)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {k: torch.from_numpy(v) for k, v in load_file(whole / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) == {"model.embed_tokens.weight", "lm_head.weight"} and not unexpected


def test_evaluation(whole: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(sample_log())
    for figures in evaluate(SOURCE, whole, [log], Silent()):
        assert 0 < figures.overlap < figures.coverage <= 1.0001
        assert 0 < figures.coupled < 1
        assert len(figures.by_depth) == MAX_DEPTH
        assert list(figures.by_depth) == sorted(figures.by_depth, reverse=True)
        assert figures.tokens_per_pass(1) == 1 + figures.by_depth[0]


def test_a_target_is_its_own_best_draft(tmp_path: Path) -> None:
    """All layers, no training to speak of: everything is accepted."""
    out = tmp_path / "draft"
    distill(SOURCE, out, DistillOptions(layers=2, tokens=1), Silent())
    (tmp_path / "log").write_text(sample_log())
    for figures in evaluate(SOURCE, out, [tmp_path / "log"], Silent()):
        assert figures.overlap > 0.97 and figures.top1 > 0.9 and figures.coupled > 0.9
        assert figures.by_depth[-1] > 0.6


CORPORA = {
    "one line": b"pump p101 started",
    "without a newline": b"x" * 100_000,
    "windows": "Ventil ge\u00f6ffnet\r\n".encode() * 400,
    "one of two is tiny": b"a\n",
}


@pytest.mark.parametrize("name", CORPORA)
def test_odd_corpora_work(name: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(CORPORA[name])
    (tmp_path / "other").write_text(sample_log())
    files = (tmp_path / "log", tmp_path / "other") if "two" in name else (tmp_path / "log",)
    options = DistillOptions(corpus=files, layers=1, tokens=2_000)
    done = distill(SOURCE, tmp_path / "draft", options, Silent())
    assert np.isfinite(done.log[-1].loss)


@pytest.mark.parametrize(
    ("data", "said"),
    (
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"ok\n" * 9 + b"\xff\xfe\x00", "byte 27"),
        (b"ok\n" + "\u00e9".encode()[:1], "byte 3"),
    ),
)
def test_unusable_corpora_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(data)
    options = DistillOptions(corpus=(tmp_path / "log",), layers=1, tokens=2_000)
    with pytest.raises(UsageError, match=said):
        distill(SOURCE, tmp_path / "draft", options, Silent())
    assert not work_folder(tmp_path / "draft").exists()


def test_a_corpus_far_larger_than_memory(tmp_path: Path) -> None:
    """8 GiB with nothing in them but a line at each end; the process may have a sixth of that."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.write(b"pump p101 started at 10 bar\n" * 50)
        file.truncate(1 << 33)
        file.seek(0, os.SEEK_END)
        file.write(b"\npump p101 stopped\n")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from headrace.export.distill.corpus import WHOLE, CorpusFile\n"
        "from headrace.export.checkpoint import open_checkpoint\n"
        "from headrace.export.text import Text\n"
        "text = Text.of(open_checkpoint(sys.argv[1]))\n"
        "file = CorpusFile.check(Path(sys.argv[2]))\n"
        "assert file.windows(text, 8, 64, 0, WHOLE).shape == (8, 64)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, SOURCE, str(log)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20


def test_resuming_something_else_is_refused(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"

    with pytest.raises(Enough):
        distill(SOURCE, out, OPTIONS, StopsAtTraining())
    with pytest.raises(UsageError, match="an interrupted run; go on with --resume"):
        distill(SOURCE, out, OPTIONS, Silent())
    for options, said in (
        (DistillOptions(resume=True, layers=2), "layers is 1"),
        (DistillOptions(resume=True, parent=whole), "goes on from no draft"),
        (DistillOptions(resume=True, tokens=5), "settled already"),
        (DistillOptions(resume=True, corpus=(TINY,)), "cannot be read"),
    ):
        with pytest.raises(UsageError, match=said):
            distill(SOURCE, out, options, Silent())
    with pytest.raises(UsageError, match="their weights or tokenizers differ"):
        distill(str(TINY / "qwen2"), out, DistillOptions(resume=True), Silent())
    with pytest.raises(UsageError, match="no interrupted run"):
        distill(SOURCE, tmp_path / "other", DistillOptions(resume=True), Silent())


def test_going_on_from_a_draft(whole: Path, tmp_path: Path) -> None:
    """It begins where that one has ended, with its head and layers, and says where it comes from."""
    more = DistillOptions(parent=whole, tokens=4000, seed=5)
    distill(SOURCE, tmp_path / "draft", more, Silent())
    distill(SOURCE, tmp_path / "fresh", dataclasses.replace(OPTIONS, tokens=4000, seed=5), Silent())
    note, fresh, before = (
        json.loads((folder / "draft.json").read_text())
        for folder in (tmp_path / "draft", tmp_path / "fresh", whole)
    )
    assert note["head_ids"] == before["head_ids"] and note["layers"] == before["layers"]
    assert note["training"]["parent"]["trained_tokens"] == before["training"]["trained_tokens"]
    # on the same texts, what the parent has learned is not to be learned again
    first, last = before["training"]["log"][0], before["training"]["log"][-1]
    begun, anew = note["training"]["log"][0], fresh["training"]["log"][0]
    assert anew["loss"] - begun["loss"] > (first["loss"] - last["loss"]) / 2
    assert "goes on from | draft (" in (tmp_path / "draft" / "README.md").read_text()


def test_going_on_from_what_cannot_be_gone_on_from(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    with pytest.raises(UsageError, match="distilled from"):
        distill(str(TINY / "qwen2"), out, DistillOptions(parent=whole), Silent())
    with pytest.raises(SourceError, match=r"it has no draft\.json"):
        distill(SOURCE, out, DistillOptions(parent=tmp_path), Silent())
    with pytest.raises(UsageError, match="has its layers"):
        distill(SOURCE, out, DistillOptions(parent=whole, layers=2), Silent())
    parent = shutil.copytree(whole, tmp_path / "parent")
    with pytest.raises(Enough):
        distill(SOURCE, out, DistillOptions(parent=parent, tokens=4000), StopsAtTraining())
    with pytest.raises(UsageError, match=r"goes on from .*parent, got "):
        distill(SOURCE, out, DistillOptions(parent=whole, resume=True), Silent())
    note = parent / "draft.json"
    note.write_text(note.read_text().replace('"steps"', '"stops"'))
    with pytest.raises(UsageError, match="parent has changed since the run began"):
        distill(SOURCE, out, DistillOptions(resume=True), Silent())


class _Stages(Silent):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def stage(self, title: str, steps: int | None = None) -> None:
        self.seen.append(title)


def test_what_copies_is_not_taught_again(copying: Path, tmp_path: Path) -> None:
    source, stages = str(TINY / COPYING), _Stages()
    more = DistillOptions(parent=copying, tokens=1000)
    distill(source, tmp_path / "draft", more, stages)
    assert "training" in stages.seen and "teaching it to copy" not in stages.seen
    assert json.loads((tmp_path / "draft" / "draft.json").read_text())["training"]["copying"]
