"""Space of all layouts that the runtime can run on a number of ranks, as columns of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from parallel3d.config import SelectivePolicy
from parallel3d.config.layout import Layout, PartialLayout
from parallel3d.planner.network.fabric import Floats, Integers
from parallel3d.schedule.builders import WHOLE_BACKWARDS

BoolArray = npt.NDArray[np.bool_]
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # samples
# Layers recomputed together, 0 for none. The more there are, the fewer inputs are kept, but the more is held while they are
# recomputed. If n are recomputed together, a stage of 1F1B keeps the inputs of 1/n of as many layers as the whole model has,
# and for a time what n layers hold, each ten inputs or more: for models of up to 160 layers the least for n <= 4.
RECOMPUTED = (0, 1, 2, 4)
_HALVES_RECOMPUTED = (*RECOMPUTED, 8)
# What each layer recomputes: all, or a part.
POLICIES = (None, "cheap", "attention", "auto")
# Most chunks of all stages for which an order is searched: for more the search is too slow, on many ranks even earlier.
_MOST_SEARCHED, _MOST_SEARCHED_LARGE, LARGE = 32, 16, 4096
_OPEN = PartialLayout()  # nothing is decided
_BY_LAYER = 512  # most ranks on which policies by layer are searched: on more, only the best layouts get some
# Most chunks of all stages x micro-batches of a breadth-first program (arXiv:2211.05953), which holds all micro-batches.
_MOST_BREADTH = 2048


# schedule -> placement of chunks, chunks of a stage that it can have, and those that are searched without being asked for.
_SCHEDULES: Mapping[str, tuple[Literal["loop", "v"], Sequence[int], Sequence[int]]] = {
    "1f1b": ("loop", [1], [1]),
    "interleaved": ("loop", range(2, 13), [2, 3, 4, 6, 8]),
    "zb-h1": ("loop", [1], [1]),
    "zbv": ("v", [2], [2]),
    "zb-looped": ("loop", range(2, 9), [2, 3, 4]),
    "gpipe": ("loop", range(1, 13), [2, 4, 8]),  # with ZeRO-3 alone: else 1F1B takes no longer and holds no more
}
# Every schedule with its chunks, in layouts whose other fields don't count.
VARIANTS = tuple(
    Layout(schedule=name, chunks=chunks, placement=placement)
    for name, (placement, possible, _) in _SCHEDULES.items()
    for chunks in possible
)
_CHUNKS = np.array([variant.chunks for variant in VARIANTS])
_SCHEDULE = np.array([variant.schedule for variant in VARIANTS])
_WHOLE_BACKWARDS = np.isin(_SCHEDULE, list(WHOLE_BACKWARDS))


@dataclass(frozen=True)
class Space:
    """Layouts: element k of each column belongs to layout k.

    variant: index in VARIANTS; sequence_parallel: 0 or 1; halves: 1 if layers are half blocks; policy: index in POLICIES.
    """

    halves: Integers
    tensor_ranks: Integers
    stages: Integers
    replicas: Integers
    sequence_parallel: Integers
    micro_batch: Integers
    micro_batches: Integers
    zero: Integers
    recompute: Integers
    policy: Integers
    variant: Integers

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def chunks(self) -> Integers:
        """Chunks of a stage."""
        return _CHUNKS[self.variant]

    @property
    def whole_backwards(self) -> BoolArray:
        """Whether the schedule leaves backwards whole."""
        return _WHOLE_BACKWARDS[self.variant]

    @property
    def in_flight(self) -> Floats:
        """At least the micro-batches that some stage holds, of as many as the schedule wants: until their weight gradients.

        On the first stage, but for zb-looped. Its order is the result of a search: with 1.5p micro-batches all that were looked
        at, up to 16 stages and 8 chunks, hold 1.22p, of which 0.89p are deferred.
        """
        p, m = self.stages, self.micro_batches
        interleaved = ((self.chunks + 1) * p - 1) / self.chunks  # see schedule.builders.interleaved
        by_name: dict[str, Any] = {
            "interleaved": interleaved,
            "gpipe": np.inf,
            "zb-looped": np.where(m >= 1.5 * p, 1.2 * p, p),
        }
        return self.by_schedule(by_name, p)

    @property
    def deferred(self) -> Floats:
        """At least the micro-batches whose weight gradients some stage defers at a time; 0 if backwards are whole.

        ZB-H1 defers p - 1 on the last stage but one, ZBV p - 1/2 on the last one if there are 2p - 1 or more.
        """
        p, m, one = self.stages, self.micro_batches, 1 / self.chunks
        by_name = {
            "zb-h1": np.minimum(m, np.maximum(p - 1, 1)),
            "zbv": np.clip(m - p, 0, p - 1) + one,
            "zb-looped": np.where(m >= 1.5 * p, 0.8 * p, m * one),
        }
        return self.by_schedule(by_name, 0.0)

    def by_schedule(self, values: Mapping[str, Any], other: Integers | float) -> Floats:
        """Return the value of each layout's schedule by its name, `other` for those without one."""
        found: Floats = np.select(
            [np.equal(_SCHEDULE, name)[self.variant] for name in values], list(values.values()), other
        )
        return found

    @property
    def shapes(self) -> Integers:
        """Ranks along pipe, data, model, [layouts, 3]."""
        return np.stack([self.stages, self.replicas, self.tensor_ranks], axis=1)

    def recomputing_more(self, among: Integers) -> Integers:
        """Return for each layout the one of some that recomputes the next larger part of each layer, -1 if there is none."""
        key = np.zeros(len(self), dtype=np.int64)
        for name in ("halves", "tensor_ranks", "stages", "sequence_parallel", "micro_batch", "zero", "variant"):
            column = getattr(self, name)
            key = key * (int(column.max(initial=0)) + 1) + column
        partly = among[self.recompute[among] == (self.policy[among] > 0)]
        order = partly[np.lexsort([self.policy[partly], key[partly]])]
        found: Integers = np.full(len(self), -1)
        found[order[:-1]] = np.where(np.diff(key[order]) == 0, order[1:], -1)
        return found

    def under(self, policy: SelectivePolicy | None, recompute: int) -> Space:
        """Return the same layouts with one policy for all layers."""
        columns = {"policy": POLICIES.index(policy), "recompute": recompute}
        return replace(self, **{name: np.full(len(self), number) for name, number in columns.items()})

    def where(self, kept: BoolArray | Integers) -> Space:
        """Return the layouts that are kept: whether each is, or their indices."""
        return Space(*(getattr(self, f.name)[kept] for f in fields(self)))

    def layout(self, k: int) -> Layout:
        """Return layout k, fully specified."""
        values = {field.name: int(getattr(self, field.name)[k]) for field in fields(self)}
        halves, variant = values.pop("halves"), VARIANTS[values.pop("variant")]
        policy = POLICIES[values.pop("policy")]
        return Layout(**(dict(variant) | values | {"units": "half" if halves else None, "policy": policy}))


def enumerate_space(
    num_ranks: int,
    global_batch: int,
    num_layers: int,
    num_halves: int,
    tensor_ranks: Sequence[int],
    fixed: PartialLayout = _OPEN,
    offloads: bool = False,
) -> Space:
    """Return all layouts of this many ranks whose micro-batches make up the global batch (samples).

    - num_halves: layers of the model in half blocks, which make pipelines only; 0 if these aren't layers.
    - tensor_ranks: possible numbers of tensor-parallel ranks.
    - fixed: what the user has decided of the layout, also values that aren't searched otherwise.
    - offloads: whether ZeRO-3 keeps shards of weights in host memory, also of a single replica.
    """
    choices = _choices(num_ranks, num_layers, num_halves, tensor_ranks, fixed)
    axes = np.meshgrid(*(np.array(values, dtype=np.int64) for values in choices.values()), indexing="ij")
    columns = {name: axis.ravel() for name, axis in zip(choices, axes, strict=True)}
    columns["replicas"] = num_ranks // (columns["stages"] * columns["tensor_ranks"])
    columns["micro_batches"] = global_batch // np.maximum(1, columns["replicas"] * columns["micro_batch"])
    space = Space(**columns)
    layers = np.where(space.halves, num_halves, num_layers)
    num_chunks = space.stages * space.chunks
    most_searched = _MOST_SEARCHED_LARGE if num_ranks > LARGE else _MOST_SEARCHED
    is_breadth_first = np.isinf(space.in_flight)
    is_asked = fixed.decided("schedule") == "gpipe"
    kept = (
        (space.shapes.prod(axis=1) == num_ranks)
        & (space.replicas * space.micro_batches * space.micro_batch == global_batch)
        & (num_chunks <= space.by_schedule({"zb-looped": np.minimum(layers, most_searched)}, layers))
        & ((space.stages > 1) | ((space.variant == 0) | is_breadth_first) & (space.halves == 0))
        & (~is_breadth_first | is_asked | (space.zero == 3) & (space.micro_batches > space.stages))
        & (~is_breadth_first | is_asked | (num_chunks * space.micro_batches <= _MOST_BREADTH))
        & ((space.tensor_ranks > 1) | (space.sequence_parallel == 0))
        & ((space.replicas > 1) | (space.zero == 0) | (space.zero == 3) & offloads)
        & ((space.policy == 0) | (space.recompute == 1) | ("policy" in fixed.given))
        & ((space.recompute <= 1) | (space.recompute * num_chunks <= layers))
        & ((space.recompute <= RECOMPUTED[-1]) | (space.halves > 0) | ("recompute" in fixed.given))
    )
    for name in fixed.given - {"schedule", "chunks", "placement", "units", "policy"}:
        kept &= getattr(space, name) == getattr(fixed, name)
    return space.where(kept)


def _choices(
    num_ranks: int, num_layers: int, num_halves: int, tensor_ranks: Sequence[int], fixed: PartialLayout
) -> dict[str, Sequence[int]]:
    """Return the values of the columns that are combined."""
    recompute, micro_batch = fixed.decided("recompute"), fixed.decided("micro_batch")
    halves = [1] if fixed.units == "half" else [0]
    if fixed.units is None and num_halves:
        halves = [0, 1]
    return {
        "halves": halves,
        "tensor_ranks": tensor_ranks,
        "stages": [n for n in range(1, min(num_ranks, max(num_layers, num_halves)) + 1) if num_ranks % n == 0],
        "sequence_parallel": [0, 1],
        "micro_batch": MICRO_BATCHES if micro_batch is None else [micro_batch],
        "zero": [0, 1, 2, 3],
        "recompute": _HALVES_RECOMPUTED if recompute is None else [recompute],
        # Policies by layer may be "attention" for all, too.
        "policy": ([0, 1, 3] if num_ranks <= _BY_LAYER else [0, 1, 2])
        if recompute is None
        else [POLICIES.index(fixed.policy)],
        "variant": [k for k, variant in enumerate(VARIANTS) if _is_searched(variant, fixed)],
    }


def _is_searched(variant: Layout, fixed: PartialLayout) -> bool:
    """Whether a variant is what the user has decided, else a usual one. "auto" begins with a schedule of split backwards."""
    schedule, chunks = fixed.decided("schedule"), fixed.decided("chunks")
    is_asked = variant.schedule not in WHOLE_BACKWARDS if schedule == "auto" else schedule in (None, variant.schedule)
    usual = [1] if schedule == "gpipe" else _SCHEDULES[variant.schedule][2]
    return is_asked and variant.chunks in (usual if chunks is None else [chunks])
