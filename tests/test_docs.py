"""What the documents and messages say exists: commands, flags, make targets, files."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from test_packaging import ROOT, product_files

from headrace.cli import cli

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")

OTHER_PROGRAMS_FLAGS = {"--merge"}
"""Named in messages: of llama-gguf-split."""


def commands() -> dict[str, set[str]]:
    """Every command's flags."""
    context = click.Context(cli)
    found = {}
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        subcommands = command.commands.values() if isinstance(command, click.Group) else []
        found[name] = {
            flag
            for part in (command, *subcommands)
            for p in part.get_params(click.Context(part, info_name=name))
            for flag in (*p.opts, *p.secondary_opts)
        }
    return found


@pytest.fixture(scope="module")
def flags_of() -> dict[str, set[str]]:
    return commands()


def code_of(document: Path) -> Iterator[str]:
    """Lines of fenced blocks, and inline code."""
    fenced = False
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            yield line
        else:
            yield from re.findall(r"`([^`]+)`", line)


def command_lines(document: Path) -> Iterator[list[str]]:
    """The words after `headrace` wherever it is run."""
    for code in code_of(document):
        for part in re.split(r"\||&&", code):
            if re.match(r"\s*(\S*bin/)?headrace [a-z-]", part):
                yield shlex.split(part, comments=True)[1:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_commands_and_flags_exist(document: Path, flags_of: dict[str, set[str]]) -> None:
    for words in command_lines(document):
        if words[0].startswith("-"):
            continue
        assert words[0] in flags_of, f"headrace {shlex.join(words)}"
        used = {word.split("=")[0] for word in words[1:] if FLAG.fullmatch(word.split("=")[0])}
        assert used <= flags_of[words[0]], f"headrace {shlex.join(words)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_flags_named_alone_exist(document: Path, flags_of: dict[str, set[str]]) -> None:
    known = set().union(*flags_of.values())
    for code in code_of(document):
        if code.startswith("--"):
            assert code.split()[0].split("=")[0] in known, code


def test_messages_name_flags_that_exist(flags_of: dict[str, set[str]]) -> None:
    """Errors that tell what to do must tell something that can be done."""
    known = set().union(*flags_of.values()) | OTHER_PROGRAMS_FLAGS
    for _, path in product_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = node.value.split()
                named = {w.strip("`'\".,:;()[]").split("=")[0] for w in words if "--" in w}
                flags = {w for w in named if re.fullmatch(r"--[a-z][a-z-]*", w)}
                if len(words) > 1:
                    assert flags <= known, (
                        f"{path.relative_to(ROOT)}:{node.lineno}: {flags - known}"
                    )


def test_readme_names_every_command(flags_of: dict[str, set[str]]) -> None:
    shown = {words[0] for words in command_lines(ROOT / "README.md")} | {"demo"}
    assert shown >= set(flags_of)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_make_targets_exist(document: Path) -> None:
    targets = re.findall(
        r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for code in code_of(document):
        if match := re.match(r"make ([a-z]+)", code):
            assert match[1] in targets, code


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_resolve(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            assert (document.parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_files_named_in_code_exist(document: Path) -> None:
    """`runtime/ort.py` and the like."""
    for code in code_of(document):
        for name in re.findall(
            r"\b(?:headrace|export|models|npu|runtime|tests)/[\w/]+\.py\b", code
        ):
            assert (ROOT / name).exists(), name


def test_readmes_programs_run(
    endless_bundle: Path, shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as a reader would type them; the second needs names of the first."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 2
    (tmp_path / "smol").symlink_to(endless_bundle)
    (tmp_path / "plant.log").write_text("pump 3 reports low flow\n" * 200)
    monkeypatch.setenv("HEADRACE_CACHE", str(shared_cache))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{blocks[0]}\nprint('---')\n{blocks[1]}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("---\n")
    assert float(first.split()[-1]) > 1, first
    assert second.strip(), "the summaries"
