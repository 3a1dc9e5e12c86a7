"""Comparison of a layout's results with those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.parameters import Slicing
from parallel3d.parity.reference import Step
from parallel3d.parity.worker import Held, RankResult

# A tensor whose norm is less than this share of the model's is compared on that scale: below, where the true value is
# zero, as for the bias of attention's keys, there is nothing but rounding.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class StepReport:
    """loss, norm: (of the layout, of one process); weights: the largest relative difference of a tensor."""

    loss: tuple[float, float]
    norm: tuple[float, float]
    weights: float
    tolerance: float

    @property
    def loss_agrees(self) -> bool:
        """Within tolerance."""
        return _agrees(_relative(*self.loss), self.tolerance)

    @property
    def norm_agrees(self) -> bool:
        """Within tolerance."""
        return _agrees(_relative(*self.norm), self.tolerance)

    @property
    def weights_agree(self) -> bool:
        """Within tolerance."""
        return _agrees(self.weights, self.tolerance)


@dataclass(frozen=True)
class Report:
    """Report on one layout. gradients, weights: name -> relative difference, after the first and last step, in model order."""

    layout: str
    steps: tuple[StepReport, ...]
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    tolerance: float
    classes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        steps = (s.loss_agrees and s.norm_agrees and s.weights_agree for s in self.steps)
        return all(steps) and not self.differing(self.gradients) and not self.differing(self.weights)

    def differing(self, differences: Mapping[str, float]) -> list[str]:
        """The names that differ by more than the tolerance, in model order."""
        return [name for name, difference in differences.items() if not _agrees(difference, self.tolerance)]


@dataclass(frozen=True)
class Trained:
    """Result of one process: its steps, and the gradients of the first."""

    steps: Sequence[Step]
    gradients: Mapping[str, Tensor]


def make_report(
    layout: str,
    ranks: Sequence[RankResult],
    wanted: Trained,
    exact: Trained | None,
    tolerance: float,
    classes: tuple[str, ...],
) -> Report:
    """Compare what all ranks hold with one process.

    exact: the same in a dtype whose rounding is negligible. Where `wanted` is itself far from that, as where Adam
    normalizes the rounding of a gradient that is truly zero, twice that distance passes.
    """
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in wanted.gradients.values()))
    scales = {name: max(float(g.double().norm()), _NEGLIGIBLE * norm) for name, g in wanted.gradients.items()}
    if exact is not None:
        _allow_rounding(scales, wanted.gradients, exact.gradients, tolerance)
    of_gradients = differences((r["gradients"] for r in ranks), wanted.gradients, scales)
    steps, of_weights = [], {}
    for k, step in enumerate(wanted.steps):
        scales = _weight_scales(step)
        if exact is not None:
            _allow_rounding(scales, step.weights, exact.steps[k].weights, tolerance)
        of_weights = differences((r["weights"][k] for r in ranks), step.weights, scales)
        loss, own_norm = _farthest(ranks, "losses", k, step.loss), _farthest(ranks, "norms", k, step.norm)
        largest = _largest(of_weights.values())
        steps.append(StepReport((loss, step.loss), (own_norm, step.norm), largest, tolerance))
    return Report(layout, tuple(steps), of_gradients, of_weights, tolerance, classes)


def _weight_scales(step: Step) -> dict[str, float]:
    """Each tensor's norm, or 1% of that of a tensor of its size with the root mean square of all weights."""
    total = sum(w.numel() for w in step.weights.values())
    squares = sum(float(w.double().square().sum()) for w in step.weights.values())
    return {
        name: max(float(w.double().norm()), _NEGLIGIBLE * math.sqrt(squares * w.numel() / max(1, total)))
        for name, w in step.weights.items()
    }


def _allow_rounding(
    scales: dict[str, float], wanted: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float
) -> None:
    """Raise the scales to where twice the distance between the two is the tolerance."""
    for name, tensor in wanted.items():
        rounding = float((tensor.double() - exact[name].double()).norm())
        scales[name] = max(scales[name], 2 * rounding / tolerance)


def differences(
    ranks: Iterable[Sequence[Held]], wanted: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, float]:
    """name -> ‖got - wanted‖ / its scale, each element by the copy that is farthest off.

    Infinite where no rank holds some element, or a name is not the reference's.
    """
    errors = {name: torch.full_like(whole, -1.0) for name, whole in wanted.items()}
    unknown = []
    for part in (part for own in ranks for part in own):
        if part["name"] in errors:
            _note(errors[part["name"]], part, wanted[part["name"]])
        else:
            unknown.append(part["name"])
    found = {}
    for name, error in errors.items():
        is_whole = not bool((error < 0).any())
        found[name] = float(error.double().norm()) / max(scales[name], 1e-30) if is_whole else math.inf
    return found | dict.fromkeys(unknown, math.inf)


def _note(error: Tensor, part: Held, wanted: Tensor) -> None:
    """Raise the error of the elements of a part to its distance from what is wanted."""
    slicing = None
    if part["slicing"] is not None:
        dim, size, ranges = part["slicing"]
        slicing = Slicing(dim, size, tuple((start, stop) for start, stop in ranges))
    where = slice(part["start"], part["start"] + part["part"].numel())
    own = wanted if slicing is None else slicing.part_of(wanted)
    so_far = error.clone() if slicing is None else slicing.part_of(error)
    flat = so_far.view(-1)
    flat[where] = torch.maximum(flat[where], (part["part"] - own.flatten()[where]).abs())
    if slicing is None:
        error.copy_(so_far)
    else:
        slicing.write(error, so_far)


def _farthest(ranks: Sequence[RankResult], what: str, k: int, wanted: float) -> float:
    """Return the number, of those that ranks report and that should be equal, that differs most from the wanted one."""
    numbers: list[float] = [r["losses"][k] if what == "losses" else r["norms"][k] for r in ranks]
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else abs(number - wanted))


def _largest(numbers: Iterable[float]) -> float:
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else number, default=0.0)


def _relative(got: float, wanted: float) -> float:
    return abs(got - wanted) / max(abs(wanted), 1e-30) if got != wanted else 0.0


def _agrees(difference: float, tolerance: float) -> bool:
    return difference <= tolerance  # False for NaN
