"""Loading a bundle, step by step: its files checked, its tokenizer, its weights made ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort

from headrace.errors import BundleError
from headrace.intact import CheckMemory
from headrace.models.manifest import TARGET, TOKENIZER, Bundle
from headrace.runtime import prepare
from headrace.runtime.cores import Placement
from headrace.runtime.tokenizer import Tokenizer

Say = Callable[[str], None]
"""Told in a few words about what takes long."""


def verify(bundle: Bundle, cache: Path, say: Say) -> None:
    """Raises BundleError unless every file of the bundle is what the manifest says."""
    memory = CheckMemory(cache / "checked.json")
    bundle.verify(
        lambda path, record: memory.is_intact(
            path, record.sha256, lambda: say(f"checking {path.name}")
        )
    )


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    manifest, path = bundle.manifest, bundle.file(TOKENIZER)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    habits = manifest.tokenizer
    return Tokenizer.from_json(
        text,
        chat_template=habits.chat_template,
        bos_id=habits.bos_id,
        eos_ids=habits.eos_ids,
        add_bos=habits.add_bos,
        vocab_size=manifest.config.vocab_size,
    )


def prepare_bundle(bundle: Bundle, cache: Path, threads: int | None, say: Say) -> prepare.Prepared:
    """The target's weights as file pages for this machine (`headrace prepare`)."""
    return prepare.prepare(
        bundle.file(TARGET),
        cache=cache / "prepared",
        identity=bundle.target_identity(),
        threads=threads,
        progress=say,
    )


def load_session(model: Path, placement: Placement) -> ort.InferenceSession:
    options = prepare.session_options(placement, prepared=True)
    try:
        return ort.InferenceSession(str(model), options, providers=list(prepare.PROVIDERS))
    except Exception as error:
        raise BundleError(f"{model}: ONNX Runtime cannot load it: {error}") from error
