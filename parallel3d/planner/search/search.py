"""The best layouts of a space: bounds for all at once, then predictions of those that could still win."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from parallel3d.config.layout import Layout
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.work import Collective, Work
from parallel3d.errors import PartitionError
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.links import Integers, Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import compute_seconds
from parallel3d.planner.search.found import Found, Refused
from parallel3d.planner.search.space import VARIANTS, Space
from parallel3d.planner.search.trials import FEW, Trials
from parallel3d.schedule.builders import WHOLE_BACKWARDS
from parallel3d.zero.memory import predict_state

Floats = npt.NDArray[np.float64]

# Work grows with the samples but for a constant part, of which at most this share of the bounds is.
_SLACK = 0.99
# The stage with most micro-batches in flight may hold fewer activations of each than the mean stage does.
_EVEN = 0.8
_GROUPS = 32  # of slices, that are looked at
_LEANER = (0.2, 0.4, 0.6)  # of the memory: what the best layouts with so little take is told, too
_QUICK = 512  # stages x stages x chunks


@dataclass(frozen=True)
class _Least:
    """Of one slicing and number of samples, on the fastest device: seconds of all layers, and of the longest one; host: of
    the fastest host, for all layers.
    """

    forward: float
    whole: float
    longest: float
    host: float


class Bounds:
    """What no layout of a space can be below: seconds, of layers spread evenly over all ranks, on the fastest device and the
    best links, and of the pipeline's filling and draining; bytes of state, and of activations in flight, spread evenly.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor, self._space = predictor, space
        devices = {gpu.device for gpu in predictor.network.cluster.gpus}
        self._fastest = min(devices, key=lambda d: compute_seconds(Work(1e15, 1e14, 1e12), d))
        self._host_seconds = min(device.host_seconds for device in devices)
        self._exchanges: dict[tuple[Collective, int], float] = {}
        self.why: dict[int, str] = {}  # slices -> why they can't be had

    def seconds(self) -> Floats:
        """Of each layout; infinite where the model can't be sliced so."""
        space, found = self._space, np.full(len(self._space), np.inf)
        for chosen, (slices, shares, recompute, samples) in _groups(
            space.slices, space.sequence_parallel, space.recompute, space.micro_batch
        ):
            try:
                least = self._least(slices, bool(shares), recompute, samples)
            except PartitionError as error:
                self.why[slices] = str(error)
                continue
            p, m = space.stages[chosen], space.micro_batches[chosen]
            chunks = np.array([variant.chunks for variant in VARIANTS])[space.variant[chosen]]
            whole = np.array([variant.schedule in WHOLE_BACKWARDS for variant in VARIANTS])[space.variant[chosen]]
            # The last rank starts p - 1 chunks' forwards late; where backwards are whole, the first ends as many late.
            ends = np.where(whole, least.whole, least.forward) * (p - 1) / (p * chunks)
            computing = m * least.whole / p
            stepping = self._predictor.cooled(np.maximum(computing + ends, m * least.longest), computing)
            found[chosen] = np.maximum(stepping, m * least.host / p)
        return _SLACK * self._predictor.least_factor * found

    def bytes(self) -> Floats:
        """Of each layout's fullest rank."""
        space, found = self._space, np.zeros(len(self._space))
        for chosen, (slices, replicas, zero) in _groups(space.slices, space.replicas, space.zero):
            if slices in self.why:
                continue
            layers = self._predictor.profile.layers(slices)
            numel = sum(p.numel() for layer in layers for _, p in layer.parameters)
            built = next((p.dtype for layer in layers for _, p in layer.parameters), torch.float32)
            one = ParameterInfo("", nn.Parameter(torch.empty(numel, dtype=built, device="meta")), (0,))
            policy = self._predictor.policy(Layout(replicas=replicas, zero=zero))
            state = predict_state([one], policy, replicas)
            found[chosen] = state.steady / space.stages[chosen]
        for chosen, (slices, shares, recompute) in _groups(space.slices, space.sequence_parallel, space.recompute):
            if slices not in self.why:
                held = _EVEN * self._predictor.held(slices, recompute) * space.micro_batch[chosen]
                held = held / slices if shares else held
                p = space.stages[chosen]
                found[chosen] += held * np.minimum(p, space.micro_batches[chosen]) / p
        return found

    def _least(self, slices: int, shares: bool, recompute: int, samples: int) -> _Least:
        layers = self._predictor.profile.layers(slices, False, 1, recompute)
        # What lies between sliced layers is shared, if sequences are; all else stays.
        moved = 1 / slices if shares else 1.0
        different = {id(layer): layer for layer in layers}
        of_layer = {key: self._of_layer(layer, slices, samples, moved) for key, layer in different.items()}
        forward, whole = np.array([of_layer[id(layer)] for layer in layers]).T
        calls = sum(
            layer.forward.operators
            + min(layer.input_gradient.operators + layer.weight_gradient.operators, layer.backward.operators)
            for layer in layers
        )
        return _Least(float(forward.sum()), float(whole.sum()), float(whole.max()), self._host_seconds * calls)

    def _of_layer(self, layer: LayerProfile, slices: int, samples: int, moved: float) -> tuple[float, float]:
        works = (layer.forward, layer.input_gradient, layer.weight_gradient, layer.backward)
        shared = works if moved == 1 else [replace(work, moved=moved * work.moved) for work in works]
        forward, inputs, weights, backward = (self._of_work(work, slices, samples) for work in shared)
        return forward, forward + min(inputs + weights, backward)

    def _of_work(self, work: Work, slices: int, samples: int) -> float:
        waited = 0.0
        for exchange in work.exchanges:
            sent = sum(self._best(collective.times(samples), slices) for collective, _ in exchange.parts)
            beside = sum(compute_seconds(work, self._fastest, samples) for _, work in exchange.parts)
            waited += max(0.0, sent - beside)
        return compute_seconds(work, self._fastest, samples) + waited

    def _best(self, collective: Collective, slices: int) -> float:
        """Seconds over one slice group that has its links for itself, of the best placed of some."""
        key = (collective, slices)
        if key not in self._exchanges:
            network = self._predictor.network
            groups = np.arange(len(network.cluster.gpus) // slices * slices).reshape(-1, 1, slices)
            some = groups[:: max(1, len(groups) // _GROUPS)]
            seconds = network.each(collective.kind, some, collective.nbytes)
            self._exchanges[key] = float(seconds.min())
        return self._exchanges[key]


def _groups(*columns: Integers) -> list[tuple[Integers, list[int]]]:
    """(places, values) of the rows that have the same values."""
    rows = np.stack(columns, axis=1)
    values, group = np.unique(rows, axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    places = np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1])
    return list(zip(places, values.tolist(), strict=True))


class Search:
    """Looks for the shortest step in a space, by predictions in the order of their bounds.

    num_alternatives: shapes (ranks along each axis) of which the best is looked for too, beside that of all.
    """

    def __init__(self, predictor: Predictor, space: Space, num_alternatives: int = 5):
        self._predictor, self.space = predictor, space
        self._alternatives = num_alternatives
        bounds = Bounds(predictor, space)
        self.seconds, self.bytes = bounds.seconds(), bounds.bytes()
        self.why_not_sliced = bounds.why
        self.capacity = max(gpu.device.memory for gpu in predictor.network.cluster.gpus)
        self.trials = Trials(predictor, space)

    @property
    def found(self) -> list[Found]:
        """All that were predicted, in that order."""
        return self.trials.found

    @property
    def refused(self) -> list[Refused]:
        """Those that can't fit, see refuse()."""
        return self.trials.refused

    def run(self) -> list[Found]:
        """Those that fit, the shortest first; none where nothing does."""
        possible = np.flatnonzero(np.isfinite(self.seconds) & (self.bytes <= self.capacity))
        order = possible[np.argsort(self.seconds[possible], kind="stable")]
        shapes = np.stack([self.space.stages, self.space.replicas, self.space.slices], axis=1)
        done = self.trials.until_certain(list(zip(self.seconds[order].tolist(), order.tolist(), strict=True)))
        best = self._best_of(self.found)
        tried = {found.shape for found in self.found if found.fits}
        for shape in self._shapes_in_order(order, shapes):
            if len(tried) >= self._alternatives or best is None:
                break
            if shape not in tried:
                own = order[(shapes[order] == np.array(shape)).all(axis=1)]
                done |= self.trials.until_fits([k for k in own.tolist() if k not in done and self._is_quick(k)])
                tried.add(shape)
        for share in _LEANER if best is not None else ():
            lean = order[self.bytes[order] <= share * self.capacity].tolist()
            done |= self.trials.until_fits([k for k in lean[:FEW] if k not in done and self._is_quick(k)])
        return sorted((found for found in self.found if found.fits), key=lambda f: f.outlook.seconds)

    def _is_quick(self, k: int) -> bool:
        """Whether its program is soon made: for layouts that aren't going to win anyway."""
        return int(self.space.stages[k]) ** 2 * VARIANTS[self.space.variant[k]].chunks <= _QUICK

    @staticmethod
    def _shapes_in_order(order: Integers, shapes: Integers) -> list[Shape]:
        return list(dict.fromkeys((p, d, t) for p, d, t in shapes[order].tolist()))

    @staticmethod
    def _best_of(found: Iterable[Found]) -> Found | None:
        return min((f for f in found if f.fits), key=lambda f: f.outlook.seconds, default=None)
