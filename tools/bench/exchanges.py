"""Exchanges of tensors between ranks of one host, for communication.py to time; for processes of torchrun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel3d.autograd.products import Factors, multiply
from parallel3d.comm.environment import local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import PeerCopies, open_peer_copies, open_shard_copies
from parallel3d.comm.topology import ProcessTopology
from parallel3d.kernels.all_reduce import AllReduce
from parallel3d.kernels.workspace import check_kernels
from parallel3d.tensor_parallel.regions import SequenceBoundary

ALONE, KERNEL, COPIES = "alone", "kernel", "copies"
OPERATOR = "PyTorch's operator"
_BESIDE_BYTES = 32 * 2**20  # at most, of the message that goes round beside a product


@dataclass(frozen=True)
class Way:
    """One exchange: its kind, its total bytes and its implementation. call: starts it on the current stream.

    queued: to be timed with all calls in the devices' queues before they begin, as in a step whose host is ahead.
    """

    what: str
    num_bytes: int
    by: str
    call: Callable[[], object]
    queued: bool = False


class Exchanges:
    """Exchanges between all ranks of the world. products: tokens, hidden size and feed-forward size of a decoder.

    why_off: what keeps this package's ways from running here, "" if nothing does. Collective, as `ways`.
    """

    def __init__(self, products: Sequence[int]):
        self.device, self._world, self._products = local_device(), dist.get_world_size(), products
        self._backend = str(dist.get_backend())
        self._groups = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [1, 1, self._world]))
        self._stages = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [self._world, 1, 1]))
        kernel = AllReduce.open(self._groups, self.device)
        self._groups.model.use_all_reduce(kernel)
        self._kernel: Any = kernel
        self._beside: Any = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._ring = open_peer_copies(self._stages, self.device)
        self._shards = open_shard_copies(self._groups, self.device)
        self.why_off = "" if kernel is not None else str(check_kernels(self.device) or "see the warning of rank 0")

    def ways(self, what: Sequence[str], sizes: Sequence[int], dtype: torch.dtype) -> Iterator[Way]:
        """Yield the exchanges of some kinds. sizes: bytes of a message of an all-reduce or a ring."""
        for num_bytes in sizes:
            x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=self.device)
            yield from self._all_reduces(x) if "all_reduce" in what else ()
            yield from self._in_a_ring(x) if "ring" in what else ()
            yield from self._to_a_neighbour(x) if "message" in what else ()
        if "beside" in what:
            yield from self._beside_a_ring(min(max(sizes), _BESIDE_BYTES), dtype)
        if "products" in what:
            yield from self._products_of(dtype)

    def _all_reduces(self, x: Tensor) -> Iterator[Way]:
        yield Way("all_reduce", x.nbytes, self._backend, lambda: dist.all_reduce(x))
        if (kernel := self._kernel) is not None:
            yield Way("all_reduce", x.nbytes, KERNEL, lambda: kernel.sum_into(x, x))

    def _in_a_ring(self, x: Tensor) -> Iterator[Way]:
        """Yield messages to the next rank and from the previous one at the same time."""
        for by, call in self._around(x):
            yield Way("ring", x.nbytes, by, call)

    def _beside_a_ring(self, num_bytes: int, dtype: torch.dtype) -> Iterator[Way]:
        """Products of a decoder's layer, while for each a message goes round by another stream."""
        tokens, hidden, ffn = self._products
        x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=self.device)
        left, right = (torch.randn(n, hidden, dtype=dtype, device=self.device) for n in (tokens, ffn))
        yield Way("product beside a ring", x.nbytes, ALONE, lambda: F.linear(left, right))
        for by, call in self._around(x):
            yield Way("product beside a ring", x.nbytes, by, partial(self._with, call, lambda: F.linear(left, right)))

    def _with(self, send: Callable[[], None], multiply: Callable[[], Tensor]) -> None:
        if self.device.type != "cuda":
            send()
            multiply()
            return
        with torch.cuda.stream(self._beside):
            send()
        multiply()

    def _around(self, x: Tensor) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield the name and the call of each implementation of a ring."""
        rank, y = dist.get_rank(), torch.empty_like(x)
        target, source = (rank + 1) % self._world, (rank - 1) % self._world

        def by_backend() -> None:
            ends = [dist.P2POp(dist.isend, x, target), dist.P2POp(dist.irecv, y, source)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()

        def by_copies(copies: PeerCopies) -> None:
            (sent,) = copies.send([x.view(torch.uint8)], target)
            self._receive(copies, x, source)
            sent.wait()

        yield from self._by_each(by_backend, by_copies)

    def _to_a_neighbour(self, x: Tensor) -> Iterator[Way]:
        """Yield messages from every even rank to the next one."""
        rank = dist.get_rank()
        other, receives = rank ^ 1, rank % 2 == 1

        def by_backend() -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv if receives else dist.isend, x, other)]):
                work.wait()

        def by_copies(copies: PeerCopies) -> None:
            if receives:
                self._receive(copies, x, other)
            else:
                copies.send([x.view(torch.uint8)], other)[0].wait()

        if self._world % 2 == 0:
            for by, call in self._by_each(by_backend, by_copies):
                yield Way("message", x.nbytes, by, call)

    def _receive(self, copies: PeerCopies, like: Tensor, source: int) -> None:
        """One tensor."""
        for incoming in copies.receive([torch.empty_like(like)], source):
            incoming.wait()

    def _by_each(
        self, by_backend: Callable[[], None], by_copies: Callable[[PeerCopies], None]
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        yield self._backend, by_backend
        if self._ring is not None:
            yield COPIES, partial(by_copies, self._ring)

    def _products_of(self, dtype: torch.dtype) -> Iterator[Way]:
        """Yield the GEMMs of column layers with the all-gather of their input, and those of row layers with the
        reduce-scatter of their output and the all-gather of its gradient, which is kept: with the host's time, and queued.
        """
        tokens, hidden, ffn = self._products
        group, heads, wide = self._groups.model, hidden // self._world, ffn // self._world
        boundary = SequenceBoundary(group, tokens)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=dtype, device=self.device)

        shard, whole = random(1, tokens // self._world, hidden), random(1, tokens, hidden)
        for name, count, width in (("3 of attention", 3, heads), ("2 of feed-forward", 2, wide)):
            weights = [random(width, hidden) for _ in range(count)]
            yield from self._each(
                f"gather, {name}",
                whole.nbytes,
                partial(_multiply_each, whole, weights),
                partial(boundary.enter_products, shard, [(weight, None) for weight in weights]),
                partial(self._gather_by_operator, shard, [weight.t() for weight in weights], keep=False),
            )
        for name, width in (("attention", heads), ("feed-forward", wide)):
            x, weight = random(1, tokens, width), random(hidden, width)
            yield from self._each(
                f"scatter, of {name}",
                whole.nbytes,
                partial(multiply, [(x, weight.t())]),
                partial(_leave, boundary, [(x, weight.t())]),
                partial(self._scatter_by_operator, x, weight.t()),
            )
            yield from self._each(
                f"gather and keep, of {name}",
                whole.nbytes,
                partial(multiply, [(whole, weight)]),
                partial(boundary.enter_kept, shard, weight),
                partial(self._gather_by_operator, shard, [weight], keep=True),
            )

    def _each(
        self,
        name: str,
        num_bytes: int,
        alone: Callable[[], object],
        call: Callable[[], object],
        by_operator: Callable[[], object],
    ) -> Iterator[Way]:
        """Yield a GEMM without communication, by the backend, by copies, and by PyTorch's operator."""

        def by(copies: Any) -> None:
            self._groups.model.use_shard_messages(copies)
            with torch.no_grad():
                call()
            self._groups.model.use_shard_messages(None)

        calls = {ALONE: alone, self._backend: partial(by, None)}
        calls |= {COPIES: partial(by, self._shards)} if self._shards is not None else {}
        calls |= {OPERATOR: by_operator} if self._kernel is not None else {}
        for way, timed in calls.items():
            yield Way(name, num_bytes, way, timed)
        if self.device.type == "cuda":
            for way, timed in calls.items():
                yield Way(f"{name}, queued", num_bytes, way, timed, queued=True)

    def _gather_by_operator(self, shard: Tensor, rights: Sequence[Tensor], keep: bool) -> object:
        """Gather one sample, with the sequence as the first dim, which the operator expects."""
        return torch.ops.symm_mem.fused_all_gather_matmul(shard[0], rights, 0, _world_name(), return_A=keep)

    def _scatter_by_operator(self, left: Tensor, right: Tensor) -> object:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(left[0], right, "sum", 0, _world_name())

    def finish(self) -> None:
        """Wait for all, and raise what kernels had to say."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self._kernel is not None:
            self._kernel.workspace.raise_if_failed()


def _world_name() -> str:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name


def _multiply_each(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [F.linear(x, weight) for weight in weights]


def _leave(boundary: SequenceBoundary, factors: Factors) -> Tensor:
    return boundary.leave_products(factors)()
