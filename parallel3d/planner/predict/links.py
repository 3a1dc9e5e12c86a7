"""Seconds of a layout's communication on its links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from parallel3d.costs.work import Collective, CollectiveKind
from parallel3d.planner.cluster.cluster import Device
from parallel3d.planner.network.links import Kind, Network

Integers = npt.NDArray[np.int64]


class LayoutLinks:
    """Seconds of collectives and messages between a layout's ranks; all groups that are alike communicate at the same time.

    - places: the GPU of each rank; rank = (stage * replicas + replica) * slices + slice.
    - roughly: assume that all stages have the links of the first one.
    """

    def __init__(self, network: Network, shape: tuple[int, int, int], places: Sequence[int], roughly: bool = False):
        self.network, self.shape = network, shape
        self.ranks = np.asarray(places, dtype=np.int64).reshape(shape)
        self._roughly = roughly
        self._seconds = cache(self._slowest)
        self.overlap = network.cluster.overlap  # see Cluster

    @cached_property
    def devices(self) -> list[list[Device]]:
        """The kinds of device of each stage."""
        kinds = self.network.device_of[self.ranks].reshape(self.shape[0], -1)
        return [[self.network.devices[kind] for kind in dict.fromkeys(stage.tolist())] for stage in kinds]

    @cached_property
    def first_alike(self) -> list[int]:
        """For each stage, the first one on the same kinds of device."""
        return [self.devices.index(devices) for devices in self.devices]

    def like(self, stage: int) -> int:
        """Return the stage whose links a stage's are assumed to be."""
        return 0 if self._roughly else stage

    def over_slices(self, collective: Collective) -> float:
        """Return the seconds of a collective over every tensor-parallel group."""
        return self._seconds(collective.kind, collective.nbytes, self.slice_groups)

    def over_replicas(self, kind: CollectiveKind, nbytes: float, stage: int) -> float:
        """Return the seconds of a collective over the replicas of each slice of a stage. nbytes: of one slice's tensor."""
        return self._seconds(kind, nbytes, self.replica_groups, self.like(stage))

    def over_stages(self, nbytes: float, stages: tuple[int, ...]) -> float:
        """Return the seconds of an all-reduce between corresponding ranks of several stages. nbytes: of each rank's tensor."""
        return self._seconds("all_reduce", nbytes, self.stage_groups, *stages)

    def send(self, nbytes: float, source: int, destination: int) -> float:
        """Return the seconds of a message from every rank of a stage to the corresponding one of another stage."""
        if self._roughly:
            source, destination = (0, 1) if source < destination else (1, 0)
        return self._seconds("send", nbytes, self.stage_groups, source, destination)

    def slice_groups(self, stage: int | None = None) -> Integers:
        """Return the GPUs of each tensor-parallel group, [groups, slices], of one stage or of all."""
        return (self.ranks if stage is None else self.ranks[stage]).reshape(-1, self.shape[2])

    def replica_groups(self, stage: int) -> Integers:
        """Return the GPUs of the replicas of each slice of a stage, [slices, replicas]."""
        return self.ranks[stage].T

    def stage_groups(self, *stages: int) -> Integers:
        """Return the GPUs of corresponding ranks of several stages, [ranks of a stage, stages]."""
        return self.ranks[list(stages)].reshape(len(stages), -1).T

    def kind(self, groups: Integers) -> str:
        """Return the kind of the slowest links between the members of the first group, as in the cluster's graph."""
        members = [self.network.cluster.gpus[place] for place in groups[0].tolist()]
        if len({gpu.host for gpu in members}) > 1:
            return "nic"
        return "nvlink" if len({gpu.island for gpu in members}) == 1 else "pcie"

    def _slowest(self, kind: Kind, nbytes: float, groups_of: Callable[..., Integers], *stages: int) -> float:
        groups = groups_of(*stages)
        return self.network.slowest(kind, groups, nbytes) if groups.shape[1] > 1 else 0.0
