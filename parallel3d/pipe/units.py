"""Sharded weights of a rank's layers (ZeRO-3): gathered and released at the layers' boundaries, as the program says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.structures import tensors_of
from parallel3d.monitor.memory import RunMemory
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.lifetimes import ChunkUses, Use
from parallel3d.zero.weights import Units

# Part of the peak of memory that isn't filled: the allocator's blocks are up to 1 MiB larger than their tensors.
_GAP = 512


class LayerUnits:
    """Runs the GATHER_PARAMS and RELEASE_PARAMS of each compute instruction while its layers run.

    Outside of a program, as for engine(inputs), a layer's weights are gathered when it runs, and those of other layers are
    released.

    uses: chunk -> the units that each run of its layers needs, for this rank's chunks.
    """

    def __init__(self, module: PipelineModule, units: Units):
        self._module, self._units = module, units
        self._of_layer = {layer: units.of(m.parameters()) for layer, m in module.calls.with_modules()}
        self.uses = {chunk: self._uses_of(chunk) for chunk in module.own_chunks}
        self._memory: RunMemory | None = None
        self._stop()

    def _stop(self) -> None:
        self._layers: Sequence[int] | None = None
        self._items: deque[tuple[int, Instruction]] = deque()
        self._position = self._first = 0

    def _uses_of(self, chunk: int) -> ChunkUses:
        def of(layers: Sequence[int]) -> tuple[Use, ...]:
            return tuple(self._of_layer.get(layer, ()) for layer in layers)

        return ChunkUses(*(of(self._module.calls.runs(chunk, op)) for op in (Op.FORWARD, Op.BACKWARD)))

    def run(
        self, run: Callable[[Instruction], None], lifetimes: Sequence[Instruction], first: int, i: Instruction
    ) -> None:
        """Run a compute instruction.

        - lifetimes: the GATHER_PARAMS and RELEASE_PARAMS that belong to it.
        - first: the number of its first run of a layer, of all on the rank.
        """
        self._items = deque((item.run - first, item) for item in lifetimes if item.run is not None)
        self._layers, self._position, self._first = self._module.calls.runs(i.chunk, i.op), 0, first
        if self._layers:
            self.before_layer(self._layers[0])
        run(i)
        self._carry_out(len(self._layers))
        self._stop()

    def begin(self, program: Sequence[Instruction]) -> None:
        """Learn which weights a program will gather, to read them from the disk ahead."""
        gathers = (i for i in program if i.op is Op.GATHER_PARAMS and i.run is not None)
        self._units.expect(i.bucket for i in gathers if i.bucket is not None)

    def measure(self) -> None:
        """Measure, in the next program, the memory of each run of a layer, without gathered weights."""
        self._memory = RunMemory(self._module.device, self._units.live_bytes)

    def freed(self) -> list[int]:
        """Return, for each run of the measured program, the elements of weights that fit in beyond those of the fullest run."""
        assert self._memory is not None
        memory, self._memory = self._memory, None
        memory.reach(len(memory.most) + 1, self._units.live_bytes)
        most = max(memory.most)
        return [self._units.elements(max(0, most - nbytes - most // _GAP)) for nbytes in memory.most]

    def abort(self) -> None:
        """Release all units, after a failure or a call outside of a program."""
        self._stop()
        self._memory = None
        self._units.release_all()

    def before_layer(self, layer: int) -> None:
        """Reach the boundary before a layer runs, or its backward: its weights are gathered when this returns."""
        needed = self._of_layer.get(layer, ())
        if self._layers is None:
            self._units.keep_only(needed)
        elif layer in self._layers[self._position :]:
            self._position = self._layers.index(layer, self._position)
            self._carry_out(self._position)
        self._units.use(needed)

    def before_backward(self, layer: int, output: Any) -> None:
        """Reach the boundary before a layer's backward when the gradient of its output has arrived."""
        if not self._of_layer.get(layer) or not torch.is_grad_enabled():
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._gradient_came, layer))

    def _gradient_came(self, layer: int, _: Tensor) -> None:
        # A tensor that a layer only passes on has its gradient too late: in a program, the layer's turn is over then.
        if self._layers is None or layer in self._layers[self._position :]:
            self.before_layer(layer)

    def _carry_out(self, boundary: int) -> None:
        """Gather and release up to this boundary."""
        if self._memory is not None:
            self._memory.reach(self._first + boundary, self._units.live_bytes)
        while self._items and self._items[0][0] <= boundary:
            item = self._items.popleft()[1]
            assert item.bucket is not None
            if item.op is Op.GATHER_PARAMS:
                self._units.gather(item.bucket)
            else:
                self._units.release(item.bucket)
        if self._memory is not None:
            self._memory.begin(self._units.live_bytes)
