"""The programs of an engine: built, lowered and validated once for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import ref

from parallel3d.config import PipelineConfig
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.builders import build, inference
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, add_replica_reduction, lower
from parallel3d.schedule.validate import validate


class Programs:
    """Training and evaluation programs of a module, cached.

    pipeline: that section of the configuration; num_buckets: owners -> number of gradient buckets, of the whole model
    (see ParameterInfo.owners); partitioned: weights are gathered before they are used; reduce_per_micro_batch: gradients
    are reduced in every micro-batch.
    """

    def __init__(
        self,
        module: PipelineModule,
        pipeline: PipelineConfig,
        num_buckets: Mapping[tuple[int, ...], int],
        partitioned: bool = False,
        reduce_per_micro_batch: bool = False,
    ):
        self._module = module
        self._pipeline = pipeline
        self._partitioned = partitioned
        self._reduce_per_micro_batch = reduce_per_micro_batch
        self._chunk_buckets = [num_buckets.get((c,), 0) for c in range(len(module.placement))]
        # The owners of each replica bucket; a program's REDUCE_REPLICAS counts along this list.
        self.replica_owners = [
            owners for owners in sorted(num_buckets) if len(owners) > 1 for _ in range(num_buckets[owners])
        ]
        self._cache: dict[tuple[int, bool], Program] = {}

    def get(self, num_micro_batches: int, training: bool) -> Program:
        """The program of a batch of so many micro-batches. Raises ScheduleError for a schedule that can't run."""
        key = (num_micro_batches, training)
        if key not in self._cache:
            self._cache[key] = self._training(num_micro_batches) if training else self._evaluation(num_micro_batches)
        return self._cache[key]

    def weakly(self) -> Callable[[int, bool], Program | None]:
        """`get`, from which None comes when these programs are gone: it keeps neither them nor their module alive."""
        reference = ref(self)

        def get(num_micro_batches: int, training: bool) -> Program | None:
            programs = reference()
            return None if programs is None else programs.get(num_micro_batches, training)

        return get

    def _training(self, num_micro_batches: int) -> Program:
        m = self._module.settings
        program = build(
            self._pipeline.schedule,
            m.num_stages,
            num_micro_batches,
            m.num_chunks,
            m.placement,
            self._pipeline.max_in_flight,
        )
        validate(program)
        reduced = add_gradient_reduction(lower(program), self._chunk_buckets, self._reduce_per_micro_batch)
        return self._gathered(add_replica_reduction(reduced, self.replica_owners))

    def _evaluation(self, num_micro_batches: int) -> Program:
        m = self._module.settings
        return self._gathered(lower(inference(m.num_stages, num_micro_batches, m.num_chunks, m.placement)))

    def _gathered(self, program: Program) -> Program:
        return add_parameter_gather(program) if self._partitioned else program
