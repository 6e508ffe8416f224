"""The zero-copy transport: a draft's keys and values in memory that the NPU reads in place.

A pass flushes its inputs and the tail, runs the variant's context, and flushes what comes back. The
main inputs are flushed when something was moved there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import NpuDeviceError, NpuTimeoutError
from headrace.models.npu_io import NpuFiles, main_names
from headrace.npu.abi import CORES, CoreMask, Flag
from headrace.npu.librknnrt import Buffer, Library, Versions
from headrace.npu.passes import NpuPasses, Placed
from headrace.npu.staging import LaneMemory
from headrace.npu.variants import Bound, Variant, contexts, open_variant, same_layouts

TIMEOUT_MS = 2000
"""Of one run; the longest, a chunk of a long text, takes a few tens of milliseconds."""


def open_backend(files: NpuFiles, *, library: Path | None, lanes: int, cores: str) -> RknnBackend:
    """What the runtime opens a compiled draft by. Raises NpuError."""
    path = None if library is None else str(library)
    return RknnBackend(files, Library(path), lanes=lanes, cores=CORES[cores])


class RknnBackend(NpuPasses):
    """Passes through librknnrt."""

    def __init__(
        self,
        files: NpuFiles,
        library: Library,
        *,
        lanes: int,
        cores: CoreMask = CoreMask.AUTO,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Loads the model and allocates all buffers; whatever fails, all of it is given back.

        Raises NpuError.
        """
        self._timeout_ms = timeout_ms
        self.versions: Versions
        self._lanes: list[_Lane] = []
        with ExitStack() as stack:
            self._variants = self._open(files, library, cores, lanes, stack)
            self._held = [lane.memory for lane in self._lanes]
            super().__init__(files, self._held)
            self.prove()
            self._stack = stack.pop_all()

    @property
    def version(self) -> str:
        """Of library and driver."""
        return f"{self.versions.library} {self.versions.driver}"

    def _open(
        self, files: NpuFiles, library: Library, cores: CoreMask, num_lanes: int, stack: ExitStack
    ) -> dict[int, Variant]:
        flags = Flag.PRIOR_MEDIUM | Flag.DISABLE_FLUSH_INPUT | Flag.DISABLE_FLUSH_OUTPUT
        first = stack.enter_context(library.init(files.rknn, flags))
        self.versions = first.require_versions(files.io.toolkit)
        places = [Bound(c) for c in contexts(stack, first, len(files.io.variants))]
        variants = [
            open_variant(stack, places[min(i, len(places) - 1)], files.io, variant, cores)
            for i, variant in enumerate(files.io.variants)
        ]
        layouts = same_layouts(variants)
        names = [n for layer in range(files.config.num_layers) for n in main_names(layer)]
        for _ in range(num_lanes):
            buffers = {
                name: stack.enter_context(first.allocate(layout.size))
                for name, layout in layouts.items()
            }
            for variant in variants:
                if variant.context is first:
                    variant.lanes.append(buffers)
                    continue
                shared = {
                    name: stack.enter_context(variant.context.share(buffer))
                    for name, buffer in buffers.items()
                }
                variant.lanes.append(shared)
            views = {
                name: (layouts[name], layouts[name].view(b.bytes)) for name, b in buffers.items()
            }
            memory = LaneMemory(
                files.config, files.io.geometry, views["tail"], [views[n] for n in names]
            )
            self._lanes.append(_Lane(memory, buffers["tail"], [buffers[n] for n in names]))
        return {variant.rows: variant for variant in variants}

    def _inputs(self, rows: int) -> Mapping[str, Placed]:
        return self._variants[rows].inputs

    def _compute(self, rows: int, lane: int, *, with_logits: bool) -> Mapping[str, Placed]:
        variant, held = self._variants[rows], self._lanes[lane]
        for tensor in variant.inputs.values():
            self._to_device(tensor.buffer)
        self._to_device(held.tail)
        if held.memory.is_main_changed:
            for buffer in held.mains:
                self._to_device(buffer)
            held.memory.is_main_changed = False
            self.counters.main_flushes += 1
        self.counters.binds += variant.use(lane)
        self._run(variant)
        self._from_device(variant.outputs["new"].buffer)
        if with_logits:
            self._from_device(variant.outputs["logits"].buffer)
        return variant.outputs

    def _run(self, variant: Variant) -> None:
        """Once more after a failure: all inputs are still in place."""
        self.counters.runs += 1
        try:
            variant.context.run(self._timeout_ms)
        except (NpuTimeoutError, NpuDeviceError):
            variant.context.run(self._timeout_ms)
            self.counters.retries += 1

    def _to_device(self, buffer: Buffer) -> None:
        buffer.to_device()
        self.counters.bytes_flushed += buffer.size

    def _from_device(self, buffer: Buffer) -> None:
        buffer.from_device()
        self.counters.bytes_flushed += buffer.size

    def close(self) -> None:
        """Gives contexts and buffers back; may be called again, `forward` may not."""
        self._lanes.clear()
        self._held.clear()
        self._variants.clear()
        self._stack.close()


@dataclass(eq=False)
class _Lane:
    memory: LaneMemory
    tail: Buffer
    mains: list[Buffer]
