"""Comparison of a layout's results with those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.checkpoint.parts import Part
from parallel3d.parity.reference import Trained, Whole

# A tensor whose norm is less than this share of the model's is compared on that scale: below, where the true value is
# zero, as for the bias of attention's keys, there is nothing but rounding.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class StepReport:
    """Report on one step.

    - loss, norm: (of the layout, of one process).
    - differences: relative, of the loss, the gradient norm before clipping, and the weight tensor that differs most.
    """

    loss: tuple[float, float]
    norm: tuple[float, float]
    differences: tuple[float, float, float]


@dataclass(frozen=True)
class Report:
    """Report on one layout.

    - gradients, weights: name -> relative difference, after the first and the last step, in model order.
    - classes: the name of each layer's class.
    """

    layout: str
    steps: tuple[StepReport, ...]
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    tolerance: float
    classes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        steps = (difference for step in self.steps for difference in step.differences)
        return all(map(self.agrees, [*steps, *self.gradients.values(), *self.weights.values()]))

    def agrees(self, difference: float) -> bool:
        """Return whether a relative difference is within tolerance; NaN is not."""
        return difference <= self.tolerance

    def differing(self, differences: Mapping[str, float]) -> list[str]:
        """Return the names that differ by more than the tolerance, in model order."""
        return [name for name, difference in differences.items() if not self.agrees(difference)]


def make_report(
    layout: str,
    ranks: Sequence[Trained[list[Part]]],
    wanted: Trained[Whole],
    exact: Trained[Whole],
    tolerance: float,
    classes: tuple[str, ...],
) -> Report:
    """Compare what all ranks hold with one process.

    exact: the same, or in half precision that of a dtype whose rounding is negligible. Where `wanted` is itself far from
    that, as where Adam normalizes the rounding of a gradient that is truly zero, twice that distance passes.
    """
    scales = _scales(wanted.gradients, exact.gradients, tolerance, by_size=False)
    gradients = differences((rank.gradients for rank in ranks), wanted.gradients, scales)
    steps, weights = [], {}
    for k, step in enumerate(wanted.steps):
        scales = _scales(step.weights, exact.steps[k].weights, tolerance, by_size=True)
        weights = differences((rank.steps[k].weights for rank in ranks), step.weights, scales)
        loss = _farthest((rank.steps[k].loss for rank in ranks), step.loss)
        norm = _farthest((rank.steps[k].norm for rank in ranks), step.norm)
        off = _relative(loss, step.loss), _relative(norm, step.norm), _farthest(weights.values(), 0.0)
        steps.append(StepReport((loss, step.loss), (norm, step.norm), off))
    return Report(layout, tuple(steps), gradients, weights, tolerance, classes)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _scales(
    wanted: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float, by_size: bool
) -> dict[str, float]:
    """Return the scale of each tensor's difference: its norm, or 1% of the model's where that is more.

    by_size: 1% of what a tensor of its size has of the model's norm. No scale is less than lets twice the rounding of the
    wanted tensor, its distance from the exact one, pass.
    """
    norm = math.sqrt(sum(_norm(tensor) ** 2 for tensor in wanted.values()))
    total = sum(tensor.numel() for tensor in wanted.values())
    scales = {}
    for name, tensor in wanted.items():
        rounding = _norm(tensor.double() - exact[name].double())
        share = math.sqrt(tensor.numel() / max(1, total)) if by_size else 1.0
        scales[name] = max(_norm(tensor), _NEGLIGIBLE * norm * share, 2 * rounding / tolerance)
    return scales


def differences(
    ranks: Iterable[Sequence[Part]], wanted: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, float]:
    """Return name -> ‖got - wanted‖ / its scale, each element by the copy that is farthest off.

    Infinite where no rank holds some element, or a name is not the reference's.
    """
    errors = {name: torch.full_like(whole, -1.0) for name, whole in wanted.items()}
    unknown = {}
    for part in (part for own in ranks for part in own):
        if part.name in errors:
            where = part.box.slices([0] * len(part.shape))
            error = errors[part.name][where]
            error.copy_(torch.maximum(error, (part.values - wanted[part.name][where]).abs()))
        else:
            unknown[part.name] = math.inf
    for error in errors.values():
        if bool((error < 0).any()):
            error.fill_(math.inf)
    return {name: _norm(error) / max(scales[name], 1e-30) for name, error in errors.items()} | unknown


def _farthest(numbers: Iterable[float], wanted: float) -> float:
    """Return the number that differs most from the wanted one, NaN first; 0 of no numbers."""
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else abs(number - wanted), default=0.0)


def _relative(got: float, wanted: float) -> float:
    return abs(got - wanted) / max(abs(wanted), 1e-30) if got != wanted else 0.0
