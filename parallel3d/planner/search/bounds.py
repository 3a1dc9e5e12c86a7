"""Lower bounds of the step time and the memory of every layout of a space."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.config.layout import Layout
from parallel3d.costs.work import Collective, Work
from parallel3d.errors import PartitionError
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.links import Integers
from parallel3d.planner.predict.parameters import merged_parameters
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import Floats, compute_seconds, layer_times
from parallel3d.planner.search.space import Space
from parallel3d.zero.memory import predict_state

# The work of a micro-batch is proportional to its samples but for a constant part, which is at most this share of the bounds.
_SLACK = 0.99
# The stage with most micro-batches in flight may hold fewer activations of each than the mean stage does.
_EVEN = 0.8
_GROUPS = 32  # tensor-parallel groups that are compared


class Bounds:
    """Lower bounds of every layout of a space.

    - seconds: of a step whose layers are spread evenly over all ranks, on the fastest device and the best links, with the
      filling and draining of its pipeline; infinite if the model can't be split over so many tensor-parallel ranks.
    - bytes: of the fullest rank, with state and activations in flight spread evenly.
    - why_not_sliced: number of tensor-parallel ranks -> the reason why layers can't be split over them.
    """

    def __init__(self, predictor: Predictor, space: Space):
        self._predictor = predictor
        devices = {gpu.device for gpu in predictor.network.cluster.gpus}
        fastest = min(devices, key=lambda device: compute_seconds(Work(1e15, 1e14, 1e12), device))
        self._device = replace(fastest, host_seconds=min(device.host_seconds for device in devices))
        self._exchanges: dict[tuple[int, Collective], float] = {}
        self.why_not_sliced: dict[int, str] = {}
        self.seconds, self.bytes = self._bound_seconds(space), np.zeros(len(space))
        possible = np.isfinite(self.seconds)
        self.bytes[possible] = self._bound_bytes(space.where(possible))

    def _bound_seconds(self, space: Space) -> Floats:
        found = np.full(len(space), np.inf)
        predictor, num_chunks, whole = self._predictor, space.chunks, space.whole_backwards
        columns = (space.slices, space.sequence_parallel, space.recompute > 0, space.micro_batch, space.halves, whole)
        for chosen in _groups(*columns):
            layout, is_whole = space.layout(chosen[0]), bool(whole[chosen[0]])
            try:
                # Half blocks together take as long as whole ones, whose profile is needed anyway.
                layers = predictor.layers(layout.model_copy(update={"units": None}), exactly=False)
            except PartitionError as error:
                self.why_not_sliced[layout.slices] = str(error)
                continue
            over_slices = partial(self._fastest, layout.slices)
            times = layer_times(layers, self._device, over_slices, layout.micro_batch, splits=not is_whole)
            p, m, chunks = space.stages[chosen], space.micro_batches[chosen], num_chunks[chosen]
            # The last rank starts p - 1 chunks' forwards late. If backwards are whole, the first one ends as many late.
            late = times.total.sum() if is_whole else times.compute[0].sum()
            computing = m * times.total.sum() / p
            longest = 0.0 if layout.units else times.total.max()
            step = predictor.cooled(np.maximum(computing + late * (p - 1) / (p * chunks), m * longest), computing)
            found[chosen] = _SLACK * predictor.least_factor * np.maximum(step, m * times.host.sum() / p)
        return found

    def _fastest(self, slices: int, collective: Collective) -> float:
        """Return the seconds of a collective over the best placed of some tensor-parallel groups, alone on its links."""
        key = (slices, collective)
        if key not in self._exchanges:
            network = self._predictor.network
            groups = np.arange(len(network.cluster.gpus) // slices * slices).reshape(-1, 1, slices)
            some = groups[:: max(1, len(groups) // _GROUPS)]
            self._exchanges[key] = float(network.each(collective.kind, some, collective.nbytes).min())
        return self._exchanges[key]

    def _bound_bytes(self, space: Space) -> Floats:
        predictor, found = self._predictor, np.zeros(len(space))
        for chosen in _groups(space.slices, space.replicas, space.zero):
            layout = space.layout(chosen[0])
            parameters = [p for layer in predictor.layers(Layout(slices=layout.slices)) for _, p in layer.parameters]
            merged = merged_parameters([ParameterInfo("", p, (0,)) for p in parameters])
            state = predict_state(merged, predictor.profile().policy(layout.zero), layout.replicas)
            found[chosen] = state.steady / space.stages[chosen]
        for chosen in _groups(space.slices, space.sequence_parallel, space.recompute):
            one = space.layout(chosen[0]).model_copy(update={"micro_batch": 1, "units": None})
            stages, samples = space.stages[chosen], _EVEN * space.micro_batch[chosen]
            found[chosen] += predictor.held(one) * samples * np.minimum(stages, space.micro_batches[chosen]) / stages
        return found


def _groups(*columns: npt.NDArray[Any]) -> list[Integers]:
    """Return the indices of the rows that have equal values, group by group."""
    _, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1])
