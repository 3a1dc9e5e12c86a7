"""Collectives over a Group, the only place that calls torch.distributed's. A group of one takes the same path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Global ranks that communicate, in group order; `handle` is None for a group of one."""

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """CPU: block until done. CUDA: make the current stream wait, not the host."""

    def is_completed(self) -> bool:
        """Whether it is done, without waiting."""


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE: Work = _Done()


def all_reduce(tensor: Tensor, group: Group) -> Work:
    """Start to sum `tensor` over the group, in place; the caller waits and keeps `tensor` alive until then."""
    if group.handle is None:
        return DONE
    work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    assert work is not None
    return work


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Copy `tensor` from global rank `source` to the group, in place."""
    if group.handle is not None:
        dist.broadcast(tensor, source, group=group.handle)


def all_gather_integers(values: list[int], group: Group) -> list[list[int]]:
    """Every rank's equally long list of int64, in group order; on the host, over a CPU group."""
    if group.handle is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in group.ranks]
    dist.all_gather(gathered, mine, group=group.handle)
    return [t.tolist() for t in gathered]


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every rank's picklable value, in group order; for set-up, not for a step."""
    if group.handle is None:
        return [value]
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, value, group=group.handle)
    return gathered
