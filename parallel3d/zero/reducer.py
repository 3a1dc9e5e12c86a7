"""Reduction of gradients over data parallelism and over replicas, while the backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from parallel3d.autograd.sink import Accumulator, GradientSink
from parallel3d.comm.collectives import Awaited, Group, Work, all_reduce, reduce_scatter_into
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.parameters import ParameterInfo
from parallel3d.schedule.instructions import Instruction
from parallel3d.zero.buckets import ON_DEVICE, Bucket, ShardHomes, make_buckets
from parallel3d.zero.layout import by_owners
from parallel3d.zero.memory import StateBytes, bytes_of
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.transient import TransientBuffers, buffer_sizes


@dataclass
class _Reduction:
    """Reduction in progress, and the function that is called once with its result."""

    work: Work
    finish: Callable[[], object] | None = None
    done: bool = False

    def wait(self) -> None:
        # Wait only once: gloo's reduce-scatter writes its result at every wait.
        if not self.done:
            self.done = True
            self.work.wait()
            if self.finish is not None:
                self.finish()


class GradientReducer:
    """Accumulators of all parameters of this rank, reduced bucket by bucket to the rank that updates each shard.

    parameters: in the order of the layers.
    data_group: the ranks that hold the same parameters.
    replica_groups: owners (see ParameterInfo) -> the ranks that hold a copy of those parameters.
    is_first_tensor_rank: whether this is the first tensor-parallel rank, which counts copies in the norm for all of them.
    on_launch: called with each REDUCE_GRADS that has been launched, and its Work.
    on_value, on_gradient: called with each gradient, see GradientSink.

    sink: adds gradients to the accumulators and knows which have arrived.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        policy: ZeroPolicy,
        rank: int,
        data_group: Group,
        replica_groups: Mapping[tuple[int, ...], Group],
        is_first_tensor_rank: bool = True,
        on_launch: Callable[[Instruction, Work], None] | None = None,
        on_value: Callable[[nn.Parameter, Tensor], None] | None = None,
        on_gradient: Callable[[nn.Parameter], None] | None = None,
        homes: ShardHomes = ON_DEVICE,
    ):
        self._policy = policy
        self._data_group = data_group
        self._replica_groups = replica_groups
        self._partition = data_group if policy.stage > 0 else Group((rank,), None)
        self._is_first_tensor_rank = is_first_tensor_rank
        self._is_first_replica = data_group.ranks[0] == rank
        self._on_launch = on_launch
        self.sink = GradientSink(self._launch_instruction, on_value, on_gradient)
        self.buckets = {
            owners: make_buckets(infos, policy, self._partition, rank, homes)
            for owners, infos in by_owners(parameters).items()
        }
        self._transient: dict[torch.dtype, TransientBuffers] = {}
        self._attach()
        self._reductions: dict[Bucket, _Reduction] = {}
        # Partial sums of a shard's squares, where the reduction computes them on its way.
        self._squares: dict[Bucket, Tensor] = {}
        self._finished = True  # gradients of this step that were partial over tensor-parallel ranks are summed
        self._reduces = True  # gradients up to the last backward's are reduced over data parallelism

    def _attach(self) -> None:
        """Give the sink the accumulators: views of the bucket's buffer, or of the transient one it has at the time.

        The first gradient overwrites, which saves a pass over the memory to clear it, except if the accumulator has
        the weights' dtype: there autograd itself adds.
        """
        transient = [b for b in self.all_buckets() if b.gradients is None]
        for dtype in {b.gradient_dtype for b in transient}:
            sizes = buffer_sizes((b for b in transient if b.gradient_dtype == dtype), self._policy.whole_layers)
            self._transient[dtype] = TransientBuffers(sizes, dtype, transient[0].device)
        for bucket in self.all_buckets():
            for k, info in enumerate(bucket.infos):
                accumulator: Accumulator = partial(self._transient_view, bucket, k)
                if bucket.gradients is not None:
                    accumulator = bucket.view(bucket.gradients, k)
                self.sink.attach(info.parameter, accumulator, not bucket.autograd_adds, info.name)

    def _transient_view(self, bucket: Bucket, k: int) -> Tensor:
        return bucket.view(self._transient[bucket.gradient_dtype].buffer_of(bucket), k)

    def all_buckets(self) -> Iterator[Bucket]:
        """Iterate over every bucket of this rank, those of the last layers first."""
        for buckets in self.buckets.values():
            yield from buckets

    def num_buckets(self) -> dict[tuple[int, ...], int]:
        """Return owners -> number of buckets; a chunk's own parameters have the owners (chunk,)."""
        return {owners: len(buckets) for owners, buckets in self.buckets.items()}

    def start_step(self) -> None:
        """Empty the accumulators for the next batch, also after a batch that failed."""
        # Wait before anything is cleared: a reduction owns the memory that it writes until it is waited for.
        self._wait()
        self._finished, self._reduces = False, True
        for buffers in self._transient.values():
            buffers.release_all()
        for bucket in self.all_buckets():
            bucket.mark_gradients(bucket.is_cleared)
            if bucket.gradients is None and not bucket.is_cleared:
                bucket.gradient_shard.zero_()
        if added := [b.gradients for b in self.all_buckets() if b.gradients is not None and b.autograd_adds]:
            torch._foreach_zero_(added)
        self.sink.open()

    @contextmanager
    def backward(self, reduces: Sequence[Instruction], factor: float = 1.0) -> Iterator[None]:
        """Run a BACKWARD in this context; launch these REDUCE_GRADS in order, each as soon as its bucket is full.

        Half-precision weight gradients go straight into wider accumulators, where make_splittable has made that possible:
        autograd would write, read and add them once more. factor: multiplies all gradients.
        """
        self._reduces = bool(reduces)
        fuses = self.sink.fusing() if self._policy.weight_dtype else nullcontext()
        with self._launching(reduces), fuses, self.sink.scaling(factor):
            yield

    def backward_input(self, place: Hashable) -> AbstractContextManager[None]:
        """Run a BACKWARD_INPUT in this context; its weight gradients are left for `backward_weight(place)`."""
        return self.sink.deferring(place)

    def backward_weight(self, place: Hashable, reduces: Sequence[Instruction]) -> None:
        """Compute the weight gradients left at `place`, launching these REDUCE_GRADS as their buckets fill."""
        with self._launching(reduces, place):
            self.sink.run_deferred(place)

    def launch(self, reduces: Sequence[Instruction]) -> None:
        """Launch these REDUCE_GRADS in order: the gradients of their buckets have arrived."""
        with self._launching(reduces):
            pass

    def _launching(self, reduces: Sequence[Instruction], place: Hashable = None) -> AbstractContextManager[None]:
        if not reduces:
            return nullcontext()
        return self.sink.expecting({i: self._bucket(i).parameters for i in reduces}, place)

    def _bucket(self, i: Instruction) -> Bucket:
        assert i.bucket is not None
        return self.buckets[(i.chunk,)][i.bucket]

    def _launch_instruction(self, i: Instruction) -> None:
        bucket = self._bucket(i)
        self._launch(bucket)
        if self._on_launch is not None:
            self._on_launch(i, self._reductions[bucket].work)

    def _launch(self, bucket: Bucket) -> None:
        """Start to reduce the bucket, even if gradients are missing here: other ranks may have them."""
        before = self._reductions.pop(bucket, None)
        if before is not None:
            before.wait()
        flat, transient = bucket.gradients, bucket.gradients is None
        if flat is None:
            flat = self._transient[bucket.gradient_dtype].buffer_of(bucket)
        if not bucket.autograd_adds:
            bucket.clear_all_but(flat, self.sink.collect(bucket.parameters, keep=not transient))
        reduction = self._reductions[bucket] = self._reduce(bucket, flat, accumulate=transient)
        if transient:
            self._transient[bucket.gradient_dtype].release(bucket, reduction.wait)

    def _reduce(self, bucket: Bucket, flat: Tensor, accumulate: bool) -> _Reduction:
        """Sum `flat` over data parallelism into the bucket's shard, and add the shard's contents if `accumulate`."""
        bucket.mark_gradients()
        shard, dtype = bucket.gradient_shard, self._policy.communication_dtype or flat.dtype
        kernel = self._data_group.reduce_scatter_kernel if self._partition.size > 1 else None
        if kernel is not None and kernel.takes(flat, shard, dtype):
            squares = self._squares_of(bucket, kernel.squares_size(shard.numel(), dtype))
            work = kernel.start(shard, flat, dtype, accumulate, squares)
            return _Reduction(Awaited(work, self._data_group.waiting("a reduce-scatter")))
        if dtype != flat.dtype:
            sent = flat.to(dtype)
            part = sent[bucket.shard]
            work = self._sum(part, sent)
            return _Reduction(work, (lambda: shard.add_(part)) if accumulate else (lambda: shard.copy_(part)))
        if accumulate:
            # The sum of earlier micro-batches is added to this rank's part first, so the result needs no further pass.
            flat[bucket.shard].add_(shard)
        return _Reduction(self._sum(shard, flat))

    def _squares_of(self, bucket: Bucket, size: int) -> Tensor | None:
        """Return where the kernel puts the shard's squares; None if the shard is summed over other ranks afterwards."""
        if len(bucket.owners) > 1 or bucket.kind.partial_over is not None:
            return None
        if bucket not in self._squares:
            self._squares[bucket] = torch.empty(size, dtype=torch.float64, device=bucket.device)
        return self._squares[bucket]

    def _sum(self, shard: Tensor, whole: Tensor) -> Work:
        if self._partition.size == 1:
            return all_reduce(whole, self._data_group)
        return reduce_scatter_into(shard, whole, self._data_group)

    def reduce_replicas(self, owners: tuple[int, ...], index: int) -> None:
        """Sum a replica bucket over data parallelism, then over its owners, so that all copies get the same bits."""
        bucket = self.buckets[owners][index]
        self._launch(bucket)
        self._reductions.pop(bucket).wait()
        self._reductions[bucket] = _Reduction(all_reduce(bucket.gradient_shard, self._replica_groups[owners]))

    def finish_step(self) -> None:
        """Wait for every launched reduction, after which the shards hold the gradient of the global batch.

        Gradients that are partial over tensor-parallel ranks (few and small: norms, biases) are summed here.
        """
        self._wait()
        if not self._finished:
            groups = [(bucket.gradient_shard, bucket.kind.partial_over) for bucket in self.all_buckets()]
            works = [all_reduce(shard, group) for shard, group in groups if group is not None]
            for work in works:
                work.wait()
        self._finished = self._reduces = True

    def end_reductions(self, bucket: Bucket) -> Group | None:
        """Wait for the reductions, so that the caller may read and write the gradients of a bucket.

        Returns the ranks over which they are still to be summed when the step ends; None if they are whole. Raises
        ExecutionError if those of each replica are still its own.
        """
        if not self._reduces and self._data_group.size > 1:
            raise ExecutionError(
                f"the gradients of this step are not yet summed over the {self._data_group.size} replicas: read and write them "
                "after the step's last engine.backward(loss), at engine.is_gradient_accumulation_boundary(), or set "
                "zero_optimization.stage to 2 or 3 and reduce_per_micro_batch to true"
            )
        self._wait()
        self._squares.pop(bucket, None)  # out of date once the caller has written the gradients
        return None if self._finished else bucket.kind.partial_over

    def _wait(self) -> None:
        for reduction in self._reductions.values():
            reduction.wait()
        self._reductions.clear()

    def norm_squared(self, counts: Callable[[tuple[int, ...]], bool], device: torch.device) -> Tensor:
        """Return the squared 2-norm of this rank's share of the gradients, float64, shape []; all shares add up to the model's.

        counts: owners -> whether this rank counts their parameters. Only the first replica counts unpartitioned parameters,
        and only the first tensor-parallel rank counts copies.
        """
        answers = self._partition.size > 1 or self._is_first_replica
        own = [b for o, buckets in self.buckets.items() if answers and counts(o) for b in buckets]
        own = [b for b in own if b.kind.sliced or self._is_first_tensor_rank]
        squares = [self._squares[b] for b in own if b in self._squares]
        if shards := [b.gradient_shard for b in own if b not in self._squares]:
            # Not linalg.vector_norm, which on CUDA makes a copy in float64 first: a third of the optimizer's step.
            squares.append(torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64)).square())
        return torch.cat(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)

    def state_bytes(self) -> StateBytes:
        """Return the bytes of weights, gradients and masters on this rank's device now."""
        buckets = list(self.all_buckets())
        on_device = (b for b in buckets if not b.weights_offloaded)
        weights = (b.parameters if b.sharded is None else (b.sharded.shard,) for b in on_device)
        return StateBytes(
            weights=bytes_of(chain.from_iterable(weights)),
            gradients=bytes_of(b.gradient_shard for b in buckets),
            masters=bytes_of(
                b.master for b in buckets if b.has_own_master and not b.is_offloaded and b.master is not None
            ),
            transient=sum(buffers.nbytes() for buffers in self._transient.values()),
        )

    def non_finite(self) -> list[ParameterInfo]:
        """Return the parameters with an inf or NaN in their gradients on this rank, the last layers first."""
        shards = (shard for bucket in self.all_buckets() for shard in bucket.shards)
        return [shard.info for shard in shards if not torch.isfinite(shard.gradient).all()]


def check_precision(parameters: Sequence[ParameterInfo], policy: ZeroPolicy) -> None:
    """Raise ConfigError for weights built in half precision if neither bf16 nor fp16 training is enabled."""
    for info in parameters:
        if info.parameter.dtype not in (torch.float32, torch.float64) and policy.weight_dtype is None:
            raise ConfigError(
                f"parameter {info.name} is {info.parameter.dtype}: half-precision weights need fp32 masters; set "
                "bf16.enabled or fp16.enabled, or build the layers in torch.float32"
            )
