"""Why kernels of csrc/, or copies, can't run, and what to do about it: for whoever opens them, and for `p3d doctor`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer import symmetric
from parallel3d.errors import KernelError
from parallel3d.kernels.build import REMEDY, find_nvcc
from parallel3d.kernels.loader import load_library
from parallel3d.kernels.peers import WORLD_SIZES

_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Obstacle:
    """Why a kernel is off, and what turns it on."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}; {self.remedy}"


# Where symmetric.map_memory has none.
UNMAPPED = Obstacle("the driver maps no memory of one device on another", "see what p3d doctor says")


def no_device(device: torch.device | None = None) -> Obstacle | None:
    """Where this process has no CUDA device, or computes on another."""
    if torch.version.cuda is None:
        return Obstacle("this PyTorch is built without CUDA", "install one that is built with it, where there is a GPU")
    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return Obstacle("there is no CUDA device", "nothing is to be done where none is")
    return None


def local_obstacle(device: torch.device | None = None) -> Obstacle | None:
    """What is in the way in this process, whoever its peers are. device: its own, by default the first CUDA device."""
    if (missing := no_device(device)) is not None:
        return missing
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return Obstacle(
            f"the device has compute capability {capability[0]}.{capability[1]}", "use an A100, an H100 or a later GPU"
        )
    return no_symmetric_memory() or _not_compiled()


def no_symmetric_memory() -> Obstacle | None:
    """Where ranks can't map each other's memory, whatever the host."""
    if symmetric.is_supported():
        return None
    return Obstacle("this PyTorch lacks symmetric memory", "install one that has it, 2.11 or later with CUDA")


def _not_compiled() -> Obstacle | None:
    try:
        if load_library() is not None:
            return None
    except KernelError as error:
        why, _, remedy = str(error).rpartition("; ")
        return Obstacle(why, remedy)
    if find_nvcc() is None:
        return Obstacle("not compiled, and there is no nvcc", REMEDY)
    return Obstacle("not compiled", "run: p3d build-kernels")


def group_obstacle(hosts: Sequence[str], noun: str = "tensor slices") -> Obstacle | None:
    """What is in the way of ranks on these hosts, one each. noun: what each holds."""
    if (across := hosts_obstacle(hosts, noun)) is not None:
        return across
    if len(hosts) not in WORLD_SIZES:
        sizes = ", ".join(map(str, WORLD_SIZES))
        return Obstacle(f"{len(hosts)} {noun}", f"the kernel is for {sizes} of them")
    return None


def hosts_obstacle(hosts: Sequence[str], noun: str) -> Obstacle | None:
    """The same, whatever the number of ranks."""
    if len(set(hosts)) == 1:
        return None
    return Obstacle(
        f"the {len(hosts)} {noun} are on {len(set(hosts))} hosts", f"use no more {noun} than a host has GPUs"
    )


def peer_obstacle(device: torch.device, others: Sequence[int]) -> Obstacle | None:
    """What is in the way of a device and others of its host, by their numbers."""
    if symmetric.reaches(device, others):
        return None
    return Obstacle(
        f"device {device.index} doesn't reach the memory of all of {sorted({*others} - {device.index})}",
        "make all of them visible to every process, on a host with NVLink between them",
    )


def axis_obstacle(
    groups: ProcessGroups,
    axis: str,
    device: torch.device,
    noun: str,
    local: Callable[[torch.device], Obstacle | None] = local_obstacle,
    across: Callable[[Sequence[str], str], Obstacle | None] = group_obstacle,
) -> Obstacle | None:
    """What keeps groups along an axis of the topology from working together: the same on every rank, the first rank's that has
    one.

    noun: what the ranks of such a group hold; local: of a process and its device; across: of a group, by its hosts and
    the noun; by default those of kernels. Collective over the world.
    """
    own = local(device) if groups.backend == "nccl" else Obstacle(f"{groups.backend} trains on the CPU", "use NCCL")
    everyone: list[tuple[str, Any, Obstacle | None]] = all_gather_object(
        (socket.gethostname(), device.index, own), groups.control
    )
    found = [obstacle for _, _, obstacle in everyone if obstacle is not None]
    for ranks in groups.topology.get_axis_comm_lists(axis):
        between = across([everyone[rank][0] for rank in ranks], noun)
        found += [between] if between is not None else []
    if found:
        return found[0]
    group: Group = getattr(groups, axis)
    return first_obstacle(peer_obstacle(device, [everyone[rank][1] for rank in group.ranks]), groups.control)


def first_obstacle(own: Obstacle | None, control: Group) -> Obstacle | None:
    """The first rank's that has one. Collective over control, the world."""
    everyones: list[Obstacle | None] = all_gather_object(own, control)
    return next((obstacle for obstacle in everyones if obstacle is not None), None)
