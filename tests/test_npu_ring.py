"""A draft's ring on the NPU drafts what one on the CPU does."""

from __future__ import annotations

import random

import onnxruntime as ort
import pytest
from npu_bundles import GEOMETRY, with_npu
from npu_double import Double, opened
from tiny_checkpoints import TINY
from tiny_pairs import pair

from headrace.models.manifest import DRAFT, NPU, NPU_EMBEDDINGS, NPU_IO, Bundle
from headrace.models.npu_io import NpuFiles, NpuIo
from headrace.models.vocab_map import load_vocab_map
from headrace.runtime.backend import LaneBackend
from headrace.runtime.draft import DraftLane, DraftModel, frontier
from headrace.runtime.guess import Guesser
from headrace.runtime.ort import OrtBackend
from headrace.runtime.prepare import session_options
from headrace.runtime.request import SamplingParams
from headrace.runtime.ring import RingLayout
from headrace.runtime.sampling import Sampler


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    bundle = pair(tmp_path_factory.mktemp("twin") / "bundle", TINY / "llama")
    return with_npu(bundle, TINY / "llama")


def lane_over(backend: LaneBackend, twin: Bundle) -> DraftLane:
    record, g = twin.draft, GEOMETRY
    assert record is not None
    layout = RingLayout(g.sinks, g.window, g.unit)
    model = DraftModel(backend, record.config, "f16", load_vocab_map(twin), layout)
    lane = DraftLane(model, 0)
    sampler = Sampler(SamplingParams(), [], record.config.vocab_size)
    lane.begin(Guesser(sampler, "coupled", model.head))
    return lane


@pytest.mark.parametrize("seed", range(3))
def test_a_ring_drafts_as_it_does_on_the_cpu(twin: Bundle, double: Double, seed: int) -> None:
    """Over evictions, with trees taken up in part: the same tokens wherever the choice is clear,
    which is where the best is a tenth likelier than the next; probabilities to a few percent.
    """
    record = twin.draft
    assert record is not None
    session = ort.InferenceSession(
        str(twin.file(DRAFT)), session_options(), providers=["CPUExecutionProvider"]
    )
    files = NpuFiles(
        twin.file(NPU), twin.file(NPU_EMBEDDINGS), NpuIo.load(twin.file(NPU_IO)), record.config
    )
    chance, num_clear, num_all = random.Random(seed), 0, 0
    capacity = GEOMETRY.main + GEOMETRY.tail
    with opened(files, double) as backend:
        on_cpu = OrtBackend(session, record.config, kv=record.kv, lanes=1, capacity=capacity)
        ours, theirs = (lane_over(b, twin) for b in (backend, on_cpu))
        text = [chance.randrange(280) for _ in range(chance.randint(1, 60))]
        while len(text) < 360:
            for lane in (ours, theirs):
                lane.follow(text[-GEOMETRY.window :], len(text))
            assert ours.state == theirs.state
            for _ in range(chance.randint(0, 3)):
                # What is drafted is drafted by both, so that their lanes stay alike.
                outcomes = list(frontier(theirs))
                chosen = chance.sample(outcomes, min(len(outcomes), chance.randint(1, 4)))
                chosen = chosen[: GEOMETRY.nodes - len(theirs.nodes)]
                for lane in (ours, theirs):
                    if chosen:
                        lane.compute([(node, guess, 0.5) for node, guess, _ in chosen])
            for mine, other in zip(ours.nodes, theirs.nodes, strict=True):
                best, second = other.guesses[:2]
                num_all += 1
                assert mine.guesses[0].probability == pytest.approx(best.probability, rel=0.05)
                if best.probability > 1.1 * second.probability:
                    num_clear += 1
                    assert mine.guesses[0].token_id == best.token_id
            node = chance.randrange(len(theirs.nodes))
            text += theirs.path(node)[: chance.randint(0, 9)]
            text += [chance.randrange(280) for _ in range(chance.randint(1, 3))]
        assert ours.state.num_evictions > 7
        on_cpu.close()
    assert num_clear > 0.5 * num_all
