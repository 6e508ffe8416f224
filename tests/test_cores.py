"""Laws of placement: which cores of a real board's files, which refusals, and where threads end up."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.models.manifest import Bundle
from headrace.runtime import cores
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.cores import Cpus, Placement
from headrace.runtime.llm import LLM
from headrace.runtime.load import load_session, prepare_target
from headrace.runtime.request import SamplingParams

T = TypeVar("T")

CPU_SETS = st.sets(st.integers(0, 300), min_size=1)


def arm(*parts: int) -> str:
    """/proc/cpuinfo of a board with cores of these parts, the paragraph about the board included."""
    paragraphs = [
        f"processor\t: {cpu}\nBogoMIPS\t: 48.00\nFeatures\t: fp asimd evtstrm aes asimddp\n"
        "CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x2\n"
        f"CPU part\t: {part:#x}\nCPU revision\t: 0\n"
        for cpu, part in enumerate(parts)
    ]
    return "\n".join([*paragraphs, "Serial\t\t: 1fa0bc2c51185a02\n"])


def x86(*places: tuple[int, int]) -> str:
    """/proc/cpuinfo of a PC whose logical CPUs lie in these (package, core)."""
    return "\n".join(
        f"processor\t: {cpu}\nvendor_id\t: AuthenticAMD\nphysical id\t: {package}\n"
        f"core id\t\t: {core}\nflags\t\t: fpu sse2 avx2\npower management:\n"
        for cpu, (package, core) in enumerate(places)
    )


A55, A72, A76 = 0xD05, 0xD08, 0xD0B
RK3588 = arm(*[A55] * 4, *[A76] * 4)
RK3588_CAPACITIES = {**dict.fromkeys(range(4), 414), 4: 1024, 5: 1024, 6: 1003, 7: 1003}
"""The two big clusters of one chip need not reach the same clock."""
PI5 = arm(*[A76] * 4)
SMT = x86((0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1))
FOUR, EIGHT = tuple(range(4)), tuple(range(8))


@given(CPU_SETS)
def test_lists_read_as_they_are_written(cpus: set[int]) -> None:
    assert cores.parse_cpu_list(cores.format_cpu_list(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("4-7,0", (0, 4, 5, 6, 7)), ("2", (2,)), (" 1 , 0-2", (0, 1, 2)), ("3-3", (3,))],
)
def test_lists(text: str, cpus: Cpus) -> None:
    assert cores.parse_cpu_list(text) == cpus


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "1,", "7-4", "-1", "4-", "1-2-3", "a", "1.5", "0x1", "٣", "1\n2", "99999"],
)
def test_what_is_no_list_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="allowed are CPUs and rising ranges") as caught:
        cores.parse_cpu_list(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("capacities", [{}, RK3588_CAPACITIES, dict.fromkeys(EIGHT, 1024)])
def test_an_rk3588_computes_on_its_four_big_cores(capacities: dict[int, int]) -> None:
    big = (4, 5, 6, 7)
    assert cores.fast_cores(RK3588, EIGHT, capacities) == big
    for threads, placement in {
        None: Placement(big, 4),
        2: Placement(big, 2),
        4: Placement(big, 4),
        8: Placement(None, 8),
    }.items():
        assert cores.default_placement(RK3588, EIGHT, capacities, threads) == placement


def test_capacities_alone_tell_cores_apart() -> None:
    assert cores.fast_cores("", EIGHT, RK3588_CAPACITIES) == (4, 5, 6, 7)


def test_only_allowed_cores_count() -> None:
    assert cores.fast_cores(RK3588, (1, 2, 5), RK3588_CAPACITIES) == (5,)
    for alike in ((0, 1, 2), (5, 6)):
        assert cores.fast_cores(RK3588, alike, RK3588_CAPACITIES) is None
        assert cores.one_per_core(RK3588, alike) == alike
        placement = cores.default_placement(RK3588, alike, RK3588_CAPACITIES)
        assert placement == Placement(threads=len(alike))


@pytest.mark.parametrize(
    ("cpuinfo", "allowed", "one_each"),
    [
        (SMT, EIGHT, (0, 1, 4, 5)),
        (x86((0, 0), (0, 0)), (0, 1), (0,)),
        (PI5, FOUR, FOUR),
        ("", FOUR, FOUR),
        ("processor\t: none\n\n:\n", FOUR, FOUR),
    ],
)
def test_where_cores_are_alike_onnx_runtime_chooses(
    cpuinfo: str, allowed: Cpus, one_each: Cpus
) -> None:
    capacities = dict.fromkeys(allowed, 1024)
    assert cores.fast_cores(cpuinfo, allowed, {}) is None
    assert cores.one_per_core(cpuinfo, allowed) == one_each
    assert cores.default_placement(cpuinfo, allowed, capacities) == cores.ANYWHERE
    assert cores.default_placement(cpuinfo, allowed, capacities, 3) == Placement(threads=3)


def test_where_cpus_are_kept_from_us_onnx_runtime_is_told_how_many_cores_are_left() -> None:
    assert cores.default_placement(SMT, (2, 4, 6), {}) == Placement(threads=2)


def test_capacities_are_read_where_there_are_some(tmp_path: Path) -> None:
    for cpu, text in {"cpu0": "414\n", "cpu10": "1024\n", "cpu2": "?"}.items():
        (tmp_path / cpu).mkdir()
        (tmp_path / cpu / "cpu_capacity").write_text(text)
    (tmp_path / "cpu3").mkdir()
    (tmp_path / "cpuidle").mkdir()
    assert cores.read_capacities(tmp_path) == {0: 414, 10: 1024}
    assert cores.read_capacities(tmp_path / "none") == {}


def test_onnx_runtime_counts_cpus_from_one_and_not_the_calling_thread() -> None:
    assert cores.affinity_option(Placement((0, 4, 5), 3)) == "1,5,6;1,5,6"
    for nothing in (Placement(), Placement(threads=4), Placement((4, 5), 1)):
        assert cores.affinity_option(nothing) is None


def test_a_placement_is_a_name_of_files() -> None:
    names = {Placement(): "0", Placement(threads=2): "2", Placement((0, 4, 5, 6), 3): "3@0,4-6"}
    assert {placement: str(placement) for placement in names} == names


def test_settings_become_placements() -> None:
    one = str(cores.allowed()[0])
    config = RuntimeConfig(target_cpus=one, draft_cpus=one)
    assert config.target_placement() == Placement((int(one),), 1)
    assert config.draft_placement() == (Placement((int(one),), 1), True)
    assert RuntimeConfig().target_placement() == cores.default_here()
    assert RuntimeConfig(target_threads=1).target_placement().threads == 1
    assert RuntimeConfig(draft_threads=3).draft_placement()[0] == Placement(threads=3)


BOARD_TARGET = Placement((4, 5, 6, 7), 4)


@pytest.mark.parametrize(
    ("cpuinfo", "target", "threads", "cpus", "placement", "shares"),
    [
        (RK3588, BOARD_TARGET, None, None, Placement(None, 1), False),
        (RK3588, BOARD_TARGET, None, (0, 1), Placement((0, 1), 1), False),
        (RK3588, BOARD_TARGET, None, (4, 5), Placement((4, 5), 1), True),
        (RK3588, BOARD_TARGET, 5, None, Placement(None, 5), True),
        (RK3588, Placement((4, 5, 6), 3), 1, (4, 5, 6, 7), Placement((4, 5, 6, 7), 1), False),
        (SMT, Placement(), None, None, Placement(), True),
        (SMT, Placement(threads=3), None, None, Placement(None, 1), False),
        (SMT, Placement(threads=4), None, None, Placement(threads=4), True),
        (SMT, Placement(threads=4), 1, None, Placement(None, 1), True),
        (SMT, Placement(threads=2), None, (0, 2), Placement((0, 2), 1), False),
        (SMT, Placement((0, 1), 2), None, (2, 3), Placement((2, 3), 1), True),
        (SMT, Placement((0, 1), 2), None, (4, 5), Placement((4, 5), 1), False),
    ],
)
def test_a_draft_gets_cores_of_its_own_or_takes_turns(
    cpuinfo: str,
    target: Placement,
    threads: int | None,
    cpus: Cpus | None,
    placement: Placement,
    shares: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(cores, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cores, "allowed", lambda: EIGHT)
    assert cores.beside(target, threads, cpus, at_once=False) == (placement, shares)
    at_once = cores.beside(target, threads, cpus, at_once=True)
    assert at_once == (Placement(cpus, threads or 1), False)


@pytest.mark.parametrize("model", ["target", "draft"])
@pytest.mark.parametrize(
    ("cpus", "threads", "words"),
    [
        ("", None, "cpus: got '', allowed are CPUs"),
        ("1-0", None, "cpus: got '1-0', allowed are CPUs"),
        ("9999", None, "cpus: got 9999, but 9999 cannot be used by this process; choose from "),
        (4, None, "cpus: got 4, allowed is a text"),
        (None, 0, "threads: got 0, allowed are 1 to 256"),
        (None, "2", "threads: got '2', allowed are 1 to 256"),
        ("one", 2, "use fewer threads or list more CPUs"),
    ],
)
def test_refusals_are_one_line(model: str, cpus: object, threads: object, words: str) -> None:
    if cpus == "one":
        cpus = str(cores.allowed()[0])
    settings: dict[str, object] = {f"{model}_cpus": cpus, f"{model}_threads": threads}
    with pytest.raises(UsageError) as caught:
        RuntimeConfig(**settings)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith(f"{model}_") and words in message and "\n" not in message


@pytest.fixture
def two() -> Iterator[Cpus]:
    """Two CPUs that this thread, and the threads it starts, are allowed."""
    cpus = cores.allowed()
    if len(cpus) < 2:
        pytest.skip("only one CPU is allowed here")
    with cores.pinned(cpus[:2]):
        yield cpus[:2]


def started(work: Callable[[], T]) -> tuple[T, list[Cpus]]:
    """What `work` returns, and the CPUs of each thread that it left running."""
    tasks = Path("/proc/self/task")
    before = set(os.listdir(tasks))
    result = work()
    time.sleep(0.05)  # a thread sets its affinity itself
    new = set(os.listdir(tasks)) - before
    return result, [tuple(sorted(os.sched_getaffinity(int(task)))) for task in new]


def test_threads_of_a_session_stay_where_they_were_told(
    two: Cpus, tiny_bundle: Path, shared_cache: Path
) -> None:
    bundle = Bundle.open(tiny_bundle)
    made = prepare_target(bundle, shared_cache, None, lambda message: None)
    for placement, workers in (
        (Placement(two[:1], 2), [two[:1]]),
        (Placement(two[1:], 3), [two[1:]] * 2),
        (Placement(two, 2), [two]),
        (Placement(two, 1), []),
    ):
        session, found = started(partial(load_session, made.model, placement))
        assert found == workers
        del session


def test_a_model_computes_where_it_was_told(
    two: Cpus, tiny_bundle: Path, shared_cache: Path
) -> None:
    both, one = (cores.format_cpu_list(cpus) for cpus in (two, two[1:]))
    texts = set()
    for config, workers in (
        (RuntimeConfig(target_cpus=both, cache=shared_cache), [two]),
        (RuntimeConfig(target_cpus=both, target_threads=1, cache=shared_cache), []),
        (RuntimeConfig(target_cpus=one, cache=shared_cache), []),
    ):
        llm, found = started(partial(LLM, tiny_bundle, config))
        with llm:
            assert found == workers
            texts.add(llm.generate("pump", SamplingParams(seed=1, max_tokens=20)).text)
    assert len(texts) == 1


def test_pinned_ends_where_it_began(two: Cpus) -> None:
    with cores.pinned(two[1:]):
        assert cores.allowed() == two[1:]
        with cores.pinned(None):
            assert cores.allowed() == two[1:]
    assert cores.allowed() == two
    with pytest.raises(KeyError), cores.pinned(two[:1]):
        raise KeyError
    assert cores.allowed() == two


def test_a_cpu_that_has_gone_is_no_reason_to_fail(two: Cpus) -> None:
    with cores.pinned((9999,)):
        assert cores.allowed() == two
