"""Seconds: of work on a device, of a layout's communication on its links, and of a training step by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from parallel3d.costs.profilers import LayerSeconds
from parallel3d.costs.work import Collective, CollectiveKind, Exchange, Work
from parallel3d.planner.cluster.cluster import Device
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.profile import LayerProfile
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.timing import Cost

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Shape = tuple[int, int, int]  # ranks along pipe, data, model


# Of the bandwidth at which a device adds long tensors, what the kernels of layers reach: they reduce over rows, read with
# strides, or are short. From a decoder's steps on 4 H200, eager and compiled, whose difference is such kernels alone
# (2.4 of 4.1 TB/s), and compiled ones by themselves (1.6 TB/s, of fewer bytes than are really moved); 22B's layer of
# arXiv:2205.05198, table 4, on A100s has 0.8.
_OF_BANDWIDTH = 0.7


def compute_seconds(work: Work, device: Device, samples: int = 1) -> float:
    """What the device itself takes for the work, without its collectives.

    samples: about what so many at once take, of the work of one: no more than what grows with them.
    """
    growing = (
        work.gemm_flops / device.gemm_flops
        + work.attention_flops / device.attention_flops
        + work.operands / device.memory_bandwidth
        + work.moved / (_OF_BANDWIDTH * device.memory_bandwidth)
    )
    return samples * growing + work.weights / device.memory_bandwidth + work.kernels * device.kernel_seconds


def exchange_seconds(
    exchange: Exchange, device: Device, over_slices: Callable[[Collective], float], overlap: float, samples: int = 1
) -> float:
    """By which an exchange makes its work longer: what is waited for, and what is slower beside it. samples: see
    compute_seconds.
    """
    computed = sent = beside = 0.0
    for collective, work in exchange.parts:
        seconds = over_slices(collective.times(samples))
        sent = max(sent, computed) + seconds
        computed += compute_seconds(work, device, samples)
        beside += seconds
    return max(0.0, sent - computed) + (overlap - 1.0) * min(beside, computed)


class LayoutLinks:
    """Seconds that a layout's communication takes on its links, alike groups all at once.

    places: the GPU of each rank; rank = (stage * replicas + replica) * slices + slice. roughly: take all stages' links for
    those of the first.
    """

    def __init__(self, network: Network, shape: Shape, places: Sequence[int], roughly: bool = False):
        self.network, self.shape = network, shape
        self.ranks = np.asarray(places, dtype=np.int64).reshape(shape)
        self._roughly = roughly
        self._known: dict[tuple[object, ...], float] = {}
        self._devices: dict[int, list[Device]] = {}

    @property
    def overlap(self) -> float:
        """See Cluster."""
        return self.network.cluster.overlap

    def devices(self, stage: int) -> list[Device]:
        """The kinds of device that a stage lies on."""
        if stage not in self._devices:
            kinds, first = np.unique(self.network.device_of[self.ranks[stage].ravel()], return_index=True)
            self._devices[stage] = [self.network.devices[kind] for kind in kinds[np.argsort(first)]]
        return self._devices[stage]

    @cached_property
    def first_alike(self) -> list[int]:
        """Of each stage the first one on the same kinds of device."""
        first: dict[tuple[Device, ...], int] = {}
        return [first.setdefault(tuple(self.devices(stage)), stage) for stage in range(self.shape[0])]

    @cached_property
    def capacities(self) -> list[int]:
        """Bytes of each stage's smallest device."""
        return [min(device.memory for device in self.devices(stage)) for stage in range(self.shape[0])]

    def over_slices(self, collective: Collective) -> float:
        """Of one over every slice group."""
        return self._collective("model", collective.kind, collective.nbytes, self.slice_groups)

    def like(self, stage: int) -> int:
        """The stage whose links a stage's are taken for."""
        return 0 if self._roughly else stage

    def over_replicas(self, kind: CollectiveKind, nbytes: float, stage: int) -> float:
        """Of one over the replicas of each slice of a stage. nbytes: of a whole tensor that one slice holds."""
        stage = self.like(stage)
        return self._collective(("data", stage), kind, nbytes, lambda: self.replica_groups(stage))

    def over_stages(self, nbytes: float, stages: tuple[int, ...]) -> float:
        """Of an all-reduce between the likes of several stages. nbytes: of the tensor that each of their ranks has."""
        groups = self.ranks[list(stages)].reshape(len(stages), -1).T
        return self._collective(("pipe", stages), "all_reduce", nbytes, lambda: groups)

    def send(self, nbytes: float, source: int, destination: int) -> float:
        """Of a message from every rank of a stage to its like in another."""
        if self._roughly:
            source, destination = (0, 1) if source < destination else (1, 0)
        key = ("send", source, destination, nbytes)
        if key not in self._known:
            self._known[key] = self.network.slowest("send", self.pairs(source, destination), nbytes)
        return self._known[key]

    def slice_groups(self, stage: int | None = None) -> Integers:
        """[groups, members] of GPUs, of one stage or of all."""
        return (self.ranks if stage is None else self.ranks[stage]).reshape(-1, self.shape[2])

    def replica_groups(self, stage: int) -> Integers:
        """[groups, members] of GPUs, of a stage."""
        return self.ranks[stage].T

    def pairs(self, source: int, destination: int) -> Integers:
        """[pairs, 2] of GPUs that send and receive between two stages."""
        return np.stack([self.ranks[source].ravel(), self.ranks[destination].ravel()], axis=1)

    def kind(self, groups: Integers) -> str:
        """Of the slowest links between the members of a group, as edges of the cluster's graph have it."""
        gpus = self.network.cluster.gpus
        members = [gpus[place] for place in groups[0].tolist()]
        if len({gpu.host for gpu in members}) > 1:
            return "nic"
        return "nvlink" if len({gpu.island for gpu in members}) == 1 else "pcie"

    def _collective(self, which: object, kind: CollectiveKind, nbytes: float, groups: Callable[[], Integers]) -> float:
        key = (which, kind, nbytes)
        if key not in self._known:
            members = groups()
            self._known[key] = self.network.slowest(kind, members, nbytes) if members.shape[1] > 1 else 0.0
        return self._known[key]


@dataclass(frozen=True)
class Times:
    """Seconds of the kinds of compute, as [layers] or [chunks], collectives of slices included; exchanges: of these alone,
    [3, ...] of the forward, the inputs' and the weights' gradients; host: in which the host calls their operators, likewise.
    """

    forward: Floats
    input_gradient: Floats
    weight_gradient: Floats
    exchanges: Floats
    host: Floats

    def scaled(self, factors: Floats) -> Times:
        """With compute multiplied, [3, ...], and exchanges as they are."""
        works = np.stack([self.forward, self.input_gradient, self.weight_gradient])
        scaled = (works - self.exchanges) * factors + self.exchanges
        return Times(scaled[0], scaled[1], scaled[2], self.exchanges, self.host)

    def factors_of(self, measured: Sequence[LayerSeconds]) -> Floats:
        """Return measured / these seconds of each layer's forward and both parts of its backward; 1 if one is 0.

        Shape [3, layers].
        """
        seconds = np.array(measured).T
        computed = np.stack([self.forward, self.input_gradient, self.weight_gradient])
        known = (seconds > 0) & (computed > 0)
        return np.where(known, seconds / np.where(known, computed, 1.0), 1.0)

    @property
    def total(self) -> Floats:
        """Of a micro-batch's forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient

    def shares(self) -> dict[Op, float]:
        """Of the total of all, what each kind of compute takes."""
        works = (self.forward, self.input_gradient, self.weight_gradient)
        forward, inputs, weights = (float(work.sum() / self.total.sum()) for work in works)
        return {
            Op.FORWARD: forward,
            Op.BACKWARD_INPUT: inputs,
            Op.BACKWARD_WEIGHT: weights,
            Op.BACKWARD: inputs + weights,
        }


def layer_times(
    layers: Sequence[LayerProfile],
    device: Device,
    over_slices: Callable[[Collective], float],
    samples: int = 1,
    overlap: float = 1.0,
    splits: bool = True,
) -> Times:
    """Of each layer on a device. over_slices: seconds of a collective; samples: see compute_seconds; overlap: see Cluster;
    splits: whether backwards are split: of a whole one, what hides its exchanges counts for both of its parts alike.
    """

    def seconds(work: Work) -> tuple[float, float]:
        waited = sum(exchange_seconds(exchange, device, over_slices, overlap, samples) for exchange in work.exchanges)
        return compute_seconds(work, device, samples), waited

    known: dict[int, tuple[list[float], list[float], list[float]]] = {}
    for layer in layers:
        if id(layer) not in known:
            works = (layer.forward, layer.input_gradient, layer.weight_gradient)
            called = [work.operators for work in works]
            computed, exchanged = (list(column) for column in zip(*map(seconds, works), strict=True))
            if not splits:
                both, waited = seconds(layer.backward)
                parts = sum(computed[1:])
                computed[1:] = [both * part / parts if parts else 0.0 for part in computed[1:]]
                exchanged[1:] = [waited, 0.0]
                called[1:] = [layer.backward.operators, 0.0]
            host = [device.host_seconds * operators for operators in called]
            known[id(layer)] = [c + e for c, e in zip(computed, exchanged, strict=True)], exchanged, host
    works_of, exchanges, host_of = (np.array([known[id(layer)][k] for layer in layers]).T for k in range(3))
    return Times(works_of[0], works_of[1], works_of[2], exchanges, host_of)


def chunk_times(of_devices: Sequence[Times], bounds: Sequence[int]) -> Times:
    """Of each chunk: the slowest device of those that chunk c lies on, of whose layers of_devices[c] is."""
    different = {id(times): times for times in of_devices}
    works = {key: np.vstack([t.forward, t.input_gradient, t.weight_gradient]) for key, t in different.items()}
    parts = list(zip(of_devices, bounds, bounds[1:], strict=False))
    sums = np.ascontiguousarray(np.array([works[id(times)][:, a:b].sum(axis=1) for times, a, b in parts]).T)
    exchanges = np.array([times.exchanges[:, a:b].sum(axis=1) for times, a, b in parts]).T
    host = np.array([times.host[:, a:b].sum(axis=1) for times, a, b in parts]).T
    return Times(sums[0], sums[1], sums[2], exchanges, host)


@dataclass(frozen=True)
class StepCost:
    """Seconds of each instruction of a layout's program.

    activation, gradient: of the message that each chunk sends on, and back; reduce: of each bucket of each chunk; gather: of
    all weights of each chunk; replicas: of each replica bucket.
    """

    times: Times
    activation: tuple[float, ...]
    gradient: tuple[float, ...]
    reduce: tuple[tuple[float, ...], ...]
    gather: tuple[float, ...]
    replicas: tuple[float, ...]

    def cost(self) -> Cost:
        """As simulate() takes it."""
        t = self.times
        by_chunk = {
            Op.FORWARD: t.forward.tolist(),
            Op.BACKWARD_INPUT: t.input_gradient.tolist(),
            Op.BACKWARD_WEIGHT: t.weight_gradient.tolist(),
            Op.BACKWARD: (t.input_gradient + t.weight_gradient).tolist(),
            Op.SEND_ACTIVATION: self.activation,
            Op.SEND_GRADIENT: self.gradient,
            Op.GATHER_PARAMS: self.gather,
        }

        def cost(i: Instruction) -> float:
            if i.bucket is None:
                return by_chunk[i.op][i.chunk] if i.op in by_chunk else 0.0
            return self.reduce[i.chunk][i.bucket] if i.op is Op.REDUCE_GRADS else self.replicas[i.bucket]

        return cost

    def host(self) -> Cost | None:
        """As Simulation takes it: what the host calls each instruction's operators for; None where that is never longer than
        what the device does for them, and so delays nothing.
        """
        forward, inputs, weights = self.times.host
        t = self.times
        if np.all(forward <= t.forward) and np.all(inputs <= t.input_gradient) and np.all(weights <= t.weight_gradient):
            return None
        by_chunk = {
            Op.FORWARD: forward.tolist(),
            Op.BACKWARD_INPUT: inputs.tolist(),
            Op.BACKWARD_WEIGHT: weights.tolist(),
            Op.BACKWARD: (inputs + weights).tolist(),
        }
        return lambda i: by_chunk[i.op][i.chunk] if i.op in by_chunk else 0.0

    def without_links(self) -> StepCost:
        """The same where nothing waits for a link, inside of layers neither."""
        t = self.times
        forward, input_gradient, weight_gradient = (
            part - exchanged
            for part, exchanged in zip((t.forward, t.input_gradient, t.weight_gradient), t.exchanges, strict=True)
        )
        return StepCost(
            Times(forward, input_gradient, weight_gradient, np.zeros_like(t.exchanges), t.host),
            (0.0,) * len(self.activation),
            (0.0,) * len(self.gradient),
            tuple((0.0,) * len(buckets) for buckets in self.reduce),
            (0.0,) * len(self.gather),
            (0.0,) * len(self.replicas),
        )
