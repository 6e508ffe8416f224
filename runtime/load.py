"""Loading a bundle, step by step: its files checked, its tokenizer, its weights made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from headrace.errors import BundleError
from headrace.intact import CheckMemory
from headrace.models.manifest import DRAFT, TARGET, TOKENIZER, Bundle
from headrace.models.vocab_map import load_vocab_map
from headrace.runtime import prepare
from headrace.runtime.backend import LaneBackend
from headrace.runtime.candidate import Candidate, Opened
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.cores import Placement
from headrace.runtime.draft import DraftModel, draft_capacity, draft_layout
from headrace.runtime.drafter import MAX_FAILURES, Drafter
from headrace.runtime.on_npu import npu_candidates
from headrace.runtime.ort import OrtBackend
from headrace.runtime.pace import Pace, PassCosts, costs_of, measured_past
from headrace.runtime.prior import SharedIndex
from headrace.runtime.prior_file import PriorFile
from headrace.runtime.speculate import Speculation
from headrace.runtime.tokenizer import Tokenizer
from headrace.runtime.trace import Trace

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


def prepare_target(bundle: Bundle, cache: Path, threads: int | None, say: Say) -> prepare.Prepared:
    """The target's weights as file pages for this machine (`headrace prepare`)."""
    return _prepare(bundle.file(TARGET), bundle.target_identity(), cache, threads, say)


def prepare_draft(bundle: Bundle, cache: Path, threads: int | None, say: Say) -> prepare.Prepared:
    """The same of the draft's; there must be one."""
    return _prepare(bundle.file(DRAFT), bundle.draft_identity(), cache, threads, say)


def _prepare(
    graph: Path, identity: str, cache: Path, threads: int | None, say: Say
) -> prepare.Prepared:
    return prepare.prepare(
        graph, cache=cache / "prepared", identity=identity, threads=threads, progress=say
    )


def load_session(
    model: Path, placement: Placement, *, takes_turns: bool = False
) -> ort.InferenceSession:
    """`takes_turns`: with another session, in turns. Raises BundleError."""
    options = prepare.session_options(placement, takes_turns=takes_turns, prepared=True)
    try:
        return ort.InferenceSession(str(model), options, providers=list(prepare.PROVIDERS))
    except Exception as error:
        raise BundleError(f"{model}: ONNX Runtime cannot load it: {error}") from error


@dataclass(frozen=True)
class Loader:
    """What it takes to load a part of a bundle."""

    bundle: Bundle
    cache: Path
    config: RuntimeConfig
    say: Say

    def costs(
        self, backend: LaneBackend, folder: Path, placement: Placement, *, takes_turns: bool
    ) -> PassCosts:
        """Measured once for a prepared model, and remembered beside it."""
        past, turns = measured_past(backend.facts), "-turns" if takes_turns else ""
        return costs_of(backend, folder / f"costs-{placement}-{past}{turns}.json", self.say)

    @property
    def has_draft(self) -> bool:
        """Whether a draft will be there to ask."""
        config = self.config
        return not (
            self.bundle.draft is None or config.draft_device == "none" or config.speculate == "off"
        )

    def corpus(self) -> PriorFile | None:
        """The prior that the config names. Raises BundleError, TokenizerMismatchError."""
        if self.config.prior is None:
            return None
        sha256 = self.bundle.manifest.files[TOKENIZER].sha256
        return PriorFile.open(Path(self.config.prior), sha256)

    def speculation(
        self,
        costs: PassCosts,
        tokenizer: Tokenizer,
        corpus: PriorFile | None,
        trace: Trace | None,
    ) -> Speculation:
        """All sources of proposals. Raises as `LLM` does."""
        pace = Pace(costs)
        drafter = None
        if self.has_draft:
            drafter = self._drafter(pace, tokenizer.ends_segment, trace)
        return Speculation(
            pace, self.config.speculate, tokenizer.ends_segment, SharedIndex(), corpus, drafter
        )

    def _drafter(
        self, pace: Pace, is_boundary: Callable[[int], bool], trace: Trace | None
    ) -> Drafter:
        return Drafter(
            self._candidates(),
            pace.acceptance,
            is_boundary,
            defer=self.config.defer,
            trace=trace,
            log=self.say,
        )

    def _candidates(self) -> list[Candidate]:
        """Places for the draft: the NPU if there is one, and the CPU, which stands in for it.

        Raises NpuError for an NPU that is asked for by name and cannot be had.
        """
        device, found = self.config.draft_device, []
        if device != "cpu":
            found += npu_candidates(self.bundle, self.config, self.cache, self.say)
        try:
            return [*found, Candidate("cpu", self._on_cpu(), patience=MAX_FAILURES)]
        except BaseException:
            for candidate in found:
                candidate.close()
            raise

    def _on_cpu(self) -> Opened:
        record = self.bundle.draft
        assert record is not None
        placement, takes_turns = self.config.draft_placement()
        prepared = prepare_draft(self.bundle, self.cache, placement.threads, self.say)
        backend = OrtBackend(
            load_session(prepared.model, placement, takes_turns=takes_turns),
            record.config,
            kv=record.kv,
            lanes=self.config.lanes,
            capacity=draft_capacity(record.config),
            cpus=placement.cpus,
        )
        layout, vocab_map = draft_layout(record.config), load_vocab_map(self.bundle)
        model = DraftModel(backend, record.config, record.kv, vocab_map, layout)
        costs = self.costs(backend, prepared.folder, placement, takes_turns=takes_turns)
        return Opened(model, costs, takes_turns)
