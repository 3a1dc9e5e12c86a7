"""A stand-in for the copies between tensor-parallel ranks on the CPU: the same messages, by gloo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.collectives import Group, Work


class ShardMessages:
    """Copies between the ranks of a group; messages are no larger than most_bytes. Counts them by what was called."""

    def __init__(self, group: Group, most_bytes: int):
        self.most_bytes = most_bytes
        self.calls: Counter[str] = Counter()
        self._group = group
        self._sent: list[tuple[Work, Tensor]] = []

    def takes(self, x: Tensor) -> bool:
        return not x.is_meta

    def send(self, x: Tensor, peer: int) -> None:
        assert x.is_contiguous()
        assert 0 < x.nbytes <= self.most_bytes
        self.calls["send"] += 1
        data = x.clone()  # what is sent may be written over once the stream is past it
        work = dist.isend(data, self._group.ranks[peer], group=self._group.handle)
        assert work is not None
        self._sent.append((work, data))

    @contextmanager
    def taken(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> Iterator[Tensor]:
        self.calls["taken"] += 1
        slot = torch.empty(tuple(shape), dtype=dtype)
        self._receive(slot, peer).wait()
        yield slot
        slot.fill_(float("nan"))  # it is the peer's again

    def receive(self, out: Tensor, peer: int) -> Work:
        self.calls["receive"] += 1
        return self._receive(out, peer)

    def _receive(self, out: Tensor, peer: int) -> Work:
        assert out.is_contiguous()
        assert out.nbytes <= self.most_bytes
        work = dist.irecv(out, self._group.ranks[peer], group=self._group.handle)
        assert work is not None
        return work

    def finish(self) -> None:
        """Return when all that was posted here has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
