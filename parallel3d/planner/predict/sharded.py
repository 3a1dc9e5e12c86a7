"""Weights of a layout that live as shards (ZeRO-3): their sizes, and which layers use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.calls import backward_order, in_groups
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.timing import LayoutLinks
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.lifetimes import ChunkUses, Lifetimes, LiveLimits, Use, peak_live
from parallel3d.schedule.timing import Simulation
from parallel3d.zero.memory import UnitSize, unit_sizes
from parallel3d.zero.policy import ZeroPolicy

# Rate of copies in one direction, relative to that while both directions are in use. Measured alone, the ratio is 1.17 to 1.26
# (tools/bench/links.py); with this value, steps of tools/bench/results/*-offload-3b-*.json are predicted within 5%.
ONE_WAY = 1.05


@dataclass(frozen=True)
class ShardedWeights:
    """Units of sharded weights. sizes: of each stage, unit -> its size; uses: of each chunk."""

    sizes: tuple[Mapping[int, UnitSize], ...]
    uses: tuple[ChunkUses, ...]

    @property
    def elements(self) -> list[dict[int, int]]:
        """The elements of each unit, of each stage."""
        return [{unit: size.numel for unit, size in own.items()} for own in self.sizes]

    def simulation(
        self, limits: LiveLimits, freed: Sequence[Sequence[int]], overlap: float, program: Program
    ) -> Simulation:
        """Return the simulation of a program with the gathers and releases that the executor adds to it.

        freed: bytes that may be live beyond the limits, see Lifetimes.add_to; overlap: see Simulation.
        """
        widest = [max((size.nbytes // size.numel for size in own.values()), default=1) for own in self.sizes]
        elements = [[nbytes // each for nbytes in own] for own, each in zip(freed, widest, strict=False)]
        sizes = {unit: size for own in self.elements for unit, size in own.items()}
        return Simulation(Lifetimes(self.uses, sizes, limits).add_to(program, elements), self.uses, overlap)

    def gathered(self, program: Program, freed: Sequence[Sequence[int]]) -> list[int]:
        """Return the most bytes that are gathered at a time, of each stage, beyond what is freed then."""
        sizes = [{unit: size.nbytes for unit, size in own.items()} for own in self.sizes]
        return list(map(peak_live, program.instructions, sizes, freed or [()] * len(sizes)))

    def gathers(self, links: LayoutLinks, placement: Sequence[int]) -> dict[tuple[Op, int, int | None], float]:
        """Return the seconds of each unit's gather, which may stand before a compute of any chunk of its stage.

        A shard in host memory is copied to the device first; a shard on disk is read before, while others are copied.
        """
        return {
            (Op.GATHER_PARAMS, chunk, unit): sum(_gather(size, links, stage))
            for chunk, stage in enumerate(placement)
            for unit, size in self.sizes[stage].items()
        }

    def overlap(self, links: LayoutLinks) -> float:
        """Return the factor by which overlapping gathers slow compute: their collectives do, copies of shards don't."""
        every = (_gather(size, links, stage) for stage, own in enumerate(self.sizes) for size in own.values())
        copied, gathered = map(sum, zip((0.0, 0.0), *every, strict=True))
        return 1.0 + (links.overlap - 1.0) * gathered / (copied + gathered) if gathered else 1.0


def _gather(size: UnitSize, links: LayoutLinks, stage: int) -> tuple[float, float]:
    """Return the seconds in which a unit's shard is copied to the device, and in which shards are gathered."""
    copied = size.host / (ONE_WAY * links.slowest("host_bandwidth", stage))
    read = size.disk / links.slowest("disk_bandwidth", stage)
    return max(copied, read), links.over_replicas("all_gather", size.nbytes, stage)


def sharded_weights(
    chunks: Chunks,
    policies: Sequence[ZeroPolicy],
    layers: Sequence[LayerProfile],
    units: Sequence[Use],
    stages: Sequence[Sequence[ParameterInfo]],
    frozen: Sequence[Sequence[ParameterInfo]],
) -> ShardedWeights | None:
    """Return the sharded weights of a layout; None if it has none.

    policies: of each stage; units: those that have parameters of each layer; stages, frozen: the parameters of each stage.
    """
    layout = chunks.layout
    if not policies[0].shards_weights(layout.replicas):
        return None
    every = zip(stages, frozen, policies, strict=True)
    sizes = [unit_sizes(own, others, policy, layout.replicas) for own, others, policy in every]

    def of_chunk(chunk: int) -> ChunkUses:
        own, sharded = chunks.span(chunk), sizes[chunks.placement[chunk]]
        used = {k: tuple(unit for unit in units[k] if unit in sharded) for k in own}
        order = backward_order(in_groups(own, layout.recompute, lambda k: layers[k].recomputed))
        return ChunkUses(tuple(used[k] for k in own), tuple(used[k] for k in order))

    return ShardedWeights(tuple(sizes), tuple(map(of_chunk, range(len(chunks.placement)))))
