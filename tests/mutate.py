"""Are the NPU path's tests any good? Mutates the code, one place at a time, and runs them.

    python tests/mutate.py [--jobs 2] [--only TEXT] [--list]

Every flush removed, every stride of a layout shifted by one element, every flag of the runtime's left
out, every other call and assignment of the path dropped, every comparison made strict or lax, and
every step of a call's clean-up skipped. Exits with 1 if a mutant survives that is not known to do no
harm. The repository is not touched: a child process imports the mutated text instead of the file.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent
NPU = TESTS.parent / "npu"

SUITES = {
    "backend.py": ("test_npu_probe.py", "test_npu_backend.py", "test_npu_open.py"),
    "librknnrt.py": ("test_npu_backend.py", "test_npu_open.py", "test_npu_staging.py"),
    "passes.py": ("test_npu_probe.py", "test_npu_backend.py"),
    "staging.py": ("test_npu_staging.py", "test_npu_backend.py", "test_npu_ring.py"),
    "variants.py": ("test_npu_backend.py", "test_npu_open.py"),
}
"""Tests of each file."""

FAST = "not qwen and not gathered[llama-120] and not equal_each_alone[1] and not equal_each_alone[2] and not cpu[1]"
"""Of those that there are several of, some."""

PATIENCE = 6.0
"""A mutant whose tests take so many times longer than without it hangs, which is noticed."""

FLUSHES = {"to_device", "from_device", "_to_device", "_from_device", "_sync"}

_DROPPED = "they are only let go; `_held` and the stack are what counts"
HARMLESS = {
    "backend.py no call: self._lanes.clear()": _DROPPED,
    "backend.py no call: self._variants.clear()": _DROPPED,
    "passes.py comparison: error <= probe.tolerance": "no error is exactly as large",
    "passes.py comparison: w < len(ids) - past": "it cuts the probe in another way",
    "staging.py comparison: plane < most == -(-plane // 4) * 4": "as it is where both are alike",
    "staging.py comparison: self.table.num_free < len(spilled)": "it makes room a little earlier",
    "staging.py comparison: slot < past": "slots from `past` on were released before",
    "passes.py no assignment: sees[num:, g.main] = True": (
        "results of these rows are not used, and a softmax of nothing but masks is a number"
    ),
}
"""Mutants that change nothing a test could see, with the reason."""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    kind: str
    what: str
    """The code that was changed, in one line."""
    source: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind}: {self.what}"


# -- Making them ----------------------------------------------------------------------------------

Place = tuple[str, ast.AST, Callable[[], None]]
"""Kind of mutant, the node, and how to change it."""


def mutants(file: str) -> Iterator[Mutant]:
    """Each is of a tree of its own: places are found again by their number."""
    text = (NPU / file).read_text()
    for number, (kind, node, _) in enumerate(places(ast.parse(text))):
        tree = ast.parse(text)
        _, _, change = list(places(tree))[number]
        what = " ".join(ast.unparse(node).split())
        change()
        yield Mutant(file, getattr(node, "lineno", 0), kind, what[:90], ast.unparse(tree))


def unmutated(file: str) -> Mutant:
    return Mutant(file, 0, "none", "", ast.unparse(ast.parse((NPU / file).read_text())))


def places(tree: ast.AST) -> Iterator[Place]:
    """Function by function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            yield from _statements(function)
            yield from _expressions(function)


def _statements(function: ast.FunctionDef) -> Iterator[Place]:
    for owner in _own_nodes(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(owner, field, None)
            if not isinstance(block, list):
                continue
            for i, statement in enumerate(block):
                kind = _kind(statement)
                if kind == "no assignment" and function.name == "__init__":
                    continue  # the first test that asks for it would tell
                if kind == "no call" and block is function.body and _does_one_thing(function):
                    continue  # it is dropped where it is called
                if kind is not None:

                    def drop(block: list[ast.stmt] = block, i: int = i) -> None:
                        block[i] = ast.copy_location(ast.Pass(), block[i])

                    yield kind, statement, drop


def _does_one_thing(function: ast.FunctionDef) -> bool:
    return len(function.body) - (ast.get_docstring(function) is not None) == 1


def _kind(statement: ast.stmt) -> str | None:
    """What dropping a statement is called; None for one that is not dropped."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
        return "no flush" if name in FLUSHES else "no call"
    if isinstance(statement, ast.AugAssign):
        return None if "counters" in ast.unparse(statement.target) else "no assignment"
    if isinstance(statement, ast.Assign):
        stored = isinstance(statement.targets[0], ast.Attribute | ast.Subscript)
        return "no assignment" if stored else None
    return None


def _expressions(function: ast.FunctionDef) -> Iterator[Place]:
    for node in _own_nodes(function):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:

            def swap(node: ast.Compare = node) -> None:
                node.ops[0] = SWAPPED[type(node.ops[0])]()

            yield "comparison", node, swap
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "strides":
            assert isinstance(node.value, ast.Tuple)
            for i, stride in enumerate(node.value.elts):

                def shift(value: ast.Tuple = node.value, i: int = i) -> None:
                    one = ast.parse("dtype.itemsize", mode="eval").body
                    value.elts[i] = ast.BinOp(value.elts[i], ast.Add(), one)

                yield f"stride {i} + 1", stride, shift
        if isinstance(node, ast.BinOp) and ast.unparse(node.right).startswith("Flag."):

            def leave_out(node: ast.BinOp = node) -> None:
                node.right = ast.Constant(0)

            yield "no flag", node.right, leave_out


SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Without those of functions within it, and without assertions: they are no behaviour."""
    left: list[ast.AST] = [function]
    while left:
        node = left.pop(0)
        yield node
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.Assert):
                left.append(child)


# -- Running them ---------------------------------------------------------------------------------


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a text."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self._mutant = f"headrace.npu.{Path(mutant.file).stem}", mutant

    def find_spec(
        self, fullname: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(NPU / self._mutant.file))

    def exec_module(self, module: ModuleType) -> None:
        code = compile(self._mutant.source, self._mutant.file, "exec")
        exec(code, module.__dict__)  # noqa: S102  our own text


def preload(folder: Path) -> None:
    """What takes long, once for all children: libraries, and the double."""
    sys.path[:0] = [str(TESTS), str(TESTS / "oracle")]
    os.chdir(TESTS.parent)
    import hypothesis
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import pytest  # noqa: F401
    from librknnrt import build

    import headrace.export.build
    import headrace.runtime.llm  # noqa: F401

    library = build.build(folder)
    build.build = lambda folder, *more: library
    # Shrinking a failure takes minutes, and nobody reads it.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutate", phases=phases, database=None, derandomize=True, report_multiple_bugs=False
    )
    hypothesis.settings.load_profile("mutate")
    loaded = [name for name in sys.modules if name.startswith("headrace.npu.")]
    assert not loaded, f"{loaded} would not be mutated"


def run_tests(mutant: Mutant | None, log: Path) -> int:
    """In a child: the exit code of pytest; of all tests, and of the text as it is, without one."""
    import pytest

    for each in [mutant] if mutant is not None else map(unmutated, SUITES):
        sys.meta_path.insert(0, Finder(each))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        every = dict.fromkeys(name for suite in SUITES.values() for name in suite)
        suite = every if mutant is None else SUITES[mutant.file]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", FAST]
        return int(pytest.main([*options, *(str(TESTS / name) for name in suite)]))


@dataclass
class Child:
    mutant: Mutant | None
    pid: int
    log: Path
    began: float

    @classmethod
    def start(cls, mutant: Mutant | None, log: Path) -> Child:
        pid = os.fork()
        if pid == 0:
            code = 99
            with contextlib.suppress(BaseException):
                code = run_tests(mutant, log)
            os._exit(code)
        return cls(mutant, pid, log, time.monotonic())

    def ended(self, most_s: float) -> str | None:
        """How: survived, killed, hung after `most_s`; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        if time.monotonic() - self.began < most_s:
            return None
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return "hung"


def seconds_without(folder: Path) -> float | None:
    """What the tests take without a mutant; None, with their words, if they fail."""
    sound = Child.start(None, folder / "sound.log")
    while (how := sound.ended(600)) is None:
        time.sleep(0.05)
    if how == "survived":
        return time.monotonic() - sound.began
    print(sound.log.read_text()[-3000:], "the tests fail without a mutant", sep="\n")
    return None


def judge(chosen: Sequence[Mutant], jobs: int, folder: Path, most_s: float) -> dict[Mutant, str]:
    """How the tests of each ended."""
    found: dict[Mutant, str] = {}
    left, running = list(chosen), list[Child]()
    while left or running:
        while left and len(running) < jobs:
            running.append(Child.start(left.pop(0), folder / f"{len(left)}.log"))
        for child in list(running):
            how = child.ended(most_s)
            if how is not None and child.mutant is not None:
                running.remove(child)
                found[child.mutant] = how
                print(f"{how:9}{time.monotonic() - child.began:6.1f} s  {child.mutant.name}")
        time.sleep(0.05)
    return found


def harmless(mutant: Mutant) -> str | None:
    """Why it does no harm, if that is known."""
    return HARMLESS.get(f"{mutant.file} {mutant.kind}: {mutant.what}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    parser.add_argument("--list", action="store_true", help="name them, run nothing")
    given = parser.parse_args()
    every = [m for file in SUITES for m in mutants(file) if given.only in m.name]
    chosen = [m for m in every if harmless(m) is None]
    if given.list:
        print(*(m.name for m in every), sep="\n")
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        preload(folder)
        sound_s = seconds_without(folder)
        if sound_s is None:
            return 2
        print(f"without a mutant the tests pass in {sound_s:.1f} s")
        found = judge(chosen, given.jobs, folder, PATIENCE * sound_s)
        if seconds_without(folder) is None:
            print("they did before: were files changed meanwhile?")
            return 2
    survivors = [m for m, how in found.items() if how == "survived"]
    print(f"\n{'':24}{'mutants':>8}{'killed':>8}{'survived':>9}")
    for kind in sorted({m.kind for m in chosen}):
        of_kind = [m for m in chosen if m.kind == kind]
        alive = sum(m in survivors for m in of_kind)
        print(f"{kind:24}{len(of_kind):8}{len(of_kind) - alive:8}{alive:9}")
    print(f"{'together':24}{len(chosen):8}{len(chosen) - len(survivors):8}{len(survivors):9}")
    print(f"{len(every) - len(chosen)} known to do no harm; {time.monotonic() - began:.0f} s")
    for mutant in survivors:
        print("survived:", mutant.name)
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
