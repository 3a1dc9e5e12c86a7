"""Seconds of work on a device, of layers and chunks of layers, and of a layout's communication on its links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from parallel3d.costs.devices import Device, compute_seconds
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.work import Collective, CollectiveKind, Exchange, Work
from parallel3d.planner.network.fabric import Floats, Integers
from parallel3d.planner.network.links import Kind, Network
from parallel3d.schedule.instructions import Op


def exchange_seconds(
    exchange: Exchange, device: Device, seconds_of: Callable[[Collective], float], overlap: float, samples: int = 1
) -> float:
    """Return the seconds that an exchange adds to its work: waiting for collectives, and compute that they slow.

    seconds_of: seconds of a collective; overlap: see Cluster; samples: see compute_seconds.
    """
    computed = sent = beside = 0.0
    for collective, work in exchange:
        seconds = seconds_of(collective.times(samples))
        sent = max(sent, computed) + seconds
        computed += compute_seconds(work, device, samples)
        beside += seconds
    return max(0.0, sent - computed) + (overlap - 1.0) * min(beside, computed)


@dataclass(frozen=True)
class Times:
    """Seconds of each layer or chunk, [3, layers or chunks]: of the forward, the inputs' and the weights' gradients.

    - compute: the device's seconds, with exchanges; exchanges: the part that tensor-parallel collectives add.
    - host: seconds in which the host calls the operators.
    """

    compute: Floats
    exchanges: Floats
    host: Floats

    def scaled(self, factors: Floats | float) -> Times:
        """Multiply compute without exchanges by `factors`, [3, layers or chunks] or one for all."""
        return replace(self, compute=(self.compute - self.exchanges) * factors + self.exchanges)

    @cached_property
    def total(self) -> Floats:
        """Seconds of a micro-batch's forward and backward, [layers or chunks]."""
        total: Floats = self.compute.sum(axis=0)
        return total


def by_op(parts: Floats) -> dict[Op, Any]:
    """Return the values of each compute operation from those of the three parts, [3, ...]. A BACKWARD has two of them."""
    forward, inputs, weights = parts
    backward = inputs + weights
    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)
    return {op: part.tolist() for op, part in zip(ops, (forward, inputs, weights, backward), strict=True)}


def layer_times(
    layers: Sequence[LayerProfile],
    device: Device,
    seconds_of: Callable[[Collective], float],
    samples: int = 1,
    overlap: float = 1.0,
    splits: bool = True,
) -> Times:
    """Return the times of each layer on a device.

    - seconds_of: seconds of a collective; samples: see compute_seconds; overlap: see Cluster.
    - splits: whether backwards are split. The seconds of a whole backward are divided as those of its two parts are.
    """

    def seconds(work: Work) -> tuple[float, float]:
        waited = sum(exchange_seconds(exchange, device, seconds_of, overlap, samples) for exchange in work.exchanges)
        return compute_seconds(work, device, samples), waited

    def rows(layer: LayerProfile) -> list[list[float]]:
        works = (layer.forward, layer.input_gradient, layer.weight_gradient)
        operators = [work.operators for work in works]
        computed, exchanged = (list(column) for column in zip(*map(seconds, works), strict=True))
        if not splits:
            both, waited = seconds(layer.backward)
            parts = sum(computed[1:])
            computed[1:] = [both * part / parts if parts else 0.0 for part in computed[1:]]
            exchanged[1:] = [waited, 0.0]
            operators[1:] = [layer.backward.operators, 0.0]
        total = [c + e for c, e in zip(computed, exchanged, strict=True)]
        return [total, exchanged, [device.host_seconds * number for number in operators]]

    distinct = {id(layer): layer for layer in layers}
    number = {key: k for k, key in enumerate(distinct)}
    known = np.array(list(map(rows, distinct.values()))).transpose(1, 2, 0)
    return Times(*known.take([number[id(layer)] for layer in layers], axis=2))


def chunk_times(of_devices: Sequence[Times], bounds: Sequence[int]) -> Times:
    """Return the times of each chunk. of_devices: for each chunk, those of all layers on the slowest device of its stage."""
    different = {id(own): own for own in of_devices}
    columns = {key: np.concatenate([own.compute, own.exchanges, own.host]) for key, own in different.items()}
    parts = zip(of_devices, bounds, bounds[1:], strict=False)
    return Times(*np.array([columns[id(own)][:, a:b].sum(axis=1) for own, a, b in parts]).T.reshape(3, 3, -1))


class LayoutLinks:
    """Seconds of collectives and messages between a layout's ranks; all groups that are alike communicate at the same time.

    places: the GPU of each rank; rank = (stage * replicas + replica) * tensor_ranks + tensor rank.
    """

    def __init__(self, network: Network, shape: tuple[int, int, int], places: Sequence[int]):
        self.network, self.shape = network, shape
        self.ranks = np.asarray(places, dtype=np.int64).reshape(shape)
        self._seconds = cache(self._slowest)
        self._lines = cache(lambda kind, groups_of, *stages: network.lines(kind, groups_of(*stages)))
        self.overlap = network.cluster.overlap  # see Cluster

    @cached_property
    def devices(self) -> list[list[Device]]:
        """The kinds of device of each stage."""
        kinds = self.network.device_of[self.ranks].reshape(self.shape[0], -1)
        return [[self.network.devices[kind] for kind in dict.fromkeys(stage.tolist())] for stage in kinds]

    def slowest(self, rate: str, stage: int) -> float:
        """Return the least of the rates of a stage's devices by the name of a field of Device."""
        return min(getattr(device, rate) for device in self.devices[stage])

    def over_tensor_ranks(self, collective: Collective) -> float:
        """Return the seconds of a collective over every tensor-parallel group."""
        return self._seconds(collective.kind, collective.nbytes, self.tensor_groups)

    def over_replicas(self, kind: CollectiveKind, nbytes: float, stage: int) -> float:
        """Return the seconds of a collective over the replicas of each tensor rank of a stage. nbytes: of one rank's tensor."""
        return self._seconds(kind, nbytes, self.replica_groups, stage)

    def over_stages(self, nbytes: float, stages: tuple[int, ...]) -> float:
        """Return the seconds of an all-reduce between corresponding ranks of several stages. nbytes: of each rank's tensor."""
        return self._seconds("all_reduce", nbytes, self.stage_groups, *stages)

    def send(self, nbytes: float, source: int, destination: int) -> float:
        """Return the seconds of a message from every rank of a stage to the corresponding one of another stage."""
        return self._seconds("send", nbytes, self.stage_groups, source, destination)

    def tensor_groups(self, stage: int | None = None) -> Integers:
        """Return the GPUs of each tensor-parallel group, [groups, tensor-parallel ranks], of one stage or of all."""
        return (self.ranks if stage is None else self.ranks[stage]).reshape(-1, self.shape[2])

    def replica_groups(self, stage: int) -> Integers:
        """Return the GPUs of the replicas of each tensor rank of a stage, [tensor-parallel ranks, replicas]."""
        return self.ranks[stage].T

    def stage_groups(self, *stages: int) -> Integers:
        """Return the GPUs of corresponding ranks of several stages, [ranks of a stage, stages]."""
        return self.ranks[list(stages)].reshape(len(stages), -1).T

    def kind(self, groups: Integers) -> str:
        """Return the kind of the slowest links between the members of the first group, as in the cluster's graph."""
        members = [self.network.cluster.gpus[place] for place in groups[0].tolist()]
        if len({gpu.host for gpu in members}) > 1:
            return "nic"
        return "nvlink" if len({gpu.island for gpu in members}) == 1 else "pcie"

    def _slowest(self, kind: Kind, nbytes: float, groups_of: Callable[..., Integers], *stages: int) -> float:
        latency, per_byte = self._lines(kind, groups_of, *stages)
        return float((latency + per_byte * nbytes).max(axis=1).min())
