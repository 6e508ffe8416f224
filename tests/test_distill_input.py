"""Laws of what `headrace distill` is given, none of which needs torch: files, options, a plan."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from tiny_checkpoints import TINY

from headrace.errors import StorageError, UsageError
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.corpus import WHOLE, CorpusFile, apart
from headrace.export.distill.options import DistillOptions, Plan
from headrace.export.distilled_note import DraftNote
from headrace.export.text import Text
from headrace.export.whole import whole_or_absent

PLAN = Plan(
    target={"name": "llama"},
    corpus={},
    layers=1,
    parent=None,
    vocab_keep=None,
    length=128,
    num_texts=8,
    num_held_out=2,
    steps=4,
    seed=0,
    storage="f16",
    threads=1,
    torch="2.9.0",
)


def test_a_pipe_is_no_corpus(tmp_path: Path) -> None:
    """It would be waited for, again and again: windows are read at places."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is no file but a pipe or device"):
        CorpusFile.check(tmp_path / "pipe")


def test_a_link_to_itself_is_no_corpus(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("link")
    with pytest.raises(UsageError, match=r"corpus: .*link"):
        for path in DistillOptions(corpus=(link,)).files():
            CorpusFile.check(path)


def test_a_file_that_is_emptied_meanwhile_ends_the_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("pump p101 started\n" * 9)
    text = Text.of(open_checkpoint(str(TINY / "llama")))
    file = CorpusFile.check(log)
    log.write_text("")
    with pytest.raises(UsageError, match="has become empty"):
        file.windows(text, 2, 64, 0, WHOLE)


def test_a_file_counts_once(tmp_path: Path) -> None:
    """A plan knows files by path: an interrupted run would read it once, the other twice."""
    (tmp_path / "link").symlink_to("log")
    paths = (tmp_path / "log", tmp_path / "other", tmp_path / "link")
    files = DistillOptions(corpus=paths).files()
    assert files == [tmp_path / "log", tmp_path / "other"]
    plan = dataclasses.replace(PLAN, corpus={str(path): "" for path in files})
    plan.check_resumed(DistillOptions(corpus=paths), PLAN.target, PLAN.torch)


def test_files_of_one_name_are_told_apart() -> None:
    paths = [Path("/a/log"), Path("/b/log"), Path("/b/other")]
    assert apart(paths) == ["/a/log", "/b/log", "other"]


@pytest.mark.parametrize(
    ("options", "said"),
    (
        (DistillOptions(tokens=0), "tokens: got 0, allowed are 1 to"),
        (DistillOptions(tokens=10**18), "tokens: got 1000000000000000000, allowed are 1 to"),
        (DistillOptions(seed=1 << 64), "seed: got 18446744073709551616, allowed are 0 to"),
        (DistillOptions(seed=-1), "seed: got -1"),
        (DistillOptions(layers=0), "layers: got 0, at least 1"),
    ),
)
def test_options_out_of_range(options: DistillOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        options.check()


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


@pytest.mark.parametrize("change", ({"steps": "4"}, {"seed": -1}, {"threads": None}, {"more": 1}))
def test_a_damaged_plan_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(dataclasses.asdict(PLAN) | change))
    with pytest.raises(UsageError, match="not an interrupted run of this version"):
        Plan.load(path)


def test_another_torch_does_not_go_on() -> None:
    """Its sums come out differently in the last bits."""
    with pytest.raises(UsageError, match=r"began with torch 2\.9\.0, and 2\.10\.0"):
        PLAN.check_resumed(DistillOptions(), PLAN.target, "2.10.0")


def test_a_file_name_that_is_no_text_is_noted(tmp_path: Path) -> None:
    """At the end of a training it is too late to refuse it."""
    name = os.fsdecode(b"caf\xe9.log")
    sha256 = "0" * 64
    target = {"name": "llama", "embedding_sha256": sha256, "tokenizer_sha256": sha256}
    note = DraftNote(target, (0,), None, {"corpus": {name: sha256}})
    note.write(tmp_path / "draft.json")
    assert DraftNote.read(tmp_path / "draft.json").training["corpus"] == {"caf?.log": sha256}


def test_a_folder_that_came_to_be_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    expected = pytest.raises(StorageError, match="out: has come to be meanwhile")
    with expected, whole_or_absent(out) as folder:
        (folder / "ours").touch()
        out.mkdir()
        (out / "theirs").touch()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["theirs"]
