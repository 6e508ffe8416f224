"""Who imports whom: the arrows of CONTRIBUTING.md, and what a board has to install."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from test_packaging import ROOT, product_files, project

MAX_LINES = 450

STAGES = ("export", "models", "npu", "runtime")

MAY_IMPORT = {
    "models": {"models"},
    "export": {"export", "models"},
    "runtime": {"runtime", "models"},
    "npu": {"npu", "runtime", "models"},
}
"""Stages by stage. `headrace` itself (errors, paths, …) is open to all; cli and commands to none."""

NPU_MAY_IMPORT = {"headrace.runtime.backend", "headrace.runtime.batch"}
"""What of the runtime an NPU backend implements."""

COMMAND_LINE = (ROOT / "headrace/cli.py", ROOT / "headrace/__main__.py")


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    path: Path
    line: int
    module: str
    at_start: bool
    """Whether importing the file imports it: outside functions and `if TYPE_CHECKING`."""

    @property
    def stage(self) -> str:
        """`models`, `runtime`, …; `headrace` for what is in none of them."""
        return stage_of(self.module)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def stage_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in STAGES else "headrace"


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return _imports(path, tree, at_start=True)


def _imports(path: Path, node: ast.AST, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            modules = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}:{child.lineno}: a relative import"
            # of a package, a name may be a module: `from headrace.models import rope`
            modules = [f"{child.module}.{alias.name}" for alias in child.names]
        else:
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            )
            yield from _imports(path, child, at_start and not deferred)
            continue
        yield from (Import(path, child.lineno, module, at_start) for module in modules)


FILES = [(package, path, list(imports_of(path))) for package, path in product_files()]


def own(imports: list[Import]) -> list[Import]:
    return [i for i in imports if i.module.split(".")[0] == "headrace"]


def test_stages_import_along_the_arrows() -> None:
    wrong = [
        str(found)
        for package, _, imports in FILES
        if (stage := stage_of(package)) in STAGES
        for found in own(imports)
        if found.stage != "headrace" and found.stage not in MAY_IMPORT[stage]
    ]
    assert not wrong, "\n".join(wrong)


def test_npu_sees_only_the_runtimes_seam() -> None:
    for package, _, imports in FILES:
        for found in own(imports) if stage_of(package) == "npu" else ():
            if found.stage == "runtime":
                assert any(found.module.startswith(seam) for seam in NPU_MAY_IMPORT), str(found)


def test_only_the_command_line_knows_both_sides() -> None:
    for package, path, imports in FILES:
        if package == "headrace.commands" or path in COMMAND_LINE:
            continue
        stages = {found.stage for found in own(imports)}
        assert not {"export", "runtime"} <= stages, path
        for found in own(imports):
            assert not re.match(r"headrace\.(cli|commands)\b", found.module), str(found)


def test_the_base_imports_no_stage() -> None:
    """errors, paths and the like are what everything may import. `headrace/__init__.py` names the
    runtime's classes, but imports them on use.
    """
    for package, path, imports in FILES:
        if package == "headrace" and path not in COMMAND_LINE:
            for found in own(imports):
                on_use = path.name == "__init__.py" and not found.at_start
                assert found.stage == "headrace" or on_use, str(found)


def requirements(listed: list[str]) -> set[str]:
    """Import names of requirements; ours have the same name as their packages."""
    return {re.split(r"[^\w]", requirement)[0] for requirement in listed}


BASE = requirements(project()["project"]["dependencies"])
EXPORT = requirements(project()["project"]["optional-dependencies"]["export"])
TRAIN = requirements(project()["project"]["optional-dependencies"]["train"])
PLOTS = requirements(project()["project"]["optional-dependencies"]["bench"])
OWN_PLACE = {"npu/lite.py": {"rknnlite"}, "export/rknn_worker.py": {"rknn"}}
"""Rockchip's packages: one is the board's, the other in an environment of its own."""


def test_third_parties_are_declared() -> None:
    """The exporter's libraries are an extra, so nothing else may need them to be imported."""
    wrong = []
    for package, path, imports in FILES:
        for found in imports:
            name = found.module.split(".")[0]
            if name in sys.stdlib_module_names or name in ("headrace", "__future__"):
                continue
            in_command = stage_of(package) == "headrace" and not found.at_start
            allowed = BASE | EXPORT if stage_of(package) == "export" or in_command else BASE
            allowed = allowed | PLOTS if in_command else allowed
            allowed = allowed | TRAIN if package == "headrace.export.distill" else allowed
            allowed = allowed | OWN_PLACE.get(path.relative_to(ROOT).as_posix(), set())
            if name not in allowed:
                wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for _, path, _ in FILES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"over {MAX_LINES} lines, so they hold more than one idea: {long}"


BOARD = """
import sys

class Absent:
    # Makes the exporter's libraries impossible to import, as on a board.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def on_a_board(code: str, *arguments: str) -> str:
    """Output of a program run where only the base install's libraries can be imported."""
    absent = sorted(EXPORT | {"torch", "transformers", "optimum", "llama_cpp"})
    program = BOARD.format(absent=absent) + code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_board_answers(tiny_bundle: Path, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from headrace import LLM, SamplingParams

bundle, cache = map(Path, sys.argv[1:])
with LLM(bundle, cache=cache) as llm:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    print(len(llm.generate("pump 3", params).token_ids))
"""
    assert on_a_board(code, str(tiny_bundle), str(tmp_path)).split() == ["5"]


def test_a_board_has_the_command_line() -> None:
    code = "import headrace.cli\nsys.exit(headrace.cli.main(['run', '--help']))\n"
    assert "BUNDLE" in on_a_board(code)
