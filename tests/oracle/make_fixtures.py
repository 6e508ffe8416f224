"""Makes tests/data anew: `make fixtures`, in an environment with the extras `oracle` and `export`.

Seeded throughout, so a second run changes nothing unless a library or this folder did.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
import tiny_models
import torch
from independent_export import optimum_logits

from headrace.export.demo_model import obtain

DATA = Path(__file__).resolve().parents[1] / "data"

OPTIMUM_TINY = "llama"
"""The tiny model that optimum exports too."""

SMOLLM2 = "smollm2"


def make_tiny(name: str) -> None:
    folder = DATA / "tiny" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tiny_models.write(name, folder)
    ids = tiny_models.input_ids(name)
    logits = tiny_models.transformers_logits(folder, ids)
    arrays: dict[str, Any] = {"input_ids": ids, "logits": logits}
    if name == OPTIMUM_TINY:
        arrays["optimum_logits"] = optimum_logits(folder, ids)
    np.savez_compressed(folder / "logits.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, logits std {logits.std():.2f}")


def make_smollm2() -> None:
    model, ids = smollm2.load(obtain())
    arrays = smollm2.fixture(smollm2.logits(model, ids), ids)
    path = DATA / "smollm2_logits.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    names = [*tiny_models.TINY, SMOLLM2]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; or all")
    wanted = parser.parse_args().names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    torch.set_num_threads(1)
    for name in wanted:
        if name == SMOLLM2:
            make_smollm2()
        else:
            make_tiny(name)


if __name__ == "__main__":
    main()
