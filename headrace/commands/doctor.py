"""`headrace doctor`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.commands.terminal import console, print_table, say
from headrace.errors import UsageError
from headrace.models.manifest import NPU, NPU_IO, Bundle

if TYPE_CHECKING:
    from headrace.npu.doctor.examine import Finding, Needs


@click.command(name="doctor")
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--sysroot",
    type=click.Path(path_type=Path),
    default=Path("/"),
    help="Examine the copy of a board's files in this folder instead of this machine.",
)
@click.option(
    "--npu-library",
    type=click.Path(path_type=Path),
    help="The NPU's runtime library, instead of the one that the system's loader finds. A path of "
    "this machine, also with --sysroot.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path | None, sysroot: Path, npu_library: Path | None, as_json: bool) -> int:
    """Examine this board: NPU, drivers, clocks, memory, and what mends them.

    Each line is pass, warn or fail, with what was found; what does not pass is followed by the
    command that mends it. With BUNDLE its draft says what the board must have, otherwise general
    minimums do. Nothing is changed, and root is not needed.

    Exit code 1 if anything fails. Warnings cost speed or are about things to come. On a machine
    that is no RK3588 nothing fails.
    """
    if not sysroot.is_dir():
        raise UsageError(f"--sysroot: got {sysroot}, which is no folder")

    from headrace.npu.doctor.examine import examine, worst

    needs = _needs(bundle, npu_library)
    findings = examine(sysroot, needs)
    if as_json:
        print(json.dumps(_json(findings, needs), indent=1, ensure_ascii=False))
    else:
        _print(findings)
    return 1 if worst(findings) == "fail" else 0


def _needs(bundle: Path | None, library: Path | None) -> Needs:
    from headrace.models.npu_io import NpuIo
    from headrace.npu.doctor.examine import Needs

    if bundle is None:
        return Needs(library=library)
    opened = Bundle.open(bundle)
    if opened.draft is None or opened.draft.npu is None:
        say(f"{bundle} has no draft for the NPU: the board is held to general minimums")
        return Needs(library=library)
    model_bytes = opened.manifest.files[NPU].size
    return Needs.of_draft(NpuIo.load(opened.file(NPU_IO)), model_bytes, library)


def _print(findings: list[Finding]) -> None:
    rows = [(finding.name, finding.status, finding.found) for finding in findings]
    print_table("", ("check", "status", "found"), rows)
    remedies = [f"{f.name}: {f.remedy}" for f in findings if f.remedy is not None]
    if remedies:
        # Not in the table: a command that is folded cannot be copied.
        console().print("\n".join(("What mends it:", *remedies)), soft_wrap=True)


def _json(findings: list[Finding], needs: Needs) -> dict[str, Any]:
    from headrace.npu.doctor.examine import worst

    return {
        "status": worst(findings),
        "needs": {
            "library_version": needs.library_version,
            "platform": needs.platform,
            "num_buffers": needs.num_buffers,
            "npu_bytes": needs.npu_bytes,
        },
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }
