"""Fetches llama.cpp's vocabulary-only GGUF files, which llama-cpp-python's source package holds.

`python tests/vocab_files.py` prints the folder they are in.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from headrace.paths import cache_dir

VERSION = "0.3.36"
ARCHIVE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
FOLDER = f"llama_cpp_python-{VERSION}/vendor/llama.cpp/models"

# pip asks a source package's build system for metadata even when it only downloads. The real one
# would fetch a compiler's tools for that; this one answers from what is known already.
BACKEND = f"""
import pathlib

def get_requires_for_build_wheel(config_settings=None):
    return []

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder) / "llama_cpp_python-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\\nName: llama-cpp-python\\nVersion: {VERSION}\\n"
    )
    return info.name
"""


class VocabFilesError(Exception):
    """The files cannot be had; the text says why."""


def obtain() -> Path:
    """The folder with the files: HEADRACE_VOCAB_DIR, or the cache, fetched when not there.

    Raises VocabFilesError when pip fails or the archive is not the expected one.
    """
    if given := os.environ.get("HEADRACE_VOCAB_DIR"):
        return Path(given)
    home = cache_dir() / f"llama.cpp-vocabularies-{VERSION}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{home.name}-", dir=home.parent) as folder:
            extracted = _extract(_download(Path(folder)), Path(folder) / "extracted")
            try:
                extracted.rename(home)
            except OSError:
                # Another process was first.
                if not home.exists():
                    raise
    return home


def _download(folder: Path) -> Path:
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(BACKEND)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", "llama-cpp-python", "--no-build-isolation"]
    command += ["--dest", str(folder), f"llama-cpp-python=={VERSION}"]
    environment = {**os.environ, "PYTHONPATH": str(backend.parent)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise VocabFilesError(f"pip could not download llama-cpp-python: {lines[-1].strip()}")
    archive = folder / ARCHIVE
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise VocabFilesError(f"{ARCHIVE} has the sha256 {digest}, expected {SHA256}")
    return archive


def _extract(archive: Path, target: Path) -> Path:
    target.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            path = Path(member.name)
            wanted = path.match("ggml-vocab-*.gguf") and str(path.parent) == FOLDER
            if wanted and (content := tar.extractfile(member)) is not None:
                (target / path.name).write_bytes(content.read())
    return target


if __name__ == "__main__":
    print(obtain())
