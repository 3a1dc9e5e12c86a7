"""Optimizer state in host memory (ZeRO-Offload, arXiv:2101.06840): it passes through a window of the device, or stays."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.comm.transfers import Event, Transfers
from parallel3d.errors import OffloadError
from parallel3d.zero.buckets import Bucket, ParameterShard, Span
from parallel3d.zero.disk import StagingBuffer, StagingBuffers, in_blocks
from parallel3d.zero.memory import StateBytes, bytes_of, is_elementwise_state
from parallel3d.zero.policy import READS_AHEAD, free_memory
from parallel3d.zero.storage import Storage

Call = Callable[[], None]

_MASTER = "master"
# With ratio "auto", the device's free memory is measured after this step: the second has all that a step allocates.
_MEASURED_STEPS = 2
# Optimizers of torch whose fused kernels run on the CPU, in one pass over the memory. Not SGD with momentum: its kernel can't
# start that of a parameter which gets its first gradient later than others.
_FUSED_ON_CPU = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)


@dataclass(eq=False)
class _Buffer:
    """Memory that one span at a time passes through, by the name of its state. free: event after which it can be reused."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    free: Event = None

    def room(self, name: str, like: Tensor, allocate: Callable[[int], Tensor]) -> Tensor:
        """Return memory for a flat tensor. allocate: makes new memory, given the bytes of an element, if there isn't enough."""
        if name not in self.tensors or self.tensors[name].nbytes < like.nbytes:
            self.tensors[name] = allocate(like.itemsize)
        return self.tensors[name][: like.nbytes].view(like.dtype)


@dataclass(eq=False)
class _Visit:
    """Stay of a span in a buffer. rooms: its tensors there; arrived: when they have been copied there.

    staged: the host's buffer on its way from and to the disk; None for state in host memory.
    """

    bucket: Bucket
    span: Span
    buffer: _Buffer
    staged: StagingBuffer | None = None
    rooms: dict[str, Tensor] = field(default_factory=dict)
    arrived: Event = None


class OffloadedState:
    """Masters and optimizer state of offloaded buckets, flat in host memory, and the step on them.

    On the device (default): for each span its state is copied, from the disk through host memory, into a buffer of the window,
    the optimizer updates it there, and it is copied back, while the next spans come. The values are those of an optimizer whose
    state stays on the device, bit for bit. On the CPU: gradients are copied to the host, the optimizer updates the state there,
    and weights are copied back.

    optimizer: an elementwise one that holds the buckets' masters; its step() runs once for each span. If it raises, the
    state of that span and of those to come is as before (on the CPU, its own may be in between), and `check_whole` raises.
    storage: where the state is kept.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        storage: Storage,
    ):
        self._optimizer, self._buckets = optimizer, list(buckets)
        self._settings = settings = storage.settings
        self._device, self.on_cpu = buckets[0].device, settings.on_cpu
        self._transfers = Transfers()
        self._flats: dict[Bucket, dict[str, Tensor]] = {}
        for bucket in buckets:
            own = bucket.master if bucket.has_own_master else None
            self._flats[bucket] = {} if own is None else {_MASTER: own}
        self._longest = max(span.part.stop - span.part.start for bucket in buckets for span in bucket.spans)
        self._widest = max(bucket.master_dtype.itemsize for bucket in buckets)
        self._storage, self._staging = storage, None
        if storage.file is not None:
            read = min(settings.host_buffers, sum(len(bucket.spans) for bucket in buckets if bucket.state_on_disk))
            self._staging = StagingBuffers(storage.file, read, storage.settings.pin, self._longest * self._widest)
        self._group_of: dict[nn.Parameter, int] = {}
        # Buffers of gradients on their way to the CPU are kept, because pinning new memory takes long.
        self._window = [_Buffer() for _ in range(settings.buffers)] if self.on_cpu else []
        self._window_bytes = 0  # of the last step
        self._last: Event = None  # of the last copy to the host
        self._steps = 0
        self._failure: str | None = None  # the error that ended a step before its end
        self._adopt_all()

    def _on_device(self, itemsize: int) -> Tensor:
        """Return memory for the longest span of any bucket, whose state may be wider."""
        return torch.empty(self._longest * max(itemsize, self._widest), dtype=torch.uint8, device=self._device)

    def _on_host(self, itemsize: int) -> Tensor:
        return allocate_slab(self._longest * itemsize, self._settings.pin)

    def after_step(self) -> None:
        """With ratio "auto", move as much state back to the device as fits what the first steps left unused of its memory."""
        self._steps += 1
        if not self._settings.is_auto or self._steps != _MEASURED_STEPS:
            return
        self.settle()
        free = free_memory(self._device)
        for bucket in list(self._buckets):
            flats = self._flats[bucket]
            size = sum(flat.nbytes for flat in flats.values())
            if size > free:
                break
            free -= size
            self._keep_on_device(bucket)

    def _keep_on_device(self, bucket: Bucket) -> None:
        """Move the state of a bucket to the device for good."""
        self._buckets.remove(bucket)
        flats = {name: flat.to(self._device, copy=True) for name, flat in self._flats.pop(bucket).items()}
        for span in bucket.spans:
            for shard in span.shards:
                self._point(shard, bucket, flats, 0)
            self._place_numbers(span, self._device)
        bucket.keep_on_device(flats.get(_MASTER))

    def state_bytes(self) -> StateBytes:
        """Return the bytes of the state on the host and on disk, and of the window."""
        flats = [(flat.nbytes, bucket.state_on_disk) for bucket, own in self._flats.items() for flat in own.values()]
        disk = sum(in_blocks(size) for size, on_disk in flats if on_disk)
        host = sum(size for size, on_disk in flats if not on_disk)
        host += bytes_of(self._staging.slabs()) if self._staging is not None else 0
        if self.on_cpu:
            return StateBytes(host=host + _bytes_in(self._window))
        return StateBytes(disk=disk, host=host, window=self._window_bytes)

    def settle(self) -> None:
        """Wait until the host may read and write the state."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None
        if self._staging is not None:
            self._staging.settle()

    @torch.no_grad()
    def step(self, untouched: Set[nn.Parameter], factor: Tensor | None, meanwhile: Call) -> None:
        """Update all spans and their weights. meanwhile: called once the first copies have started.

        untouched, factor: see Bucket.assign_gradients.
        """
        self._adopt_all()
        self._take_groups()
        work = ((bucket, span) for bucket in self._buckets for span in bucket.spans)
        run = self._step_on_cpu if self.on_cpu else self._step_on_device
        kept = [group["params"] for group in self._optimizer.param_groups]
        try:
            run(work, untouched, factor, meanwhile)
        except BaseException as error:
            self._failure = repr(error)
            raise
        finally:
            self._transfers.join(self._device)  # afterwards the window's memory can be reused, also after an error
            for group, params in zip(self._optimizer.param_groups, kept, strict=True):
                group["params"] = params

    def _take_groups(self) -> None:
        groups = self._optimizer.param_groups
        self._group_of = {p: k for k, group in enumerate(groups) for p in group["params"]}
        if self.on_cpu and isinstance(self._optimizer, _FUSED_ON_CPU):
            for group in groups:
                group.update(fused=not group.get("momentum"), foreach=False)

    def check_whole(self) -> None:
        """Raise OffloadError if a step has failed after it had updated some spans, unless all state was loaded since."""
        if self._failure is not None:
            raise OffloadError(
                f"the optimizer's step failed ({self._failure}) when it had updated some of the weights and their state, and "
                "not others; load a checkpoint with its optimizer state, or restart from one"
            )

    def forget_failure(self) -> None:
        """Note that all state was loaded."""
        self._failure = None

    def _step_on_device(
        self, work: Iterator[tuple[Bucket, Span]], untouched: Set[nn.Parameter], factor: Tensor | None, meanwhile: Call
    ) -> None:
        ready, window = self._staged(work), [_Buffer() for _ in range(self._settings.buffers)]
        coming = deque(self._bring(*one, buffer) for buffer, one in zip(window, ready, strict=False))
        meanwhile()
        while coming:
            visit = coming.popleft()
            self._transfers.wait_for(visit.arrived, self._device)
            self._update(visit, untouched, factor)
            coming.extend(self._bring(*one, visit.buffer) for one in islice(ready, 1))
        self._window_bytes = _bytes_in(window)

    def _staged(self, work: Iterator[tuple[Bucket, Span]]) -> Iterator[tuple[Bucket, Span, StagingBuffer | None]]:
        """Yield the spans, and start to read those to come from the disk. staged: wait for it before its tensors are used."""
        if self._staging is not None:
            self._staging.settle()
        coming: deque[tuple[Bucket, Span, StagingBuffer | None]] = deque()
        for bucket, span in work:
            staged = None
            if bucket.state_on_disk and self._staging is not None:
                staged = self._staging.read(self._flats[bucket], span.part)
            coming.append((bucket, span, staged))
            while sum(one[2] is not None for one in coming) > READS_AHEAD:
                yield coming.popleft()
        yield from coming

    def _bring(self, bucket: Bucket, span: Span, staged: StagingBuffer | None, buffer: _Buffer) -> _Visit:
        """Start to copy a span's state into a buffer. State that the optimizer makes anew waits for the buffer, too."""
        visit = _Visit(bucket, span, buffer, staged, arrived=buffer.free)
        if staged is not None:
            staged.wait()
        flats = (
            {name: flat[span.part] for name, flat in self._flats[bucket].items()} if staged is None else staged.tensors
        )
        is_new = any(name not in buffer.tensors for name in flats)
        visit.rooms = {name: buffer.room(name, held, self._on_device) for name, held in flats.items()}
        # Kernels that are queued may still use memory that the allocator gives out now, or fill it, as PyTorch does for
        # deterministic algorithms.
        made = self._transfers.now(self._device) if is_new else None
        for name, held in flats.items():
            visit.arrived = self._transfers.copy(visit.rooms[name], held, buffer.free, made)
        return visit

    def _update(self, visit: _Visit, untouched: Set[nn.Parameter], factor: Tensor | None) -> None:
        """Update a span whose state is in a buffer, and start to copy it back."""
        bucket, span, flats = visit.bucket, visit.span, self._flats[visit.bucket]
        for shard in span.shards:
            self._point(shard, bucket, visit.rooms, span.part.start)
        try:
            bucket.assign_gradients(span, untouched, factor)
            self._optimize(span, self._device)
            if _MASTER in visit.rooms:
                bucket.write_back(span.part, visit.rooms[_MASTER])
            self._adopt(bucket, span, visit)
        finally:  # also after an error, the masters must not refer to the buffer any longer
            for shard in span.shards:
                self._point(shard, bucket, flats, 0)
        done = self._transfers.now(self._device)
        for name, room in visit.rooms.items():
            target = flats[name][span.part]
            if visit.staged is not None and self._staging is not None:
                self._staging.room(visit.staged, name, target)
                target = visit.staged.tensors[name]
            self._last = self._transfers.copy(target, room, done)
        visit.buffer.free = self._last
        if visit.staged is not None and self._staging is not None:
            self._staging.write(visit.staged, flats, span.part, self._last)

    def _step_on_cpu(
        self, work: Iterator[tuple[Bucket, Span]], untouched: Set[nn.Parameter], factor: Tensor | None, meanwhile: Call
    ) -> None:
        coming = deque(self._send(*one, buffer) for buffer, one in zip(self._window, work, strict=False))
        meanwhile()
        factor = None if factor is None else factor.cpu()
        with _threads():
            while coming:
                visit = coming.popleft()
                if visit.arrived is not None:
                    visit.arrived.synchronize()
                self._update_on_cpu(visit, untouched, factor)
                coming.extend(self._send(*one, visit.buffer) for one in islice(work, 1))

    def _send(self, bucket: Bucket, span: Span, buffer: _Buffer) -> _Visit:
        """Start to copy a span's gradients to the host."""
        visit, gradients = _Visit(bucket, span, buffer), bucket.gradient_shard[span.part]
        for name, like in (("gradients", gradients), ("weights", _weights(bucket, span))):
            if name == "gradients" or not bucket.weights_offloaded:
                visit.rooms[name] = buffer.room(name, like, self._on_host)
        visit.arrived = self._transfers.copy(
            visit.rooms["gradients"], gradients, self._transfers.now(self._device), buffer.free
        )
        return visit

    def _update_on_cpu(self, visit: _Visit, untouched: Set[nn.Parameter], factor: Tensor | None) -> None:
        """Update a span whose gradients are on the host, and start to copy the weights to the device."""
        bucket, span = visit.bucket, visit.span
        gradients = visit.rooms["gradients"]
        if gradients.dtype != bucket.master_dtype:
            # In memory that is kept: to take new pages would cost more than the update.
            wide = torch.empty((), dtype=bucket.master_dtype).expand_as(gradients)
            gradients = visit.buffer.room("wide", wide, self._on_host).copy_(gradients)
        bucket.assign_gradients(span, untouched, factor, gradients)
        self._optimize(span, torch.device("cpu"))
        self._adopt(bucket, span)
        masters = self._flats[bucket][_MASTER][span.part]
        if bucket.weights_offloaded:
            _weights(bucket, span).copy_(masters)
            return
        weights = visit.rooms["weights"].copy_(masters)
        self._last = visit.buffer.free = self._transfers.copy(_weights(bucket, span), weights)

    def _optimize(self, span: Span, device: torch.device) -> None:
        """Run the optimizer only on a span's masters, which are on this device, and drop their gradients."""
        for k, group in enumerate(self._optimizer.param_groups):
            group["params"] = [shard.master for shard in span.shards if self._group_of.get(shard.master) == k]
        self._place_numbers(span, device)
        try:
            self._optimizer.step()
        finally:
            for shard in span.shards:
                shard.master.grad = None

    def _place_numbers(self, span: Span, device: torch.device) -> None:
        """Move scalars of the state, such as the step's number, to where a kernel reads them."""
        for shard in span.shards:
            group = self._optimizer.param_groups[self._group_of[shard.master]] if shard.master in self._group_of else {}
            if group.get("fused") or group.get("capturable"):
                state = self._optimizer.state.get(shard.master, {})
                state.update({k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and not v.dim()})

    def _point(self, shard: ParameterShard, bucket: Bucket, flats: dict[str, Tensor], start: int) -> None:
        """Make a shard's master, and the state that the optimizer has for it, views of these flat tensors."""
        state = self._optimizer.state.get(shard.master, {})
        for name, flat in flats.items():
            if name == _MASTER:
                shard.master.data = bucket.part_of(shard, flat, start)
            elif name in state:
                state[name] = bucket.part_of(shard, flat, start)

    def _adopt_all(self) -> None:
        for bucket in self._buckets:
            for span in bucket.spans:
                self._adopt(bucket, span)

    def _adopt(self, bucket: Bucket, span: Span, visit: _Visit | None = None) -> None:
        """Copy elementwise state that lies elsewhere, as the optimizer has just made or loaded it, into the flat tensors.

        visit: the visit in whose buffer the span is; None if the span is on the host.
        """
        flats = self._flats[bucket]
        for shard in span.shards:
            for name, value in self._optimizer.state.get(shard.master, {}).items():
                if not isinstance(value, Tensor) or not is_elementwise_state(name, value.shape, shard.master.shape):
                    continue
                if name not in flats:
                    numel = bucket.gradient_shard.numel()
                    flats[name] = self._storage.allocate(numel, value.dtype, bucket.state_on_disk)
                flat, start = flats[name], 0
                if visit is not None:
                    room = visit.buffer.room(name, flat[span.part], self._on_device)
                    flat, start = visit.rooms.setdefault(name, room), span.part.start
                place = bucket.part_of(shard, flat, start)
                if value.data_ptr() != place.data_ptr():
                    if visit is None:
                        self.settle()
                    self._optimizer.state[shard.master][name] = place.copy_(value)


def _bytes_in(window: Sequence[_Buffer]) -> int:
    return bytes_of(t for buffer in window for t in buffer.tensors.values())


def _weights(bucket: Bucket, span: Span) -> Tensor:
    """Return the weights of a span that the layers compute with, flat."""
    assert bucket.own_weights is not None
    return bucket.own_weights[span.part]


@contextmanager
def _threads() -> Iterator[None]:
    """Compute with this process's share of the cores: launchers give each one thread by default."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        yield
    finally:
        torch.set_num_threads(before)
