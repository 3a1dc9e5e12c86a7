"""Collectives over a Group, the only place that calls torch.distributed's. A group of one takes the same path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.activity import ACTIVITY, Waiting

# Why torch.compile's graphs break at collectives that autograd follows.
COMPILE_REASON = "ranks of parallel3d communicate here; compile without fullgraph"


class ReduceKernel(Protocol):
    """A kernel of this package that sums over a group, of comm/all_reduce_kernel.py."""

    number: int

    def takes(self, x: Tensor) -> bool:
        """Whether it sums such tensors."""

    def start(self, x: Tensor) -> Work:
        """Sum x, contiguous, in place, beside the current stream."""


class ReduceScatterKernel(Protocol):
    """A kernel of this package that reduces gradients over a group, of comm/reduce_scatter_kernel.py."""

    def takes(self, whole: Tensor, output: Tensor, wire: torch.dtype) -> bool:
        """Whether it reduces such tensors."""

    def squares_size(self, numel: int, wire: torch.dtype) -> int:
        """Of the float64 tensor that gets a shard's sums of squares."""

    def start(self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None) -> Work:
        """output [n] (+)= the sum of every rank's part of whole [ranks * n], beside the current stream.

        wire: in which parts travel; squares: gets what sums up to the results' squares.
        """


class Copies(Protocol):
    """Messages between the ranks of a group that take no multiprocessor, of comm/shard_copies.py."""

    most_bytes: int

    def takes(self, x: Tensor) -> bool:
        """Whether such tensors can be sent."""

    def send(self, x: Tensor, peer: int) -> None:
        """Post x, contiguous and of at most most_bytes, to a peer, by its place in the group."""

    def taken(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> AbstractContextManager[Tensor]:
        """The next message of a peer, for work on the current stream, until which it is the peer's again."""

    def receive(self, out: Tensor, peer: int) -> Work:
        """Post the receipt of a peer's next message into `out`, contiguous."""


@dataclass
class Kernels:
    """What a group's ranks communicate by instead of the backend, once an engine has opened it."""

    all_reduce: ReduceKernel | None = None
    reduce_scatter: ReduceScatterKernel | None = None
    copies: Copies | None = None


@dataclass(frozen=True)
class Group:
    """Global ranks that communicate, in group order; `handle` is None for a group of one."""

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None
    kernels: Kernels = field(default_factory=Kernels, compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This process's place in the group."""
        return 0 if self.handle is None else dist.get_rank(self.handle)

    def __deepcopy__(self, memo: Any) -> Group:
        """The same group: a copy of a layer communicates with the same ranks."""
        return self


@dataclass(frozen=True)
class ImaginedGroup(Group):
    """Ranks that aren't there, of which this process stands for the first: for traces on tensors without values.

    Nothing is communicated, and results have any values. note(kind, nbytes) hears of each all_reduce, all_gather and
    reduce_scatter, with the bytes of the whole tensor, and what it returns of when it is waited for.
    """

    note: Callable[[str, int], Work]


def _imagined(group: Group, kind: str, whole: Tensor) -> Work | None:
    """Of an imagined group, which hears of this collective, all that there is to wait for."""
    return group.note(kind, whole.nbytes) if isinstance(group, ImaginedGroup) else None


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


class Awaited:
    """A Work whose waiting is noted as this process's activity: `what`, of `ranks`."""

    __slots__ = ("_noted", "_work")

    def __init__(self, work: Work, what: str, ranks: tuple[int, ...]):
        # Noted is not this object: what is noted may outlive the work, and its tensors should not.
        self._work, self._noted = work, Waiting(what, ranks)

    def is_completed(self) -> bool:
        """See Work."""
        return self._work.is_completed()

    def wait(self) -> Any:
        """See Work."""
        ACTIVITY.note(self._noted)  # left there by an exception: it says where that came from
        result = self._work.wait()
        ACTIVITY.note(None)
        return result

    def when_done(self, call: Callable[[], object], beside: torch.cuda.Stream | None) -> None:
        """Run `call` when the work is done, and never where the backend doesn't tell, as of gloo's reduce-scatter.

        beside: a stream for nothing else, on CUDA: `call` runs at once, with this as the current stream, behind the work. On
        the CPU it runs in another thread. Nothing waits, and the work is to be waited for all the same.
        """
        if beside is not None:
            with torch.cuda.stream(beside):
                self._work.wait()
                call()
            return
        try:
            done = cast(Any, self._work).get_future()
        except RuntimeError:
            return
        done.add_done_callback(lambda _: call())


def all_reduce(tensor: Tensor, group: Group) -> Work:
    """Start to sum `tensor` over the group, in place; the caller waits and keeps `tensor` alive until then."""
    return _all_reduce(tensor, group, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, group: Group) -> Work:
    """Start to replace `tensor` by its largest values over the group, in place."""
    return _all_reduce(tensor, group, dist.ReduceOp.MAX)


def _all_reduce(tensor: Tensor, group: Group, op: Any) -> Work:
    if (imagined := _imagined(group, "all_reduce", tensor)) is not None:
        return imagined
    if group.handle is None:
        return DONE
    work = dist.all_reduce(tensor, op=op, group=group.handle, async_op=True)
    assert work is not None
    return Awaited(work, "an all-reduce", group.ranks)


# torch 2.13 renames these two and deprecates the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_into(shard: Tensor, whole: Tensor, group: Group) -> Work:
    """Start to sum `whole` [n * group.size] over the group, each rank its part into `shard` [n], maybe a part of whole."""
    if (imagined := _imagined(group, "reduce_scatter", whole)) is not None:
        return imagined
    if group.handle is None:
        if shard.data_ptr() != whole.data_ptr():
            shard.copy_(whole)
        return DONE
    work = _reduce_scatter(shard, whole, group=group.handle, async_op=True)
    assert work is not None
    return Awaited(work, "a reduce-scatter", group.ranks)


def all_gather_into(whole: Tensor, shard: Tensor, group: Group) -> Work:
    """Start to put every rank's `shard` [n] into `whole` [n * group.size] in group order; shard may be a part of it."""
    if (imagined := _imagined(group, "all_gather", whole)) is not None:
        return imagined
    if group.handle is None:
        if shard.data_ptr() != whole.data_ptr():
            whole.copy_(shard)
        return DONE
    work = _all_gather(whole, shard, group=group.handle, async_op=True)
    assert work is not None
    return Awaited(work, "an all-gather", group.ranks)


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Copy `tensor` from global rank `source` to the group, in place."""
    if group.handle is not None:
        with Waiting("a broadcast", group.ranks):
            dist.broadcast(tensor, source, group=group.handle)


def all_gather_integers(values: list[int], group: Group) -> list[list[int]]:
    """Every rank's equally long list of int64, in group order; on the host, over a CPU group."""
    if group.handle is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in group.ranks]
    with Waiting("an agreement", group.ranks):
        dist.all_gather(gathered, mine, group=group.handle)
    return [t.tolist() for t in gathered]


def everywhere(good: bool, control: Group) -> bool:
    """Whether it is so on every rank. Collective over control, the world."""
    return all(row[0] for row in all_gather_integers([int(good)], control))


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every rank's picklable value, in group order; for set-up, not for a step."""
    if group.handle is None:
        return [value]
    gathered: list[Any] = [None] * group.size
    with Waiting("an exchange", group.ranks):
        dist.all_gather_object(gathered, value, group=group.handle)
    return gathered


def send_bytes(tensor: Tensor, rank: int, group: Group) -> None:
    """Send a tensor's bytes to a global rank, from the host, over a CPU group; for export, not for a step."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    with Waiting(f"rank {rank} to take a message", (rank,)):
        dist.send(data, rank, group=group.handle)


def receive_bytes(shape: Sequence[int], dtype: torch.dtype, rank: int, group: Group) -> Tensor:
    """A tensor, on the host, whose bytes a global rank sends over a CPU group."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with Waiting(f"a message of rank {rank}", (rank,)):
        dist.recv(tensor.reshape(-1).view(torch.uint8), rank, group=group.handle)
    return tensor
