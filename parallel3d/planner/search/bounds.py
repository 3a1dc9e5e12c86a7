"""Lower bounds of the step time and the memory of every layout of a space."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from parallel3d.config.layout import Layout
from parallel3d.costs.work import Collective, Work
from parallel3d.errors import PartitionError
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.links import Integers
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import Floats, compute_seconds, layer_times
from parallel3d.planner.search.space import VARIANTS, Space
from parallel3d.schedule.builders import WHOLE_BACKWARDS
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
        self._exchanges: dict[tuple[Collective, int], float] = {}
        self.why_not_sliced: dict[int, str] = {}
        self.seconds = self._bound_seconds(space)
        self.bytes = self._bound_bytes(space.where(np.isfinite(self.seconds)), np.isfinite(self.seconds))

    def _bound_seconds(self, space: Space) -> Floats:
        predictor, found = self._predictor, np.full(len(space), np.inf)
        num_chunks = np.array([variant.chunks for variant in VARIANTS])[space.variant]
        whole = np.array([variant.schedule in WHOLE_BACKWARDS for variant in VARIANTS])[space.variant]
        columns = (space.slices, space.sequence_parallel, space.recompute > 0, space.micro_batch, space.halves, whole)
        for chosen in _groups(*columns):
            layout, is_whole = space.layout(chosen[0]), bool(whole[chosen[0]])
            try:
                # Half blocks together take as long as whole ones.
                layers = predictor.layers(layout.model_copy(update={"units": None}), exactly=False)
            except PartitionError as error:
                self.why_not_sliced[layout.slices] = str(error)
                continue
            times = layer_times(
                layers,
                self._device,
                lambda c, n=layout.slices: self._fastest(c, n),
                layout.micro_batch,
                1.0,
                not is_whole,
            )
            p, m, chunks = space.stages[chosen], space.micro_batches[chosen], num_chunks[chosen]
            # The last rank starts p - 1 chunks' forwards late. If backwards are whole, the first one ends as many late.
            late = times.total.sum() if is_whole else times.compute[0].sum()
            computing = m * times.total.sum() / p
            longest = np.maximum(
                computing + late * (p - 1) / (p * chunks), m * times.total.max() * (layout.units is None)
            )
            step = np.maximum(predictor.cooled(longest, computing), m * times.host.sum() / p)
            found[chosen] = _SLACK * predictor.least_factor() * step
        return found

    def _fastest(self, collective: Collective, slices: int) -> float:
        """Return the seconds of a collective over the best placed of some tensor-parallel groups, alone on its links."""
        key = (collective, slices)
        if key not in self._exchanges:
            network = self._predictor.network
            groups = np.arange(len(network.cluster.gpus) // slices * slices).reshape(-1, 1, slices)
            some = groups[:: max(1, len(groups) // _GROUPS)]
            self._exchanges[key] = float(network.each(collective.kind, some, collective.nbytes).min())
        return self._exchanges[key]

    def _bound_bytes(self, space: Space, possible) -> Floats:
        predictor, found = self._predictor, np.zeros(len(space))
        for chosen in _groups(space.slices, space.replicas, space.zero):
            layout = space.layout(chosen[0])
            layers = predictor.layers(Layout(slices=layout.slices))
            parameters = [parameter for layer in layers for _, parameter in layer.parameters]
            dtype = parameters[0].dtype if parameters else torch.float32
            all_of_them = torch.empty(sum(p.numel() for p in parameters), dtype=dtype, device="meta")
            one = ParameterInfo("", nn.Parameter(all_of_them), (0,))
            state = predict_state([one], predictor.policy(layout), layout.replicas)
            found[chosen] = state.steady / space.stages[chosen]
        for chosen in _groups(space.slices, space.sequence_parallel, space.recompute, space.halves):
            one = {"micro_batch": 1, "units": None}
            held = _EVEN * predictor.held(space.layout(chosen[0]).model_copy(update=one))
            p = space.stages[chosen]
            found[chosen] += held * space.micro_batch[chosen] * np.minimum(p, space.micro_batches[chosen]) / p
        every = np.zeros(len(possible))
        every[possible] = found
        return every


def _groups(*columns: Integers) -> list[Integers]:
    """Return the indices of the rows that have equal values, group by group."""
    _, group = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    order = np.argsort(group.ravel(), kind="stable")
    return np.split(order, np.cumsum(np.bincount(group.ravel()))[:-1])
