"""Reduction of gradients over data parallelism and over replicas, while the backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group, Work, all_reduce
from parallel3d.errors import ConfigError
from parallel3d.parameters import ParameterInfo
from parallel3d.schedule.instructions import Instruction
from parallel3d.split_backward import GradientSink
from parallel3d.zero.buckets import Bucket, make_buckets

AllReduce = Callable[[Tensor, Group], Work]


class GradientReducer:
    """ZeRO stage 0: accumulators of all parameters of this rank, all-reduced bucket by bucket.

    parameters: in the order of the layers; data_group: the ranks that hold the same parameters;
    replica_groups: owners (see ParameterInfo) -> the ranks that hold a copy of those parameters.
    Raises ConfigError for parameters in half precision.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        bucket_size: int,
        data_group: Group,
        replica_groups: Mapping[tuple[int, ...], Group],
        all_reduce: AllReduce = all_reduce,
    ):
        _check_precision(parameters)
        self._data_group = data_group
        self._replica_groups = replica_groups
        self._all_reduce = all_reduce
        self._sink = GradientSink()
        # The backward reaches the last layer first: its gradients fill the first bucket.
        by_owners: dict[tuple[int, ...], list[ParameterInfo]] = {}
        for info in reversed(parameters):
            by_owners.setdefault(info.owners, []).append(info)
        # Owners hold their copies in layers of different order: the names alone are in one order on all of them.
        for infos in by_owners.values():
            if infos[0].shared:
                infos.sort(key=lambda info: info.name)
        self.buckets = {owners: make_buckets(infos, bucket_size) for owners, infos in by_owners.items()}
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        for bucket in self._all_buckets():
            for info, view in zip(bucket.infos, bucket.views, strict=True):
                self._sink.attach(info.parameter, view)
                self._bucket_of[info.parameter] = bucket
        self._missing: dict[Bucket, set[nn.Parameter]] = {}
        self._to_launch: deque[Bucket] = deque()
        self._works: list[Work] = []

    def _all_buckets(self) -> Iterator[Bucket]:
        for buckets in self.buckets.values():
            yield from buckets

    def num_buckets(self) -> dict[tuple[int, ...], int]:
        """owners -> number of buckets; a chunk's own parameters have the owners (chunk,)."""
        return {owners: len(buckets) for owners, buckets in self.buckets.items()}

    def start_step(self) -> None:
        """Empty the accumulators for the next batch."""
        for bucket in self._all_buckets():
            bucket.flat.zero_()
        self._sink.open()

    @contextmanager
    def launching(self, reduces: Sequence[Instruction]) -> Iterator[None]:
        """Launch these REDUCE_GRADS in order, each as soon as the backward run inside has filled its bucket.

        What is still missing a gradient at the end (parameters that the graph didn't reach) is launched then.
        """
        if not reduces:
            yield
            return
        assert all(i.bucket is not None for i in reduces)
        buckets = [self.buckets[(i.chunk,)][i.bucket or 0] for i in reduces]
        self._to_launch.extend(buckets)
        self._missing = {b: {info.parameter for info in b.infos} for b in buckets}
        self._sink.listen(self._accumulated)
        try:
            yield
        finally:
            self._sink.listen(None)
        while self._to_launch:
            self._launch(self._to_launch.popleft())

    def _accumulated(self, parameter: nn.Parameter) -> None:
        missing = self._missing.get(self._bucket_of[parameter])
        if missing is None:
            return
        missing.discard(parameter)
        while self._to_launch and not self._missing[self._to_launch[0]]:
            self._launch(self._to_launch.popleft())

    def _launch(self, bucket: Bucket) -> None:
        self._works.append(self._all_reduce(bucket.flat, self._data_group))

    def reduce_replicas(self, owners: tuple[int, ...], bucket: int) -> None:
        """Sum a replica bucket over data parallelism, then over its owners, so that all copies get the same bits."""
        flat = self.buckets[owners][bucket].flat
        self._all_reduce(flat, self._data_group).wait()
        self._works.append(self._all_reduce(flat, self._replica_groups[owners]))

    def finish_step(self) -> None:
        """Wait for every reduction launched: the accumulators hold the gradient of the global batch."""
        while self._works:
            self._works.pop().wait()

    def norm_squared(self, counts: Callable[[tuple[int, ...]], bool]) -> Tensor:
        """Squared 2-norm of this rank's gradients in float64, of those owners alone that `counts` accepts. Shape []."""
        flats = [b.flat for owners, buckets in self.buckets.items() if counts(owners) for b in buckets]
        if not flats:
            return torch.zeros((), dtype=torch.float64)
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64) for flat in flats]
        return torch.stack(norms).square().sum()

    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by `factor`, a scalar on the device."""
        for bucket in self._all_buckets():
            bucket.flat.mul_(factor)


def _check_precision(parameters: Sequence[ParameterInfo]) -> None:
    for info in parameters:
        if info.parameter.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"parameter {info.name} is {info.parameter.dtype}: half-precision weights need fp32 masters, which are "
                "not yet supported; build the layers in torch.float32"
            )
