"""Measurements of each rank of a host: GEMMs, attention, memory, messages, collectives, and GEMMs during collectives.

All ranks measure the same at the same time, as they will in training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.clock import clock_of
from parallel3d.comm.collectives import Group, Work, all_gather_into, all_gather_object, all_reduce, reduce_scatter_into
from parallel3d.comm.environment import get_world_size, local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import TensorKind
from parallel3d.comm.transport import DistributedTransport
from parallel3d.engine.attention import attention_context, missing
from parallel3d.planner.predict.host_time import seconds_per_operator
from parallel3d.topology import ProcessTopology

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "message"]

# More than 16 lanes of PCIe 5 can carry: two GPUs that copy faster are joined by NVLink.
_NVLINK_ABOVE = 64e9
_COPIED = 256 * 2**20  # bytes, from GPU to GPU
_MOST_REPEATS, _BATCHES = 100_000, 5


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Effort(_Frozen):
    """What is measured, and how long.

    products: (m, k, n) of matrices, the last one sustained; attention: heads, tokens, dim of a head; moved: bytes that an
    addition reads and writes; messages: bytes of whole tensors; seconds: of each; sustained: of the last product.
    """

    products: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int]
    moved: tuple[int, ...]
    messages: tuple[int, ...]
    seconds: float
    sustained: float


# Shapes of a decoder with hidden 4096 and 8192. What an addition moves either fits in no cache or is nearly nothing.
ON_GPUS = Effort(
    products=((512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 11008), (4096, 11008, 4096), (8192, 8192, 8192)),
    attention=(32, 4096, 128),
    moved=(3 * 2**10, 3 * 2**14, 3 * 2**28, 3 * 2**30),
    messages=tuple(2**k for k in range(14, 30, 2)),
    seconds=0.3,
    sustained=12.0,
)
ON_CPU = Effort(
    products=((64, 256, 256), (256, 512, 512), (512, 512, 1024)),
    attention=(4, 512, 64),
    moved=(3 * 2**10, 3 * 2**24),
    messages=tuple(2**k for k in range(12, 24, 2)),
    seconds=0.2,
    sustained=2.0,
)


class Transfer(_Frozen):
    """seconds that `ranks` took for a collective over a tensor of nbytes, or for a message, each to the next.

    scope: "island" of the ranks that NVLink joins, in all islands at once, "host" of all.
    """

    kind: Kind
    scope: Literal["island", "host"]
    ranks: int
    nbytes: int
    seconds: float


class Measured(_Frozen):
    """One rank's. memory: bytes; products: (m, k, n, seconds), in bursts; sustained: FLOP/s; attention: FLOP/s by kernel.

    moved: (bytes, seconds); host: seconds to call an operator; islands: of all ranks; slowdown: Cluster's overlap, None for a
    rank alone.
    """

    device: str
    memory: int
    products: tuple[tuple[int, int, int, float], ...]
    sustained: float
    attention: dict[str, float]
    moved: tuple[tuple[int, float], ...]
    host: float
    islands: tuple[tuple[int, ...], ...]
    transfers: tuple[Transfer, ...]
    slowdown: float | None


def measure_rank(effort: Effort) -> Measured:
    """Measure as one rank of a world. Collective."""
    groups = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [get_world_size(), 1, 1]))
    return _Bench(groups, effort).measure()


class _Bench:
    def __init__(self, groups: ProcessGroups, effort: Effort):
        self.groups, self.effort, self.device = groups, effort, local_device()
        self.clock = clock_of(self.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def measure(self) -> Measured:
        on_gpu, size = self.device.type == "cuda", self.groups.world.size
        pairs = _pairs(size) if on_gpu and self.groups.rank == 0 else []
        islands = _islands(size, all_gather_object(pairs, self.groups.control)[0])
        products = self.products()  # in bursts, and so before the card is warm
        return Measured(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            memory=torch.cuda.get_device_properties(self.device).total_memory if on_gpu else _host_memory() // size,
            products=products,
            sustained=self.sustained(),
            attention=self.attention(),
            moved=tuple((nbytes, self.addition(nbytes)) for nbytes in self.effort.moved),
            host=seconds_per_operator(self.device) if on_gpu else 0.0,
            islands=islands,
            transfers=self.transfers(islands) if size > 1 else (),
            slowdown=self.slowdown() if size > 1 else None,
        )

    def seconds(self, run: Callable[[], object], budget: float) -> float:
        """What a run takes here, of so many as fit in the budget on every rank."""
        run()
        first = self._timed(run, 2)
        slowest = max(all_gather_object(first, self.groups.control))
        return self._timed(run, min(max(2, int(budget / max(slowest, 1e-9))), _MOST_REPEATS))

    def _timed(self, run: Callable[[], object], repeats: int) -> float:
        """The median of a few batches' means: something else may use the machine for a moment."""
        per_batch = ceil(repeats / _BATCHES)
        marks = [self.clock.mark()]
        for _ in range(min(repeats, _BATCHES)):
            for _ in range(per_batch):
                run()
            marks.append(self.clock.mark())
        times = self.clock.read(marks)
        return max(median(end - start for start, end in pairwise(times)) / per_batch, 1e-9)

    def product(self, m: int, k: int, n: int) -> Callable[[], object]:
        # Random, since products of zeros take less power, and so less time, than those of training.
        left = torch.randn(m, k, device=self.device, dtype=self.dtype)
        right = torch.randn(k, n, device=self.device, dtype=self.dtype)
        out = torch.empty(m, n, device=self.device, dtype=self.dtype)
        return lambda: torch.mm(left, right, out=out)

    def products(self) -> tuple[tuple[int, int, int, float], ...]:
        found = []
        for m, k, n in self.effort.products:
            found.append((m, k, n, self.seconds(self.product(m, k, n), self.effort.seconds)))
        return tuple(found)

    def sustained(self) -> float:
        """FLOP/s of the last product, in the second half of its time: the card is then as warm and slow as in training."""
        m, k, n = self.effort.products[-1]
        run = self.product(m, k, n)
        self.seconds(run, self.effort.sustained / 2)
        return 2.0 * m * k * n / self.seconds(run, self.effort.sustained / 2)

    def attention(self) -> dict[str, float]:
        heads, tokens, dim = self.effort.attention
        shape = (1, heads, tokens, dim)
        query, key, value, gradient = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        # Below the diagonal: two products forward, five backward, one of which recomputes the scores.
        flops = 7 * 2 * heads * dim * tokens * tokens / 2

        def run() -> None:
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, inputs, gradient)

        found = {}
        for name in ("cudnn", "flash"):
            if missing(name, self.device) is None:
                with attention_context([name], self.device)():
                    found[name] = flops / self.seconds(run, self.effort.seconds)
        return found

    def addition(self, nbytes: int) -> float:
        """Seconds to add two tensors into a third, nbytes in all."""
        count = max(1, nbytes // 3 // self.dtype.itemsize)
        left, right, out = (torch.ones(count, device=self.device, dtype=self.dtype) for _ in range(3))
        return self.seconds(lambda: torch.add(left, right, out=out), self.effort.seconds)

    def transfers(self, islands: Sequence[Sequence[int]]) -> tuple[Transfer, ...]:
        everyone = self.groups.world
        scopes: list[tuple[Literal["island", "host"], Group]] = [("host", everyone)]
        if len(islands) > 1 and any(len(island) > 1 for island in islands):
            scopes.append(("island", self.groups.build(islands)))
        found: list[Transfer] = []
        kinds: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
        for scope, group in scopes:
            for kind in kinds:
                for nbytes in self.effort.messages:
                    seconds = self.seconds(self.collective(kind, group, nbytes), self.effort.seconds / 2)
                    found.append(Transfer(kind=kind, scope=scope, ranks=group.size, nbytes=nbytes, seconds=seconds))
        transport = DistributedTransport(self.groups)
        for nbytes in self.effort.messages:
            seconds = self.seconds(self.message(transport, nbytes), self.effort.seconds / 2)
            found.append(Transfer(kind="message", scope="host", ranks=everyone.size, nbytes=nbytes, seconds=seconds))
        return tuple(found)

    def collective(self, kind: Kind, group: Group, nbytes: int) -> Callable[[], object]:
        count = max(1, nbytes // self.dtype.itemsize // group.size)
        # Zeros, so that sums of sums stay finite.
        whole = torch.zeros(count * group.size, device=self.device, dtype=self.dtype)
        shard = torch.zeros(count, device=self.device, dtype=self.dtype)
        start: dict[str, Callable[[], Work]] = {
            "all_reduce": lambda: all_reduce(whole, group),
            "all_gather": lambda: all_gather_into(whole, shard, group),
            "reduce_scatter": lambda: reduce_scatter_into(shard, whole, group),
        }
        return lambda: start[kind]().wait()

    def message(self, transport: DistributedTransport, nbytes: int) -> Callable[[], object]:
        """Every rank sends to the next one of a ring, as stages do, and receives from the one before."""
        outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        kind = TensorKind((nbytes,), torch.uint8, self.device)
        stage, size = self.groups.coordinate("pipe"), self.groups.pipe.size

        def run() -> None:
            incoming = transport.receive([kind], (stage - 1) % size)
            transport.send([outgoing], (stage + 1) % size)
            for tensor in incoming:
                tensor.wait()
            transport.finish()

        return run

    def slowdown(self) -> float:
        """By what factor products are slower while all-reduces run all the time."""
        group, control = self.groups.world, self.groups.control
        run, nbytes = self.product(*self.effort.products[-1]), self.effort.messages[-1]
        buffer = torch.zeros(max(1, nbytes // self.dtype.itemsize), device=self.device, dtype=self.dtype)
        here = (
            self.seconds(run, self.effort.seconds),
            self.seconds(lambda: all_reduce(buffer, group).wait(), self.effort.seconds),
        )
        alone, reduced = (max(times) for times in zip(*all_gather_object(here, control), strict=True))
        repeats = max(2, int(self.effort.seconds / alone))
        # Twice what the products take alone, so that none is left without a neighbour.
        works = [all_reduce(buffer, group) for _ in range(ceil(2 * repeats * alone / reduced))]
        beside = self._timed(run, repeats)
        for work in works:
            work.wait()
        return max(1.0, beside / here[0])


def _pairs(size: int) -> list[tuple[int, int, float]]:
    """Bytes a second of copies between any two GPUs of this host, each pair alone."""
    found = []
    for a in range(size):
        for b in range(a + 1, size):
            source = torch.zeros(_COPIED, dtype=torch.uint8, device=f"cuda:{a}")
            target = torch.zeros(_COPIED, dtype=torch.uint8, device=f"cuda:{b}")
            target.copy_(source)
            found.append((a, b, _copied_per_second(source, target)))
    return found


def _copied_per_second(source: Tensor, target: Tensor, repeats: int = 4) -> float:
    clock = clock_of(source.device)
    for device in (source.device, target.device):
        torch.cuda.synchronize(device)
    with torch.cuda.device(source.device):
        begin = clock.mark()
        for _ in range(repeats):
            target.copy_(source, non_blocking=True)
        start, end = clock.read([begin, clock.mark()])
    return repeats * source.nbytes / (end - start)


def _islands(size: int, pairs: Sequence[tuple[int, int, float]]) -> tuple[tuple[int, ...], ...]:
    """Ranks that NVLink joins, maybe by way of others; each rank is in one."""
    island: dict[int, tuple[int, ...]] = {rank: (rank,) for rank in range(size)}
    for a, b, speed in pairs:
        if speed > _NVLINK_ABOVE and island[a] != island[b]:
            joined = tuple(sorted(island[a] + island[b]))
            island.update(dict.fromkeys(joined, joined))
    return tuple(sorted(set(island.values())))


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
