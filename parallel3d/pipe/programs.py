"""The programs of an engine: built, lowered and validated once for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel3d.errors import ScheduleError
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.builders import build, inference
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.lowering import add_gradient_reduction, add_replica_reduction, lower
from parallel3d.schedule.validate import validate


class Programs:
    """Training and evaluation programs of a module, cached.

    num_buckets: owners -> number of gradient buckets, of the whole model (see ParameterInfo.owners).
    """

    def __init__(
        self,
        module: PipelineModule,
        schedule: str | Sequence[Sequence[str]],
        num_buckets: Mapping[tuple[int, ...], int],
    ):
        self._module = module
        self._schedule = schedule
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

    def _training(self, num_micro_batches: int) -> Program:
        m = self._module
        program = build(self._schedule, m.num_stages, num_micro_batches, m.num_chunks, m.placement_kind)
        validate(program)
        _refuse_split_backward(program)
        reduced = add_gradient_reduction(lower(program), self._chunk_buckets)
        return add_replica_reduction(reduced, self.replica_owners)

    def _evaluation(self, num_micro_batches: int) -> Program:
        m = self._module
        return lower(inference(m.num_stages, num_micro_batches, m.num_chunks, m.placement_kind))


def _refuse_split_backward(program: Program) -> None:
    split = next((i for rank in program.instructions for i in rank if i.op is Op.BACKWARD_INPUT), None)
    if split is not None:
        whole = Instruction(Op.BACKWARD, split.chunk, split.micro_batch)
        raise ScheduleError(
            f"{split} splits a backward in two, which is not yet supported; write {whole}, without its W"
        )
