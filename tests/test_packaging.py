"""The list of packages, the folders, the links for type checkers, and the versions agree."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("export", "models", "npu", "runtime")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def product_files() -> Iterator[tuple[str, Path]]:
    """Every Python file of the product: the package it belongs to, and its path."""
    for folder in ("headrace", *FOLDERS):
        for base, subfolders, names in os.walk(ROOT / folder):
            # headrace/ links to the other folders; each is walked once, under its own name
            subfolders[:] = [s for s in subfolders if not (Path(base) / s).is_symlink()]
            parts = Path(base).relative_to(ROOT).parts
            package = ".".join(parts if folder == "headrace" else ("headrace", *parts))
            yield from ((package, Path(base) / n) for n in sorted(names) if n.endswith(".py"))


def test_every_package_is_listed() -> None:
    """A package that is not works in a checkout and is absent from the wheel."""
    listed = project()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({package for package, _ in product_files()})


def test_every_package_has_an_init() -> None:
    """A folder without one cannot be imported in an editable install."""
    files = list(product_files())
    with_init = {package for package, path in files if path.name == "__init__.py"}
    assert {package for package, _ in files} == with_init


@pytest.mark.parametrize("folder", FOLDERS)
def test_type_checker_link(folder: str) -> None:
    link = ROOT / "headrace" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_package_data_is_there() -> None:
    setuptools = project()["tool"]["setuptools"]
    homes = setuptools["package-dir"]
    for package, patterns in setuptools["package-data"].items():
        home = ROOT / homes.get(package, package.replace(".", "/"))
        for pattern in patterns:
            assert list(home.glob(pattern)), f"{package}: nothing matches {pattern}"


def test_one_version() -> None:
    assert project()["project"]["version"] == headrace.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{headrace.__version__}]" in changes
