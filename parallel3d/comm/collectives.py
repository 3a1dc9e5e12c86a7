"""Collectives over a Group; nothing else calls torch.distributed's. A group of one takes the same path."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.activity import Activity, Waiting
from parallel3d.comm.log import LOG
from parallel3d.comm.values import dump, load
from parallel3d.operators import Numbers
from parallel3d.rng import OwnStreams


class AllReduceKernel(Protocol):
    """Implementation of the all-reduce of a group by a kernel of this package."""

    def takes(self, x: Tensor) -> bool:
        """Return whether it sums tensors like `x`; the same on every rank."""

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """Write the sum of every rank's x to `out` on the current stream; both are contiguous and may be the same."""

    def start(self, x: Tensor) -> Work:
        """Start to sum `x`, contiguous, in place, on another stream than the current one."""

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a peer was late in a sum that has ended. The replay of a CUDA graph can't check this."""


class ReduceScatterKernel(Protocol):
    """Implementation of the reduction of gradients over a group by a kernel of this package."""

    def takes(self, whole: Tensor, output: Tensor, wire: torch.dtype) -> bool:
        """Return whether it reduces tensors like these; the same on every rank."""

    def squares_size(self, numel: int, wire: torch.dtype) -> int:
        """Return the length of the float64 tensor `squares` for a shard of `numel` elements."""

    def start(self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None) -> Work:
        """Start output [n] (+)= the sum of every rank's part of whole [ranks * n], on another stream than the current one.

        - wire: the dtype in which parts travel.
        - squares: receives numbers whose sum is the sum of the results' squares.
        """


class ShardMessages(Protocol):
    """Messages between the ranks of a group that occupy no multiprocessor."""

    most_bytes: int

    def takes(self, x: Tensor) -> bool:
        """Return whether tensors like `x` can be sent; the same on every rank."""

    def send(self, x: Tensor, peer: int) -> None:
        """Post x, contiguous and of at most most_bytes, to a peer, given by its index in the group."""

    def taken(self, shape: Sequence[int], dtype: torch.dtype, peer: int) -> AbstractContextManager[Tensor]:
        """Open a peer's next message in place for work on the current stream; on exit its memory is the peer's again."""

    def receive(self, out: Tensor, peer: int) -> Work:
        """Post the receipt of a peer's next message into `out`, contiguous."""


class GatherCopies(Protocol):
    """Memory of shards that all ranks of a group map, and gathers by copies out of it."""

    def keep(self, shard: Tensor) -> Tensor:
        """Return a shard, [n], in that memory, with its values."""

    def holds(self, shard: Tensor) -> bool:
        """Return whether a tensor is in that memory."""

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        """Start to gather every rank's shard into `whole`, as all_gather_into does."""


@dataclass(unsafe_hash=True)
class Group:
    """Communicator of global ranks, in group order.

    - handle: torch's process group; None for a group of one.
    - activity: records what this process waits for.
    - own_streams: random streams of this rank's shards.
    - number: the group's index in GROUPS, for operators of compiled graphs.
    - all_reduce_kernel, reduce_scatter_kernel, shard_messages, gather_copies: replacements of the backend, if an engine has
      opened them for this group (by the `use_` methods).
    """

    ranks: tuple[int, ...]
    handle: dist.ProcessGroup | None
    activity: Activity = field(default_factory=Activity, compare=False, repr=False, kw_only=True)
    own_streams: OwnStreams = field(default_factory=OwnStreams, compare=False, repr=False, kw_only=True)
    all_reduce_kernel: AllReduceKernel | None = field(default=None, init=False, compare=False, repr=False)
    reduce_scatter_kernel: ReduceScatterKernel | None = field(default=None, init=False, compare=False, repr=False)
    shard_messages: ShardMessages | None = field(default=None, init=False, compare=False, repr=False)
    gather_copies: GatherCopies | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.number = GROUPS.add(self)

    def use_all_reduce(self, kernel: AllReduceKernel | None) -> None:
        """All-reduce by this kernel from now on; None: by the backend. The same on every rank."""
        self.all_reduce_kernel = kernel

    def use_reduce_scatter(self, kernel: ReduceScatterKernel | None) -> None:
        """Reduce gradients by this kernel from now on; None: by the backend. The same on every rank."""
        self.reduce_scatter_kernel = kernel

    def use_shard_messages(self, messages: ShardMessages | None) -> None:
        """Exchange shards by these messages from now on; None: by collectives. The same on every rank."""
        self.shard_messages = messages

    def use_gather_copies(self, copies: GatherCopies | None) -> None:
        """Gather the shards that these copies keep by them from now on; None: by the backend. The same on every rank."""
        self.gather_copies = copies

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Index of this process in the group."""
        return 0 if self.handle is None else dist.get_rank(self.handle)

    def waiting(self, what: str, ranks: tuple[int, ...] | None = None) -> Waiting:
        """Return a wait to record as activity: for `what`, in words, and for `ranks` (default: all of the group)."""
        return Waiting(self.activity, what, self.ranks if ranks is None else ranks)

    def own_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context in which each rank draws different numbers on `device`; after it, all generators are equal again.

        Without it all shards of a tensor would get the same dropout mask. In a group of one, numbers are those of an unsharded
        tensor; otherwise they depend on the number of ranks.
        """
        return nullcontext() if self.size == 1 else self.own_streams.drawing(self.index, device)

    def __deepcopy__(self, memo: Any) -> Group:
        """Return this group: a copy of a layer communicates with the same ranks."""
        return self


GROUPS: Numbers[Group] = Numbers()


class ImaginedGroup(Group):
    """Group of ranks that do not exist, of which this process plays the first: for traces on tensors without values.

    Nothing is communicated and results have any values. Each all_reduce, all_gather and reduce_scatter calls
    note(kind, bytes of the whole tensor), whose result is the collective's Work.
    """

    def __init__(self, size: int, note: Callable[[str, int], Work]):
        super().__init__(tuple(range(size)), None)
        self.note = note

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes a copy from, which notes nothing: another process counts for itself."""
        return ImaginedGroup, (self.size, _note_nothing)


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> Any:
        """CPU: block until it is done. CUDA: make the current stream wait, not the host."""

    def is_completed(self) -> bool:
        """Return whether it is done, without waiting."""


class _Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE: Work = _Done()


def _note_nothing(kind: str, nbytes: int) -> Work:
    return DONE


class Awaited:
    """A Work that records what the process waits for, while it waits."""

    __slots__ = ("_waiting", "_work")

    def __init__(self, work: Work, waiting: Waiting):
        # A separate object is recorded: the record may outlive the work, and must not keep the work's tensors alive.
        self._work, self._waiting = work, waiting

    def is_completed(self) -> bool:
        """Return whether the work is done, without waiting."""
        return self._work.is_completed()

    def wait(self) -> Any:
        """Wait as the work does."""
        activity = self._waiting.activity
        activity.note(self._waiting)  # an exception leaves it there, as the place of the failure
        result = self._work.wait()
        activity.note(None)
        return result

    def when_done(self, call: Callable[[], object], beside: torch.cuda.Stream | None) -> None:
        """Run `call` when the work is done; never if the backend has no future, as for gloo's reduce-scatter.

        On CUDA, `beside` is a stream used for nothing else: `call` runs now, with `beside` as the current stream after the
        work. On the CPU, `call` runs in another thread. Nothing blocks here; the caller must still wait for the work.
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


# Collectives in words, for records of waits.
_NAMES = {
    "all_reduce": "an all-reduce",
    "reduce_scatter": "a reduce-scatter",
    "all_gather": "an all-gather",
    "broadcast": "a broadcast",
}


def _is_alone(group: Group) -> bool:
    return group.handle is None and not isinstance(group, ImaginedGroup)


def _start(kind: str, whole: Tensor, group: Group, start: Callable[..., Any]) -> Work:
    """Start a collective, unless the rank is alone. whole: the collective's tensor of all ranks."""
    if isinstance(group, ImaginedGroup):
        return group.note(kind, whole.nbytes)
    if group.handle is None:
        return DONE

    def started() -> Work:
        return Awaited(start(group=group.handle, async_op=True), group.waiting(_NAMES[kind]))

    if LOG.takes(kind):
        LOG.run((kind, whole.nbytes, group.size), whole.device, lambda: started().wait())
        return DONE
    return started()


def all_reduce(tensor: Tensor, group: Group) -> Work:
    """Start to sum `tensor` over the group, in place; the caller waits and keeps `tensor` alive until then."""
    return _start("all_reduce", tensor, group, partial(dist.all_reduce, tensor))


def all_reduce_max(tensor: Tensor, group: Group) -> Work:
    """Start to replace `tensor` by its largest values over the group, in place."""
    return _start("all_reduce", tensor, group, partial(dist.all_reduce, tensor, op=dist.ReduceOp.MAX))


# torch 2.13 renames these two and deprecates the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_into(shard: Tensor, whole: Tensor, group: Group) -> Work:
    """Start to sum `whole` [n * group.size] over the group; `shard` [n] gets this rank's part, and may be a part of whole."""
    if _is_alone(group) and shard.data_ptr() != whole.data_ptr():
        shard.copy_(whole)
    return _start("reduce_scatter", whole, group, partial(_reduce_scatter, shard, whole))


def all_gather_into(whole: Tensor, shard: Tensor, group: Group) -> Work:
    """Start to gather every rank's `shard` [n] into `whole` [n * group.size] in group order; shard may be a part of whole."""
    if _is_alone(group) and shard.data_ptr() != whole.data_ptr():
        whole.copy_(shard)
    copies = group.gather_copies
    if copies is not None and copies.holds(shard):
        return _start("all_gather", whole, group, lambda **_: copies.gather(whole, shard))
    return _start("all_gather", whole, group, partial(_all_gather, whole, shard))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes [n] of a contiguous tensor: a view, or a copy if the tensor has a lazy conjugation or negation."""
    return tensor.resolve_conj().resolve_neg().view(-1).view(torch.uint8)


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """Copy `tensor`, of any dtype and strides, from global rank `source` to the group, in place."""
    # Without the repeats of an expanded tensor, which can't be written.
    own = tensor[tuple([slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride()])]
    data = own.contiguous()
    # As bytes: backends don't know all dtypes. Contiguous: gloo takes the memory as it lies.
    _start("broadcast", tensor, group, partial(dist.broadcast, as_bytes(data), source)).wait()
    if data is not own:
        own.copy_(data)


def start_all_gather_integers(values: list[int], group: Group) -> Callable[[], list[list[int]]]:
    """Start to gather every rank's list of int64, of equal lengths, over a CPU group; return what waits for the lists."""
    if group.handle is None:
        return lambda: [values]
    mine = torch.tensor(values, dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in group.ranks]
    work = Awaited(dist.all_gather(gathered, mine, group=group.handle, async_op=True), group.waiting("an agreement"))

    def wait() -> list[list[int]]:
        work.wait()
        return [t.tolist() for t in gathered]

    return wait


def all_gather_integers(values: list[int], group: Group) -> list[list[int]]:
    """Return every rank's list of int64, of equal lengths, in group order; on the host, over a CPU group."""
    return start_all_gather_integers(values, group)()


def everywhere(good: bool, control: Group) -> bool:
    """Return whether `good` is true on every rank. Collective over control, the world."""
    return all(row[0] for row in all_gather_integers([int(good)], control))


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Return every rank's value (comm/values.py), in group order; on the host, over a CPU group. For set-up, not for a step."""
    if group.handle is None:
        return [value]
    data = torch.frombuffer(bytearray(dump(value)), dtype=torch.uint8)
    lengths = [row[0] for row in all_gather_integers([data.numel()], group)]
    mine = nn.functional.pad(data, (0, max(lengths) - data.numel()))
    gathered = [torch.empty_like(mine) for _ in group.ranks]
    with group.waiting("an exchange"):
        dist.all_gather(gathered, mine, group=group.handle)
    return [load(one[:n].numpy().tobytes()) for one, n in zip(gathered, lengths, strict=True)]


def send_bytes(tensor: Tensor, rank: int, group: Group) -> None:
    """Send a tensor's bytes to a global rank, from the host, over a CPU group; for export, not for a step."""
    data = as_bytes(tensor.detach().cpu().contiguous())
    with group.waiting(f"rank {rank} to take a message", (rank,)):
        dist.send(data, rank, group=group.handle)


def receive_bytes(shape: Sequence[int], dtype: torch.dtype, rank: int, group: Group, tag: int = 0) -> Tensor:
    """Return a tensor, on the host, whose bytes a global rank sends over a CPU group under a tag."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    with group.waiting(f"a message of rank {rank}", (rank,)):
        dist.recv(as_bytes(tensor), rank, group=group.handle, tag=tag)
    return tensor


# Messages of the RuntimeErrors that gloo raises when a peer is gone or a collective was given up.
_GLOO_LOST = re.compile(
    "Connection (closed by peer|reset by peer|refused)|Broken pipe|Socket closed|Timed out waiting|Application timeout|"
    "Read error|Write error|ECONNRESET|no connected peer"
)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exception is one that communication raises when another rank has ended."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO_LOST.search(str(error)) is not None
