"""Which of Rockchip's runtime libraries are installed: read as files, never loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.npu.doctor.sysroot import Sysroot, elf_machine, first_match
from headrace.paths import NPU_LIBRARY_FOLDERS, NPU_LIBRARY_NAME

_LIBRARY_VERSION = re.compile(rb"librknnrt version: ([0-9]{1,4}(?:\.[0-9a-z]{1,8}){1,3})[\s(\0]")


@dataclass(frozen=True)
class Library:
    path: str
    machine: str | None
    """None if it is no library at all."""
    version: str | None


def read_libraries(tree: Sysroot, library: Path | None) -> tuple[Library, ...]:
    """Each file once, though folders may be links to others.

    `library` is a path of this machine that stands for the search.
    """
    places = {}
    if library is not None:
        places[library] = str(library)
    else:
        for folder in NPU_LIBRARY_FOLDERS:
            path = f"{folder}/{NPU_LIBRARY_NAME}"
            if (place := tree.resolve(path)) is not None:
                places.setdefault(place, path)
    found = []
    for place, path in places.items():
        if place.exists():
            version = first_match(place, _LIBRARY_VERSION)
            machine = elf_machine(place)
            found.append(Library(path, machine, version.decode() if version else None))
    return tuple(found)
