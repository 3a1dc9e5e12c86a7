"""Every layout that the runtime can run on so many ranks, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from parallel3d.config.layout import Layout, PartialLayout

IntArray = npt.NDArray[np.int64]
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)  # samples
# Layers recomputed together, 0 for none: of more less is kept, and more is held at once while they are. Of n together a stage
# of 1F1B keeps the inputs of 1/n of as many layers as the whole model has, and at once what n layers hold, each ten inputs or
# more: for models of up to 160 layers the least for n <= 4.
RECOMPUTED = (0, 1, 2, 4)
_HALVES_RECOMPUTED = (*RECOMPUTED, 8)
# Chunks of all stages: the order of a longer pipeline is searched for too long; on so many ranks all else takes long, too.
_MOST_SEARCHED, _MOST_SEARCHED_THERE, _LARGE = 32, 16, 4096


class Variant(NamedTuple):
    """A schedule with its chunks."""

    schedule: str
    chunks: int
    placement: Literal["loop", "v"]


VARIANTS = (
    Variant("1f1b", 1, "loop"),
    *(Variant("interleaved", chunks, "loop") for chunks in range(2, 13)),
    Variant("zb-h1", 1, "loop"),
    Variant("zbv", 2, "v"),
    *(Variant("zb-looped", chunks, "loop") for chunks in range(2, 9)),
    Variant("gpipe", 1, "loop"),
)
# What nobody asks for isn't looked at: gpipe, for 1F1B takes no longer and holds no more; and chunks between these.
_OFFERED = {"1f1b": (1,), "interleaved": (2, 3, 4, 6, 8), "zb-h1": (1,), "zbv": (2,), "zb-looped": (2, 3, 4)}


@dataclass(frozen=True)
class Space:
    """Layouts: element k of each column is one. variant: place in VARIANTS; sequence_parallel: 0 or 1; halves: 1 where
    layers are half blocks.
    """

    stages: IntArray
    replicas: IntArray
    slices: IntArray
    sequence_parallel: IntArray
    micro_batch: IntArray
    micro_batches: IntArray
    zero: IntArray
    recompute: IntArray
    variant: IntArray
    halves: IntArray

    def __len__(self) -> int:
        return len(self.stages)

    def where(self, kept: npt.NDArray[np.bool_]) -> Space:
        """Those that are kept."""
        return Space(*(getattr(self, f.name)[kept] for f in fields(self)))

    def layout(self, k: int) -> Layout:
        """Layout k, of which nothing is left open."""
        variant = VARIANTS[self.variant[k]]
        return Layout(
            stages=int(self.stages[k]),
            slices=int(self.slices[k]),
            replicas=int(self.replicas[k]),
            zero=int(self.zero[k]),
            sequence_parallel=bool(self.sequence_parallel[k]),
            micro_batch=int(self.micro_batch[k]),
            micro_batches=int(self.micro_batches[k]),
            chunks=variant.chunks,
            recompute=int(self.recompute[k]),
            schedule=variant.schedule,
            placement=variant.placement,
            units="half" if self.halves[k] else None,
        )


def enumerate_space(
    num_ranks: int,
    global_batch: int,
    num_layers: int,
    slices: Sequence[int],
    num_halves: int = 0,
    asked: PartialLayout | None = None,
) -> Space:
    """All layouts on so many ranks whose micro-batches make up the global batch (samples).

    slices: that are possible; num_halves: layers of the model of half blocks, whose pipelines come last; 0 for none; asked:
    what of a layout the user has decided, which may be what isn't looked at otherwise.
    """
    asked = asked or PartialLayout()
    variants = [k for k, variant in enumerate(VARIANTS) if _is_looked_at(variant, asked)]
    micro_batches = _with(MICRO_BATCHES, asked.decided("micro_batch"))
    together = [_with(usual, asked.decided("recompute")) for usual in (RECOMPUTED, _HALVES_RECOMPUTED)]
    rows = [
        (stages, replicas, tp, *rest, halves)
        for halves, layers in enumerate((num_layers, num_halves))
        for stages, replicas, tp in _shapes(num_ranks, layers, slices)
        for rest in _rest(stages, replicas, tp, global_batch, layers, variants, together[halves], micro_batches)
        if stages > 1 or not halves
    ]
    return Space(*np.array(rows, dtype=np.int64).reshape(-1, len(fields(Space))).T)


def _is_looked_at(variant: Variant, asked: PartialLayout) -> bool:
    if variant.schedule == "gpipe":
        return asked.decided("schedule") == "gpipe"
    return variant.chunks in _with(_OFFERED[variant.schedule], asked.decided("chunks"))


def _with(usual: Sequence[int], asked: int | None) -> list[int]:
    return sorted({*usual, *(() if asked is None else (asked,))})


def _most_chunks(variant: Variant, num_ranks: int) -> int:
    if variant.schedule != "zb-looped":
        return 1 << 30
    return _MOST_SEARCHED_THERE if num_ranks > _LARGE else _MOST_SEARCHED


def _shapes(num_ranks: int, num_layers: int, slices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for tp in (t for t in slices if num_ranks % t == 0):
        for stages in range(1, min(num_layers, num_ranks // tp) + 1):
            if num_ranks % (tp * stages) == 0:
                yield stages, num_ranks // (tp * stages), tp


def _rest(
    stages: int,
    replicas: int,
    tp: int,
    global_batch: int,
    num_layers: int,
    possible: Sequence[int],
    recomputed: Sequence[int],
    micro_batches: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """(sequence_parallel, micro_batch, micro_batches, zero, recompute, variant) of each layout of one shape."""
    fitting = [mb for mb in micro_batches if global_batch % (replicas * mb) == 0]
    if stages == 1:
        variants = [0]
    else:
        most = {k: min(num_layers, _most_chunks(VARIANTS[k], stages * replicas * tp)) for k in possible}
        variants = [k for k in possible if stages * VARIANTS[k].chunks <= most[k]]
    sharing = (0, 1) if tp > 1 else (0,)
    zeros = (0, 1, 2) if replicas > 1 else (0,)
    for sp, mb, zero, recompute, variant in product(sharing, fitting, zeros, recomputed, variants):
        if recompute <= 1 or recompute * stages * VARIANTS[variant].chunks <= num_layers:
            yield sp, mb, global_batch // (replicas * mb), zero, recompute, variant
