"""Programs of an engine: built, lowered and validated once for each number of micro-batches; filled with gathers (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import PipelineConfig
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.units import LayerUnits
from parallel3d.schedule.auto import Plan, first_plan
from parallel3d.schedule.builders import inference
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lifetimes import Lifetimes
from parallel3d.schedule.lowering import add_collectives, add_parameter_gather, lower
from parallel3d.schedule.order import validate

_MEASURED = 2  # of equal batches: the second has all that a step allocates


class Programs:
    """Cache of a module's training and evaluation programs.

    - pipeline: the configuration's section of this name.
    - num_buckets: owners (see ParameterInfo) -> number of gradient buckets, for the whole model.
    - partitioned: whether weights are gathered before they are used.
    - reduce_per_micro_batch: whether gradients are reduced in every micro-batch.
    - lifetimes: sharded weights of the whole pipeline; None if there are none.

    plan: the plan that schedule "auto" runs. replica_owners: bucket of REDUCE_REPLICAS -> its owners.
    """

    def __init__(
        self,
        module: PipelineModule,
        pipeline: PipelineConfig,
        num_buckets: Mapping[tuple[int, ...], int],
        partitioned: bool = False,
        reduce_per_micro_batch: bool = False,
        lifetimes: Lifetimes | None = None,
    ):
        self._lifetimes = lifetimes
        self._settings, self._placement, self._predicted = module.settings, module.placement, module.predicted
        self._pipeline = pipeline
        self._partitioned = partitioned
        self.reduce_per_micro_batch = reduce_per_micro_batch
        self._chunk_buckets = [num_buckets.get((c,), 0) for c in range(len(module.placement))]
        self.replica_owners = [
            owners for owners in sorted(num_buckets) if len(owners) > 1 for _ in range(num_buckets[owners])
        ]
        self._cache: dict[tuple[int, bool], Program] = {}
        self.plan: Plan | None = None

    def get(self, num_micro_batches: int, training: bool) -> Program:
        """Return the program of a batch of this size. Raises ScheduleError for a schedule that can't run."""
        key = (num_micro_batches, training)
        if key not in self._cache:
            self._cache[key] = self._training(num_micro_batches) if training else self._evaluation(num_micro_batches)
        return self._cache[key]

    def replan(self, plan: Plan | None) -> None:
        """Run this plan of schedule "auto" from the next training batch on; None for the first plan, which needs no times."""
        self.plan = plan
        self._cache = {key: program for key, program in self._cache.items() if not key[1]}

    def filled(self, num_micro_batches: int, freed: Sequence[Sequence[int]]) -> Program:
        """Return the training program with more sharded weights gathered. freed: see Lifetimes.add_to."""
        return self._training(num_micro_batches, freed)

    def _training(self, num_micro_batches: int, freed: Sequence[Sequence[int]] = ()) -> Program:
        if self._pipeline.schedule != "auto":
            program = self._settings.program(self._pipeline, num_micro_batches)
        else:
            if self.plan is None:
                # Until it is known what fits into memory, hold no more activations than 1F1B.
                multiple = min(self._pipeline.max_in_flight or 1.0, 1.0)
                self.plan = first_plan(self._placement, num_micro_batches, multiple, self._predicted)
            program = self.plan.program(num_micro_batches)
        validate(program)
        whole = add_collectives(
            lower(program), self._chunk_buckets, self.replica_owners, self._partitioned, self.reduce_per_micro_batch
        )
        return self._lifetimes.add_to(whole, freed) if self._lifetimes is not None else whole

    def _evaluation(self, num_micro_batches: int) -> Program:
        settings = self._settings
        program = lower(inference(settings.num_stages, num_micro_batches, settings.num_chunks, settings.placement))
        if self._partitioned:
            program = add_parameter_gather(program)
        return self._lifetimes.add_to(program) if self._lifetimes is not None else program


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
