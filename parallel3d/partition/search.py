"""Chunks for stages that hold several: the largest sum of a stage's chunks sets the pace of a pipeline.

Which sums can be reached is a problem of numbers, as hard as bin packing; no dynamic programming over bounds is exact for it.
If there are few splits, all are tried. Otherwise a local search descends from a fixed set of starts by moves that shift a run
of neighbouring bounds (chunks between them keep their lengths), and then by pairs of such moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import combinations
from math import comb

import numpy as np
import numpy.typing as npt

from parallel3d.partition.chain import FloatArray

MOST_SPLITS = 60_000
_ROUNDS = 3  # rounds of starts scattered around the best split so far
_STARTS = 32  # starts of a round, if that many fit into _ELEMENTS
_FINISHED = 3  # number of the last round's splits that `_finish` improves
_ELEMENTS = 250_000  # most elements of the array of candidates' bounds, which determines how long a step takes
_LONGEST_RUN = 16  # bounds that one move shifts
_IMPOSSIBLE = 1e30  # cost of an empty chunk; finite, because infinity times 0 (a stage without the chunk) would be NaN
_TOLERANCE = 1e-12

_Bounds = npt.NDArray[np.int64]
# Takes a cost matrix (see Search); returns chunks' costs for some splits, [..., chunks, splits]: numpy sums whole rows.
_PartsOf = Callable[[FloatArray], FloatArray]


class _Moves:
    """Moves of bounds, [moves, chunks + 1].

    shifts: of a bound; chunks: number of each moved chunk by its ends' shifts, [chunks, moves].
    """

    def __init__(self, moves: _Bounds):
        reach = int(np.abs(moves).max(initial=0))
        self.moves, self.shifts = moves, np.arange(-reach, reach + 1)
        at, size = moves + reach, len(self.shifts)
        chunks = (np.arange(moves.shape[1] - 1) * size + at[:, :-1]) * size + at[:, 1:]
        self.chunks = np.ascontiguousarray(chunks.T)


class Search:
    """Splits of a chain into len(placement) chunks, chunk c on stage placement[c].

    cost: [n + 1, n + 1], element (a, b) for layers [a, b) as one chunk, or one such matrix a chunk; inf where that is empty.
    held: [chunks, n + 1, n + 1]: what a chunk adds to what its stage holds, which is at most `limit`. evenness: the
    multiple of the largest chunk that is added to the largest stage in the objective.
    """

    def __init__(
        self,
        cost: FloatArray,
        placement: Sequence[int],
        held: FloatArray | None = None,
        limit: float = np.inf,
        evenness: float = 0.0,
    ):
        self._evenness = evenness
        self._chunks, self._num_layers = len(placement), cost.shape[-1] - 1
        self._placement, self._stages = placement, max(placement) + 1
        total = cost[..., 0, -1].max() / self._stages
        own = np.broadcast_to(cost, (self._chunks, *cost.shape[-2:]))
        # Chunks of equal cost share a matrix: one for each wouldn't fit into the processor's cache.
        self._cost = _finite((own if own.strides[0] else own[:1]) / (total or 1.0))
        self._held = None if held is None else _finite(held / (limit or 1.0))
        self._moves = _moves(self._chunks)

    @staticmethod
    def is_exact(num_layers: int, num_chunks: int) -> bool:
        """Return whether the split that is found is the best there is."""
        return comb(num_layers - 1, num_chunks - 1) <= MOST_SPLITS

    def best(self, starts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the bounds of the best split of all, or of those that these starts, splits themselves, lead to."""
        n, chunks = self._num_layers, self._chunks
        if self.is_exact(n, chunks):
            splits = np.array([[0, *inner, n] for inner in combinations(range(1, n), chunks - 1)])
            return tuple(map(int, splits[self._least(lambda cost: self._parts(cost, splits))]))
        found = self._descend(np.array(starts))
        random = np.random.default_rng(0)
        count = max(2, min(_STARTS, _ELEMENTS // ((len(self._moves[0].moves) - 1) * (chunks + 1))))
        for round_ in range(_ROUNDS):
            reach = max(1, n // chunks >> round_)
            scattered = found[0] + random.integers(-reach, reach + 1, (count, chunks + 1))
            found = self._descend(np.concatenate([found[:1], self._repaired(scattered)]))
        finished = np.array([self._finish(bounds) for bounds in found[:_FINISHED]])
        return tuple(map(int, finished[self._least(lambda cost: self._parts(cost, finished))]))

    def _repaired(self, bounds: _Bounds) -> _Bounds:
        """Return the nearest bounds without an empty chunk."""
        place = np.arange(self._chunks + 1)
        inner = np.maximum.accumulate(np.maximum(np.sort(bounds, axis=1) - place, 0), axis=1) + place
        inner = np.minimum(inner, self._num_layers - self._chunks + place)
        inner[:, 0], inner[:, -1] = 0, self._num_layers
        return inner

    def _descend(self, bounds: _Bounds) -> _Bounds:
        """Move each split [chunks + 1] until no run of bounds makes it better; return them, the best first."""
        bounds, scores = bounds.copy(), self._score(lambda cost: self._parts(cost, bounds))
        moving = np.arange(len(bounds))
        while len(moving):
            reached = self._score(partial(self._parts_moved, bounds=bounds[moving], by=self._moves[0]))
            best = reached.argmin(axis=1)
            least = np.take_along_axis(reached, best[:, None], axis=1)[:, 0]
            better = least < scores[moving] - _TOLERANCE
            moving, best = moving[better], best[better]
            bounds[moving], scores[moving] = bounds[moving] + self._moves[0].moves[best], least[better]
        return bounds[np.argsort(scores, kind="stable")]

    def _finish(self, bounds: _Bounds) -> _Bounds:
        """Go on by the objectives themselves, one run or two at a time."""
        while True:
            for near in self._moves:
                best = self._least(partial(self._parts_moved, bounds=bounds, by=near))
                if best < len(near.moves) - 1:
                    bounds = bounds + near.moves[best]
                    break
            else:
                return bounds

    def _parts(self, cost: FloatArray, bounds: _Bounds) -> FloatArray:
        """Return the cost of each chunk; bounds [splits, chunks + 1] that are no split get an impossible one."""
        inside = np.clip(bounds, 0, self._num_layers).T
        return cost[np.arange(len(cost))[:, None], inside[:-1], inside[1:]]

    def _parts_moved(self, cost: FloatArray, bounds: _Bounds, by: _Moves) -> FloatArray:
        """Return the cost of each chunk after each move, [..., chunks, moves]. bounds: [..., chunks + 1]."""
        inside = np.clip(bounds[..., None] + by.shifts, 0, self._num_layers)
        # Few different chunks: of each with all ends that it may have.
        ends = np.arange(len(cost))[:, None, None], inside[..., :-1, :, None], inside[..., 1:, None, :]
        return cost[ends].reshape(*bounds.shape[:-1], -1).take(by.chunks, axis=-1)

    def _excess(self, parts_of: _PartsOf) -> FloatArray:
        """Return by which share of the limit the fullest stage holds too much."""
        if self._held is None:
            return np.zeros(())
        return np.maximum(_largest(self._loads(parts_of(self._held))) - 1.0, 0.0)

    def _loads(self, parts: FloatArray) -> FloatArray:
        """Return the sums over each stage's chunks, [..., stages, splits]. A matrix product would wake BLAS's threads."""
        loads = np.zeros((*parts.shape[:-2], self._stages, parts.shape[-1]))
        for chunk, stage in enumerate(self._placement):
            loads[..., stage, :] += parts[..., chunk, :]
        return loads

    def _score(self, parts_of: _PartsOf) -> FloatArray:
        """Return the objective of the descent: the largest stage, and a little of the others, to leave plateaus."""
        parts = parts_of(self._cost)
        loads = self._loads(parts)
        spread = 1e-3 * np.sqrt((loads * loads).sum(axis=-2) / self._stages)
        return 1e6 * self._excess(parts_of) + _largest(loads) + self._unevenness(parts) + spread

    def _least(self, parts_of: _PartsOf) -> int:
        """Return the index of the best of some splits; the last of those that are equal up to rounding.

        The excess decides, then the pace, then the largest chunk, then the sum of squares.
        """
        parts = parts_of(self._cost)
        left = np.arange(parts.shape[-1])
        if self._held is not None:
            left = _lowest(left, self._excess(parts_of))
        left = _lowest(left, (_largest(self._loads(parts)) + self._unevenness(parts))[left])
        left = _lowest(left, _largest(parts[:, left]))
        return int(_lowest(left, (parts[:, left] ** 2).sum(axis=0))[-1])

    def _unevenness(self, parts: FloatArray) -> FloatArray | float:
        return self._evenness * _largest(parts) if self._evenness else 0.0


def _largest(values: FloatArray) -> FloatArray:
    """Return the largest of each split, [..., splits]. values: of chunks or stages, [..., chunks, splits]."""
    largest: FloatArray = values.max(axis=-2)
    return largest


def _finite(cost: FloatArray) -> FloatArray:
    return np.where(np.isfinite(cost), cost, _IMPOSSIBLE)


@lru_cache(4)
def _moves(num_chunks: int) -> list[_Moves]:
    """Return moves by one run of bounds, and by two. Last comes no move: `Search._least` returns the last of equals."""
    single = _runs(num_chunks)
    runs, none = single[: int((2 * _ELEMENTS / (num_chunks + 1)) ** 0.5)], np.zeros_like(single[:1])
    first, second = np.triu_indices(len(runs), 1)
    return [_Moves(np.concatenate([moves, none])) for moves in (single, runs[first] + runs[second])]


def _runs(num_chunks: int) -> _Bounds:
    """Return moves [moves, chunks + 1]: runs of inner bounds by a layer, the short ones first, single bounds by 2 and 3."""
    inner = num_chunks - 1
    moves = []
    for length in range(1, min(inner, _LONGEST_RUN) + 1):
        for first in range(1, inner - length + 2):
            move = np.zeros(num_chunks + 1, dtype=np.int64)
            move[first : first + length] = 1
            moves += [move, -move]
    singles = moves[: 2 * inner]
    return np.array([*moves, *(step * move for step in (2, 3) for move in singles)])


def _lowest(chosen: npt.NDArray[np.int64], values: FloatArray) -> npt.NDArray[np.int64]:
    """Return those of the chosen that have the least of the values, equal up to rounding."""
    least = values.min()
    return chosen[values <= least + _TOLERANCE * max(1.0, abs(least))]
