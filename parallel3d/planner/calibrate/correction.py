"""Factors that bring predicted parts to what was measured: a robust, bounded least-squares fit, and the error it leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.monitor.run_record import StoredModel

FloatArray = NDArray[np.float64]

# Residuals of more than this number of standard deviations count linearly (Huber 1964: 95% efficient where noise is normal).
_HUBER = 1.345
_ITERATIONS, _ROUNDING = 50, 1e-10
_LEAST_UNEXPLAINED = 0.1
_Z_90 = 1.6448536269514722  # 90% of a normal distribution lie within this number of standard deviations

# Prior of a step's error: it counts like this number of measured errors with this standard deviation.
_PRIOR_ERRORS, _PRIOR_DEVIATION = 2, 0.06


class Factor(StoredModel):
    """Factor of a component, and its 90% interval."""

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


@dataclass(frozen=True)
class Prior:
    """A factor before anything is measured: its value, standard deviation and bounds."""

    value: float
    deviation: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A measured number, and the parts that its prediction consists of, in the same unit.

    - weight: weight of the squared error.
    - whole: the number that the error is relative to; None for the larger of measured and predicted, which limits the influence
      of a row that is far off.
    """

    measured: float
    parts: Mapping[str, float]
    weight: float = 1.0
    whole: float | None = None

    @property
    def scale(self) -> float:
        """The number that the error is relative to."""
        return max(self.measured, sum(self.parts.values())) if self.whole is None else self.whole


def fit(rows: Sequence[Row], priors: Mapping[str, Prior], noise: float) -> dict[str, Factor]:
    """Return the factors for which the sums of factor x part are nearest to the measured numbers.

    Maximum a posteriori: squared relative errors, beyond _HUBER deviations their absolute values, and the squared distance
    from the priors, which decides where rows say nothing. noise: the least standard deviation of the relative errors.
    """
    names = list(priors)
    rows = [row for row in rows if row.scale > 0]
    known = np.array([prior.value for prior in priors.values()])
    precision = np.array([prior.deviation**-2 for prior in priors.values()])
    bounds = np.array([(prior.low, prior.high) for prior in priors.values()])
    a = np.array([[row.parts.get(name, 0.0) / row.scale for name in names] for row in rows]).reshape(-1, len(names))
    b = np.array([row.measured / row.scale for row in rows])
    weights = np.array([row.weight for row in rows])
    values, seen, deviation, robust = known, 0.0, noise, np.ones(len(rows))
    for _ in range(_ITERATIONS):
        normal = (a.T * (weights * robust)) @ a / deviation**2 + np.diag(precision)
        right = (a.T * (weights * robust)) @ b / deviation**2 + precision * known
        before, values = values, bounded_minimum(normal, right, bounds)
        residuals = np.abs(a @ values - b)
        seen = _weighted_median(residuals, weights) / 0.6745
        deviation = max(noise, seen)
        robust = np.minimum(1.0, _HUBER * deviation / np.maximum(residuals, 1e-300))
        if np.abs(values - before).max(initial=0.0) < 1e-6:
            break
    covariance = np.linalg.inv(normal)
    # The factors are fitted to the rows' noise, too, so errors of other rows are larger: correct for the degrees of freedom.
    fitted = len(names) - float(np.diag(covariance) @ precision)
    unexplained = max(_LEAST_UNEXPLAINED, 1 - fitted / max(float(weights.sum()), 1e-300))
    wider = max(noise, seen / np.sqrt(unexplained)) / deviation
    half = _Z_90 * np.minimum(wider * np.sqrt(np.diag(covariance)), precision**-0.5)
    lows, highs = np.maximum(bounds[:, 0], values - half), np.minimum(bounds[:, 1], values + half)
    columns = zip(values.tolist(), lows.tolist(), highs.tolist(), strict=True)
    return {name: Factor(value=v, low=low, high=high) for name, (v, low, high) in zip(names, columns, strict=True)}


def bounded_minimum(normal: FloatArray, right: FloatArray, bounds: FloatArray) -> FloatArray:
    """Return the x within bounds [n, 2] that minimizes x normal x / 2 - right x; normal: [n, n], positive definite.

    By principal pivoting (Murty 1974): guess which coordinates are at a bound, solve for the others, and correct the last
    wrong guess, which ends for any such function.
    """
    side = np.zeros(len(right), dtype=np.int64)  # -1: at the lower bound, 1: at the upper one
    while True:
        x = np.where(side < 0, bounds[:, 0], bounds[:, 1])
        free = side == 0
        rest = right[free] - normal[np.ix_(free, ~free)] @ x[~free]
        x[free] = np.linalg.solve(normal[np.ix_(free, free)], rest)
        outside = np.where(x > bounds[:, 1] + _ROUNDING, 1, np.where(x < bounds[:, 0] - _ROUNDING, -1, 0))
        # Where the function falls into the range, a coordinate leaves its bound.
        leaves = side * (normal @ x - right) > _ROUNDING * np.diag(normal)
        wrong = np.flatnonzero(np.where(free, outside != 0, leaves))
        if not len(wrong):
            return x
        side[wrong[-1]] = outside[wrong[-1]] if free[wrong[-1]] else 0


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


def error_deviation(logs: Sequence[float]) -> float:
    """Return the standard deviation of relative errors, log(measured / predicted).

    A scaled inverse chi-squared prior keeps a few errors from deciding alone.
    """
    total = _PRIOR_ERRORS * _PRIOR_DEVIATION**2 + sum(log**2 for log in logs)
    return math.sqrt(total / (_PRIOR_ERRORS + len(logs)))


def error_factor(deviation: float, count: int) -> float:
    """Return the factor by which 90% of measured numbers differ at most from the predicted ones.

    deviation: as error_deviation estimates it from `count` errors.
    """
    return math.exp(t_quantile(_PRIOR_ERRORS + count) * deviation)


def t_quantile(degrees: int) -> float:
    """Return the 95% quantile of Student's t of at least 2 degrees of freedom (Abramowitz and Stegun, 26.7.5)."""
    z, n = _Z_90, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**k for k, term in enumerate(terms, start=1))
