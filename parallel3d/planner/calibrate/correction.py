"""Factors that bring predicted parts to what was measured: a robust, bounded least-squares fit, and the error it leaves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Bounds = tuple[float, float]

# Residuals count linearly from so many standard deviations on (Huber 1964: 95% efficient where noise is normal).
_HUBER = 1.345
_ITERATIONS, _ROUNDING = 50, 1e-10
_LEAST_UNEXPLAINED = 0.1
_NINE_IN_TEN = 1.6448536269514722  # standard deviations on both sides of a normal distribution

# What errors of steps are before any is seen: worth so many measured ones, of this standard deviation.
_PRIOR_ERRORS, _PRIOR_DEVIATION = 2, 0.06


@dataclass(frozen=True)
class Row:
    """Something measured, and what the prediction of it is made of, of one unit, for a fit.

    weight: of its squared error; whole: what the error is a share of, by default the larger of the two.
    """

    measured: float
    parts: Mapping[str, float]
    weight: float = 1.0
    whole: float | None = None

    @property
    def scale(self) -> float:
        """`whole`: with the larger of the two no row has more than its share of influence, however wrong it is."""
        return max(self.measured, sum(self.parts.values())) if self.whole is None else self.whole


@dataclass(frozen=True)
class Correction:
    """A factor, and its standard deviation."""

    value: float
    deviation: float

    @property
    def interval(self) -> Bounds:
        """Where it lies in nine cases of ten."""
        half = _NINE_IN_TEN * self.deviation
        return self.value - half, self.value + half


def fit(rows: Sequence[Row], priors: Mapping[str, tuple[Correction, Bounds]], noise: float) -> dict[str, Correction]:
    """The factors for which sums of factor x part are nearest to what was measured.

    priors: of each part's factor what is known before, and its bounds; noise: the least standard deviation of the rows'
    relative errors. Maximum a posteriori: squared relative errors, beyond _HUBER deviations their absolute values, and the
    squared distance from the priors, which decides where rows say nothing.
    """
    names = list(priors)
    rows = [row for row in rows if row.scale > 0]
    known = np.array([priors[name][0].value for name in names])
    precision = np.array([priors[name][0].deviation ** -2 for name in names])
    bounds = np.array([priors[name][1] for name in names]).reshape(-1, 2)
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
    # What the rows say is fitted to their noise, too: by as much as the factors follow them.
    fitted = len(names) - float(np.diag(covariance) @ precision)
    unexplained = max(_LEAST_UNEXPLAINED, 1 - fitted / max(float(weights.sum()), 1e-300))
    wider = max(noise, seen / np.sqrt(unexplained)) / deviation
    spreads = np.minimum(wider * np.sqrt(np.diag(covariance)), precision**-0.5)
    return {name: Correction(float(v), float(s)) for name, v, s in zip(names, values, spreads, strict=True)}


def bounded_minimum(normal: FloatArray, right: FloatArray, bounds: FloatArray) -> FloatArray:
    """The x within bounds [n, 2] that minimizes x normal x / 2 - right x; normal: [n, n], positive definite.

    By principal pivoting (Judice and Pires 1994): guess which coordinates are at a bound, solve for the others, correct the
    guess: all that is wrong with it while that becomes less, else the last, which ends for any such function (Murty 1974).
    """
    side = np.zeros(len(right), dtype=np.int64)  # -1: at the lower bound, 1: at the upper one
    fewest = len(right) + 1
    while True:
        x = np.where(side < 0, bounds[:, 0], bounds[:, 1])
        free = side == 0
        rest = right[free] - normal[np.ix_(free, ~free)] @ x[~free]
        x[free] = np.linalg.solve(normal[np.ix_(free, free)], rest)
        slope = normal @ x - right
        better = side.copy()
        better[free & (x < bounds[:, 0] - _ROUNDING)] = -1
        better[free & (x > bounds[:, 1] + _ROUNDING)] = 1
        # Where the function falls into the range, a coordinate leaves its bound.
        better[side * slope > _ROUNDING * np.diag(normal)] = 0
        wrong = np.flatnonzero(better != side)
        if not len(wrong):
            return x
        if len(wrong) >= fewest:
            wrong = wrong[-1:]
        fewest = min(fewest, len(wrong))
        side[wrong] = better[wrong]


def _weighted_median(values: FloatArray, weights: FloatArray) -> float:
    if not len(values):
        return 0.0
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, passed[-1] / 2)])


@dataclass(frozen=True)
class Errors:
    """Relative errors of predictions. deviation: their standard deviation; count: of those measured.

    factor: in nine cases of ten, what is measured is at most so many times larger or smaller than predicted.
    """

    deviation: float
    count: int

    @property
    def factor(self) -> float:
        """See Errors."""
        return math.exp(t_quantile(_PRIOR_ERRORS + self.count) * self.deviation)


def error_of(logs: Sequence[float]) -> Errors:
    """Of log(measured / predicted): their scale, by a scaled inverse chi-squared prior that few errors don't overrule."""
    total = _PRIOR_ERRORS * _PRIOR_DEVIATION**2 + sum(log**2 for log in logs)
    return Errors(math.sqrt(total / (_PRIOR_ERRORS + len(logs))), len(logs))


def t_quantile(degrees: int) -> float:
    """Below which Student's t, of at least 2 degrees of freedom, lies in 95 cases of 100 (Abramowitz and Stegun, 26.7.5)."""
    z, n = _NINE_IN_TEN, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**k for k, term in enumerate(terms, start=1))
