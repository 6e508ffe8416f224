"""Laws of float16 copies: the bits are those of NumPy's cast, for every finite number."""

from __future__ import annotations

import numpy as np

from headrace.runtime.halves import Halves

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


def test_every_number_survives_both_ways() -> None:
    halves, wide = Halves(FINITE.shape), FINITE.astype(np.float32)
    stored, loaded = np.empty_like(FINITE), np.empty_like(wide)
    halves.store(wide, stored)
    halves.load(FINITE, loaded)
    assert np.array_equal(stored.view(np.uint16), FINITE.view(np.uint16))
    assert np.array_equal(loaded.view(np.uint32), wide.view(np.uint32))


def test_slices_of_larger_arrays() -> None:
    chance = np.random.default_rng(0)
    shape = (2, 3, 2, 16, 8)
    halves = Halves(shape)
    lane = chance.normal(0, 3, (2, 3, 2, 40, 8)).astype(np.float16).astype(np.float32)
    block = np.zeros(shape, np.float16)
    for num_rows in (16, 1, 7):
        rows = lane[..., 5 : 5 + num_rows, :]
        halves.store(rows, block[..., :num_rows, :])
        assert np.array_equal(block[..., :num_rows, :].astype(np.float32), rows)
        back = np.zeros_like(lane)
        halves.load(block[..., :num_rows, :], back[..., 5 : 5 + num_rows, :])
        assert np.array_equal(back[..., 5 : 5 + num_rows, :], rows)
        assert not back[..., :5, :].any() and not back[..., 5 + num_rows :, :].any()
