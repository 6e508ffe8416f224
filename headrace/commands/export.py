"""`headrace export`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from headrace.commands.summary import draft_facts, manifest_facts, npu_facts, parity_facts
from headrace.commands.terminal import print_facts, reporter
from headrace.errors import HeadraceError, UsageError
from headrace.export.options import (
    NPU_QUANTS,
    PLATFORMS,
    QUANTS,
    DraftOptions,
    ExportOptions,
    NpuOptions,
    parse_layers,
)
from headrace.models.iospec import KV_DTYPES
from headrace.models.npu_io import DEFAULT_CTX

_DEFAULTS = ExportOptions()
_LIBRARIES = ("gguf", "huggingface_hub", "ml_dtypes", "onnx", "safetensors")


@click.command(name="export")
@click.argument("source")
@click.option(
    "-o",
    "--output",
    metavar="BUNDLE",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder to make. It must not exist; it appears when it is complete.",
)
@click.option(
    "--quant",
    type=click.Choice(QUANTS),
    default=_DEFAULTS.quant,
    help="How weights are stored, see above. Default: keep for GGUF, int4 otherwise.",
)
@click.option(
    "--kv",
    type=click.Choice(list(KV_DTYPES)),
    default=_DEFAULTS.kv,
    help=f"How keys and values are stored, see above. Default: {_DEFAULTS.kv}.",
)
@click.option("--name", help="The model's name in the bundle. Default: what SOURCE calls itself.")
@click.option(
    "--calibrate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A text like those in service; its activations steer the int4 search and the int8 scales "
    "of keys and values. Default: a built-in text of plant logs, questions and answers.",
)
@click.option("--force", is_flag=True, help="Keep a bundle that fails its parity check.")
@click.option(
    "--draft",
    metavar="SOURCE",
    help="Add a draft, see above: a SOURCE as the target's, or a distilled draft's folder.",
)
@click.option(
    "--draft-layers",
    metavar="LIST",
    help="Keep these layers of the draft's, in this order: 0,1,2,3 or 0-3. Default: all.",
)
@click.option(
    "--draft-quant",
    type=click.Choice(QUANTS),
    help="How the draft's weights are stored. Default: as --quant's, by the draft's source.",
)
@click.option(
    "--vocab-keep",
    metavar="K",
    type=int,
    help="Let the draft's head keep K tokens, the most frequent ones of --vocab-corpus. Control "
    "tokens and single bytes are always among them.",
)
@click.option(
    "--vocab-corpus",
    metavar="FILE",
    type=click.Path(path_type=Path),
    multiple=True,
    help="A text like those in service, for --vocab-keep. May be given several times.",
)
@click.option(
    "--platform",
    type=click.Choice(PLATFORMS),
    help="Compile the draft for this chip's NPU as well, see above. Default: for the CPU alone.",
)
@click.option(
    "--npu-quant",
    type=click.Choice(NPU_QUANTS),
    help="How the NPU computes the draft. w8a8 reads half the bytes, and its 8-bit activations cost "
    f"acceptance: compare the figures of the export. Default: {NpuOptions.quant}.",
)
@click.option(
    "--npu-ctx",
    metavar="N",
    type=int,
    help="Tokens that the draft on the NPU sees, of which 32 more come before each eviction. "
    f"Default: {DEFAULT_CTX}, or what the draft can have or needs.",
)
def command(
    source: str,
    output: Path,
    draft: str | None,
    draft_layers: str | None,
    draft_quant: str | None,
    vocab_keep: int | None,
    vocab_corpus: tuple[Path, ...],
    platform: str | None,
    npu_quant: str | None,
    npu_ctx: int | None,
    **options: Any,
) -> None:
    """Make a bundle from a checkpoint.

    SOURCE is a .gguf file, a Hugging Face folder, or a hub id (org/name, org/name@revision).

    \b
    --quant, the weights:
      keep  a GGUF file's Q4_0, Q4_1 and Q8_0 weights are taken over exactly;
            those of other types, and float checkpoints, become int8
      int8  every matrix in 8 bits, blocks of 32
      int4  the layers in 4 bits, each block's scale and offset searched for the
            least error; embeddings and head in 8 bits
      f32   no quantisation, for comparisons

    \b
    --kv, the keys and values of the context:
      f16   rounded to half precision
      int8  a quarter of the running memory; scales are calibrated at export
      f32   no rounding, for comparisons

    A draft is a second, faster model that proposes tokens to the first. It must cut text as the
    target does; its ids may differ. Without a trained one, the first layers of the target itself
    serve as a poor one: --draft SOURCE --draft-layers 0-3. A distilled draft has its layers and its
    head already, and keeps its 8-bit weights exactly.

    With --platform the draft is also compiled for the NPU, by Rockchip's toolkit in an environment
    of its own that `headrace rknn-env` makes once, and simulated beside the CPU's. It takes minutes
    and several GB of memory. An operator that the NPU does not do fails the export.

    The result is compared with the float model. The export fails if it is too far off, and
    whatever fails or is interrupted leaves nothing behind.
    """
    started = time.monotonic()
    layers = None if draft_layers is None else parse_layers(draft_layers)
    npu = _npu_options(platform, npu_quant, npu_ctx)
    made_of = _draft_options(draft, layers, draft_quant, vocab_keep, vocab_corpus, npu)
    with export_libraries():
        from headrace.export.build import export

        with one_interrupt(), reporter() as report:
            manifest = export(source, output, ExportOptions(**options, draft=made_of), report)
    seconds = time.monotonic() - started
    print_facts(
        str(output),
        [
            *manifest_facts(manifest),
            *parity_facts(manifest.target.parity),
            ("time", f"{seconds:.1f} s"),
        ],
    )
    if manifest.draft is not None:
        print_facts("Draft", draft_facts(manifest.draft))
        if manifest.draft.npu is not None:
            print_facts("Draft on the NPU", npu_facts(manifest.draft.npu))


def _npu_options(platform: str | None, quant: str | None, ctx: int | None) -> NpuOptions | None:
    """Raises UsageError for choices about an NPU that none is named of."""
    if platform is not None:
        return NpuOptions(platform, quant or NpuOptions.quant, ctx)
    if (quant, ctx) != (None, None):
        raise UsageError("--npu-quant and --npu-ctx need --platform")
    return None


def _draft_options(source: str | None, *choices: Any) -> DraftOptions | None:
    """Raises UsageError for choices about a draft that there is not."""
    if source is not None:
        return DraftOptions(source, *choices)
    if any(choice not in (None, ()) for choice in choices):
        raise UsageError(
            "--draft-layers, --draft-quant, --vocab-keep and --platform need --draft SOURCE"
        )
    return None


@contextmanager
def export_libraries() -> Iterator[None]:
    """Says what to install where an exporter's library is missing; raises HeadraceError."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _LIBRARIES:
            raise
        raise HeadraceError(
            f"exporting needs {name}, which is not installed: pip install 'headrace[export]'"
        ) from error


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Ctrl-C ends the work; an impatient second one must not cut the cleaning up short."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as a shell's background jobs have it
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
