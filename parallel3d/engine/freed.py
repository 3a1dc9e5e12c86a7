"""Weights of layers that stay gathered where a batch has freed the memory of activations (ZeRO-3 with offload_param)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel3d.comm.collectives import all_gather_object
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.programs import Programs
from parallel3d.pipe.units import LayerUnits
from parallel3d.schedule.instructions import Program

_MEASURED = 2  # of equal batches: the second has all that a step allocates


class FreedMemory:
    """Measures a batch's memory, and plans more gathered weights for those that come where it was below its peak.

    Weights must leave the device when activations fill it, and each copy from the host takes time. But while a pipeline's
    forwards begin, or its backwards end, few activations are there. The peak of memory stays as it is.

    Collective: every rank makes it and calls its methods at the same points.
    """

    def __init__(self, units: LayerUnits, programs: Programs, model: PipelineModule):
        self._units, self._programs, self._groups, self._stage = units, programs, model.groups, model.stage_id
        self._of: tuple[Program | None, Sequence[int]] = None, ()
        self._batches = 0
        self._filled: Program | None = None

    def program_for(self, program: Program, signatures: Sequence[int]) -> Program:
        """Return what to run in place of a training program, for micro-batches of these signatures."""
        known = self._of[0] is program and self._of[1] == signatures
        if not all(all_gather_object(known, self._groups.control)):
            self._of, self._batches, self._filled = (program, signatures), 0, None
        self._batches += 1
        if self._batches == _MEASURED:
            self._units.measure()
        return self._filled or program

    def after(self) -> None:
        """Plan, if the batch was measured."""
        if self._batches != _MEASURED:
            return
        everyone = all_gather_object((self._stage, self._units.freed()), self._groups.control)
        # Replicas gather in the same order: as much as the one with the least room.
        freed = [
            [min(each) for each in zip(*(own for stage, own in everyone if stage == s), strict=False)]
            for s in range(1 + max(stage for stage, _ in everyone))
        ]
        self._filled = self._programs.filled(len(self._of[1]), freed)
        # Weights can't be put into the allocator's blocks of activations, but activations into those of weights.
        torch.cuda.empty_cache()
