"""Seconds of work on a device, and of layers and chunks of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.work import Collective, Exchange, Work
from parallel3d.planner.cluster.cluster import Device
from parallel3d.schedule.instructions import Op

Floats = npt.NDArray[np.float64]

# Share of the bandwidth at which a device adds long tensors that the kernels of layers reach: they reduce over rows, read with
# strides, or are short. From a decoder's steps on 4 H200, eager and compiled, whose difference is such kernels alone
# (2.4 of 4.1 TB/s), and compiled ones by themselves (1.6 TB/s, of fewer bytes than are really moved); 22B's layer of
# arXiv:2205.05198, table 4, on A100s has 0.8.
_OF_BANDWIDTH = 0.7


def compute_seconds(work: Work, device: Device, samples: int = 1) -> float:
    """Return the device's seconds for the work, without its collectives.

    samples: predict this many samples from the work of one, which is about right: what grows with them is multiplied.
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
    """Return the seconds that an exchange adds to its work: waiting for collectives, and slower compute beside them.

    over_slices: seconds of a collective; overlap: see Cluster; samples: see compute_seconds.
    """
    computed = sent = beside = 0.0
    for collective, work in exchange.parts:
        seconds = over_slices(collective.times(samples))
        sent = max(sent, computed) + seconds
        computed += compute_seconds(work, device, samples)
        beside += seconds
    return max(0.0, sent - computed) + (overlap - 1.0) * min(beside, computed)


@dataclass(frozen=True)
class Times:
    """Seconds of each layer or chunk, [3, layers or chunks]: of the forward, the inputs' and the weights' gradients.

    compute: with exchanges; exchanges: what tensor-parallel collectives add; host: in which the host calls the operators.
    """

    compute: Floats
    exchanges: Floats
    host: Floats

    def scaled(self, factors: Floats | float) -> Times:
        """Multiply compute without exchanges by `factors`, [3, layers or chunks] or one for all."""
        return replace(self, compute=(self.compute - self.exchanges) * factors + self.exchanges)

    @property
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
    over_slices: Callable[[Collective], float],
    samples: int = 1,
    overlap: float = 1.0,
    splits: bool = True,
) -> Times:
    """Return the times of each layer on a device.

    - over_slices: seconds of a collective; samples: see compute_seconds; overlap: see Cluster.
    - splits: whether backwards are split. The seconds of a whole backward are divided as those of its two parts are.
    """

    def seconds(work: Work) -> tuple[float, float]:
        waited = sum(exchange_seconds(exchange, device, over_slices, overlap, samples) for exchange in work.exchanges)
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

    known = {key: rows(layer) for key, layer in {id(layer): layer for layer in layers}.items()}
    return Times(*np.ascontiguousarray(np.array([known[id(layer)] for layer in layers]).transpose(1, 2, 0)))


def chunk_times(of_devices: Sequence[Times], bounds: Sequence[int]) -> Times:
    """Return the times of each chunk. of_devices: for each chunk, those of all layers on the slowest device of its stage."""
    parts = list(zip(of_devices, bounds, bounds[1:], strict=False))
    return Times(
        *(np.array([getattr(own, f.name)[:, a:b].sum(axis=1) for own, a, b in parts]).T for f in fields(Times))
    )
