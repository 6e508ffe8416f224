"""A folder that is written whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import StorageError


@contextmanager
def whole_or_absent(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that becomes `out`, or goes away whatever happens.

    Raises StorageError where the disk is full, or `out` cannot be written.
    """
    # Not the process id alone: two containers that share a volume may both be process 1, and the
    # folder that is removed at the end must be this run's own.
    partial = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    new_parents = [folder for folder in partial.parents if not folder.exists()]
    try:
        try:
            partial.mkdir(parents=True)
            yield partial
            _sync_all(partial)
            partial.rename(out)
            _sync(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            for folder in new_parents:
                with suppress(OSError):  # not empty: it holds `out`
                    folder.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"{out}: the disk is full; make room and try again") from error
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise StorageError(
                f"{out}: has come to be meanwhile; remove it and try again"
            ) from error
        if error.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
            errno.ENOTDIR,
            errno.ENAMETOOLONG,
        ):
            raise StorageError(f"{out}: cannot be written: {error.strerror}") from error
        raise


def _sync_all(folder: Path) -> None:
    """A rename must not reach the disk before what it names."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
