"""Checkpoints: a source on the command line becomes a ModelConfig, weights and a tokenizer."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.errors import SourceError, StorageError
from headrace.export.weights import Weight
from headrace.models.config import ModelConfig

NOTE = "draft.json"
"""What only a distilled draft's folder has (`headrace.export.distilled_note`)."""


@dataclass(frozen=True)
class TokenizerSource:
    """What the exporter puts into the bundle about text."""

    tokenizer_json: str
    """Content of a tokenizer.json of the `tokenizers` library."""
    chat_template: str | None
    """Jinja source."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Every token that ends an answer; may be empty."""
    add_bos: bool
    """Whether `bos_id` goes before a text that is not a chat; never without a `bos_id`."""


class Checkpoint(Protocol):
    """A checkpoint whose table of weights has been checked; values are checked when read."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """`gguf`, `huggingface` or `distilled`."""
        ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def sampling(self) -> dict[str, float]:
        """The author's settings, of temperature, top_k, top_p, min_p and repeat_penalty."""
        ...

    def names(self) -> set[str]:
        """Names of all weights: exactly those of `headrace.models.families.weights(config)`."""
        ...

    def read(self, name: str) -> Weight:
        """One weight by its Hugging Face name, in the shape of the table.

        A QuantMatrix where the source is quantised in a form that is taken exactly, a float32
        array that the caller owns otherwise. Raises SourceError on NaN or infinity.
        """
        ...

    def tokenizer(self) -> TokenizerSource:
        """Raises SourceError where there is no tokenizer, or one that cannot be read."""
        ...

    def files(self) -> dict[Path, int]:
        """The files that were or would be read, with their sizes in bytes."""
        ...


def is_distilled(folder: Path) -> bool:
    """Whether a folder says that it is a distilled draft."""
    try:
        return (folder / NOTE).is_file()
    except PermissionError:
        return False


def open_checkpoint(source: str) -> Checkpoint:
    """Opens a .gguf file, a Hugging Face folder, or `org/name[@revision]` on the hub.

    A path that exists comes first. A hub id is downloaded to the hub's cache; HF_ENDPOINT,
    HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured.

    Raises:
        SourceError: nothing there, unreadable, damaged; one line.
        StorageError: no permission, or no room for the download.
    """
    from headrace.export.gguf import GgufCheckpoint
    from headrace.export.huggingface import HuggingFaceCheckpoint

    path = Path(source).expanduser()
    try:
        if is_distilled(path):
            raise SourceError(
                f"{source}: a distilled draft, which needs its target for the embeddings; "
                f"export the two together: headrace export TARGET --draft {source}"
            )
        if path.is_dir():
            return HuggingFaceCheckpoint.open(path)
        if path.is_file():
            return GgufCheckpoint.open(path)
        if path.suffix == ".gguf" or not _HUB_ID.fullmatch(source):
            raise SourceError(
                f"{source}: no such file or folder; expected a .gguf file, "
                "a Hugging Face folder, or a hub id org/name"
            )
        return HuggingFaceCheckpoint.open(_download(source), name=source)
    except PermissionError as error:
        raise StorageError(f"{error.filename or source}: no permission to read it") from error


_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)


def _download(source: str) -> Path:
    """The local folder of a hub id; downloads what is missing.

    Raises:
        SourceError: the hub has no such model, refuses it, or cannot be reached.
        StorageError: the cache folder cannot be written.
    """
    match = _HUB_ID.fullmatch(source)
    assert match
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise SourceError(
            f"{source}: hub ids need the package huggingface_hub; install headrace[export]"
        ) from error
    hub = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        return Path(
            snapshot_download(
                match["repo"],
                revision=match["revision"],
                endpoint=hub,
                allow_patterns=["*.json", "*.jinja", "*.safetensors"],
                # other formats' folders, and Mistral's second copy of the weights
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except errors.GatedRepoError as error:
        reason = "the model is gated; accept its terms on its page and set HF_TOKEN"
        raise SourceError(f"{source}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise SourceError(f"{source}: {hub} has no revision {match['revision']}") from error
    except errors.RepositoryNotFoundError as error:
        reason = f"{hub} has no such model, or it is private and HF_TOKEN does not open it"
        raise SourceError(f"{source}: no such file or folder, and {reason}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = "not in the hub's cache, and the hub is offline (HF_HUB_OFFLINE) or unreachable"
        raise SourceError(f"{source}: {reason}: {_line(error.__cause__ or error)}") from error
    # the hub's client raises its HTTP library's exceptions as well, and that library has changed
    except Exception as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise StorageError(f"{source}: cannot store the download: {_line(error)}") from error
        raise SourceError(f"{source}: {hub} failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
