"""Edges of `headrace distill` with a tiny target: what is refused, and what is not done twice."""

from __future__ import annotations

import fcntl
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import TINY
from tiny_distilled import Enough, StopsAtTraining
from tiny_pairs import copy_of, edit_json

from headrace.errors import SourceError, UnsupportedModelError, UsageError
from headrace.export.checkpoint import open_checkpoint
from headrace.export.distill.evaluate import evaluate
from headrace.export.distill.labels import Labelled, Shelf
from headrace.export.distill.options import DistillOptions
from headrace.export.distill.run import distill, work_folder
from headrace.export.distill.writing import ChatForm
from headrace.export.report import Silent
from headrace.export.text import Text
from headrace.models.plantlog import sample_log

SOURCE = str(TINY / "llama")
SHORT = DistillOptions(layers=1, tokens=1)
RESUMED = DistillOptions(resume=True)


def form(template: str, tmp_path: Path) -> ChatForm | None:
    folder = copy_of("llama", tmp_path / "target")
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    return ChatForm.of(Text.of(open_checkpoint(str(folder))))


@pytest.mark.parametrize(
    "template",
    (
        "{{ raise_exception('one question only') if messages|length > 1 }}",
        "{% set q, a, r = messages %}{{ q.content }}:{{ q.content }}|{{ a.content }}|{{ r.content }}",
        "{{ messages[2].content }}{{ messages[0].content }}{{ messages[1].content }}",
    ),
)
def test_a_template_that_is_no_plain_frame_is_left_alone(template: str, tmp_path: Path) -> None:
    assert form(template, tmp_path) is None


def test_a_template_does_not_know_the_day(tmp_path: Path) -> None:
    """A run that is resumed a day later would write other texts."""
    opening = "{{ strftime_now('%Y') }}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    found, text = form(opening, tmp_path), Text.of(open_checkpoint(SOURCE))
    assert found is not None and found.opening[-6:] == text.pieces("2026<")[-6:]


def test_a_small_target_needs_no_layers(tmp_path: Path) -> None:
    assert distill(SOURCE, tmp_path / "d", DistillOptions(tokens=1), Silent()).layers == (0, 1)


def test_a_context_too_short_is_refused(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "target")
    edit_json(folder / "config.json", max_position_embeddings=7)
    with pytest.raises(UnsupportedModelError, match="has 7 positions"):
        distill(str(folder), tmp_path / "d", SHORT, Silent())
    assert not work_folder(tmp_path / "d").exists()


def test_a_damaged_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(Enough):
        distill(SOURCE, tmp_path / "d", SHORT, StopsAtTraining())
    text = next((work_folder(tmp_path / "d") / "texts").glob("*.safetensors"))
    text.write_bytes(text.read_bytes()[:100])
    with pytest.raises(SourceError, match=f"{text.name}: damaged"):
        distill(SOURCE, tmp_path / "d", RESUMED, Silent())
    text.unlink()
    distill(SOURCE, tmp_path / "d", RESUMED, Silent())


def test_two_do_not_work_on_one_run(tmp_path: Path) -> None:
    with pytest.raises(Enough):
        distill(SOURCE, tmp_path / "d", SHORT, StopsAtTraining())
    with (work_folder(tmp_path / "d") / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process is at it"):
            distill(SOURCE, tmp_path / "d", RESUMED, Silent())


def test_a_link_to_nowhere_is_something(tmp_path: Path) -> None:
    (tmp_path / "d").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists already"):
        distill(SOURCE, tmp_path / "d", SHORT, Silent())


def test_evaluation_keeps_files_of_one_name_apart(tmp_path: Path) -> None:
    distill(SOURCE, tmp_path / "d", SHORT, Silent())
    files = [tmp_path / name / "log" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(sample_log())
    names = [each.name for each in evaluate(SOURCE, tmp_path / "d", files, Silent())]
    assert names == [*map(str, files), "chat answers"]


def test_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path / "llama")
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    distill(str(folder), tmp_path / "d", SHORT, Silent())
    with pytest.raises(UsageError, match="llama does not chat; give texts"):
        evaluate(str(folder), tmp_path / "d", [], Silent())


def test_what_is_read_of_texts_does_not_stay_in_memory(tmp_path: Path) -> None:
    """A file kept open and mapped would stay, with every page of it that was read."""
    ids, tops = np.ones((32, 64), np.int32), np.ones((32, 64, 32), np.int32)
    halves = (tops.astype(np.float16), np.ones((32, 64, 8), np.float16))
    Labelled(ids, tops, *halves).save(tmp_path / "text.safetensors")
    shelf = Shelf([tmp_path / "text.safetensors"])
    assert len(shelf.take(list(range(len(shelf)))).ids) == 32
    assert "text.safetensors" not in Path("/proc/self/maps").read_text()
