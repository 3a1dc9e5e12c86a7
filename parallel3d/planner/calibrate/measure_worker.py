"""Measurements of each rank of a host: GEMMs, attention, memory, messages, collectives, and GEMMs during collectives.

All ranks measure the same at the same time, as they will in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from math import ceil
from statistics import median

import networkx as nx
import torch
from torch.nn.functional import scaled_dot_product_attention

from parallel3d.comm.clock import clock_of
from parallel3d.comm.collectives import Group, all_gather_into, all_gather_object, all_reduce, reduce_scatter_into
from parallel3d.comm.environment import get_world_size, local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.comm.transport import Transport
from parallel3d.config import load
from parallel3d.costs.profilers import LayerCost, measure_layers
from parallel3d.costs.trained_layer import Sample
from parallel3d.engine.attention import attention_context, missing
from parallel3d.optim.precision import make_precision
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.model import PlannedModel, load_model
from parallel3d.zero.policy import device_memory

# Bytes a second, more than 16 lanes of PCIe 5 can carry: two GPUs that copy faster are joined by NVLink.
_NVLINK_ABOVE = 64e9
_COPIED, _COPIES = 256 * 2**20, 4  # bytes, from GPU to GPU
_MOST_REPEATS, _BATCHES = 100_000, 5


@dataclass(frozen=True)
class Effort:
    """Shapes and sizes to measure, and how long.

    - gemms: (m, k, n) of GEMMs; the last one is also measured under sustained load.
    - attention: heads, tokens, dim of a head.
    - moved: bytes that an addition reads and writes.
    - messages: bytes of whole tensors.
    - seconds: of each; sustained: seconds of the last GEMM.
    """

    gemms: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int]
    moved: tuple[int, ...]
    messages: tuple[int, ...]
    seconds: float
    sustained: float


# Shapes of a decoder with hidden 4096 and 8192. What an addition moves either fits in no cache or is nearly nothing.
ON_GPUS = Effort(
    gemms=((512, 4096, 4096), (2048, 4096, 4096), (4096, 4096, 11008), (4096, 11008, 4096), (8192, 8192, 8192)),
    attention=(32, 4096, 128),
    moved=(3 * 2**10, 3 * 2**14, 3 * 2**28, 3 * 2**30),
    messages=tuple(2**k for k in range(14, 30, 2)),
    seconds=0.3,
    sustained=12.0,
)
ON_CPU = Effort(
    gemms=((64, 256, 256), (256, 512, 512), (512, 512, 1024)),
    attention=(4, 512, 64),
    moved=(3 * 2**10, 3 * 2**24),
    messages=tuple(2**k for k in range(12, 24, 2)),
    seconds=0.2,
    sustained=2.0,
)


@dataclass(frozen=True)
class Transfer:
    """Seconds that `ranks` took for a collective over a tensor of nbytes, or for a message, each to the next.

    - kind: all_reduce, all_gather, reduce_scatter or message.
    - scope: "island" of the ranks that NVLink joins, in all islands at once, "host" of all.
    """

    kind: str
    scope: str
    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank.

    - memory: bytes.
    - gemms: (m, k, n, seconds), in bursts; sustained: FLOP/s.
    - attention: FLOP/s by kernel.
    - moved: (bytes, seconds) of additions.
    - host: seconds to call an operator.
    - islands: of all ranks.
    - slowdown: Cluster's overlap; None for a single rank.
    """

    device: str
    memory: int
    gemms: tuple[tuple[int, int, int, float], ...]
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
        on_gpu, size, effort = self.device.type == "cuda", self.groups.world.size, self.effort
        pairs = copy_rates(size) if on_gpu and self.groups.rank == 0 else {}
        islands = islands_of(size, all_gather_object(pairs, self.groups.control)[0])
        return Measured(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
            memory=device_memory(self.device) // (1 if on_gpu else size),
            # In bursts, before the card is warm.
            gemms=tuple((*shape, self.seconds(self.gemm(*shape), effort.seconds)) for shape in effort.gemms),
            sustained=self.sustained(),
            attention=self.attention(),
            moved=tuple((nbytes, self.seconds(self.addition(nbytes), effort.seconds)) for nbytes in effort.moved),
            host=operator_seconds(self.device) if on_gpu else 0.0,
            islands=islands,
            transfers=self.transfers(islands) if size > 1 else (),
            slowdown=self.slowdown() if size > 1 else None,
        )

    def seconds(self, run: Callable[[], object], budget: float) -> float:
        """Return the seconds of a run on this rank, the median of as many as fit in the budget on every rank."""
        run()
        first = self._timed(run, 2)
        slowest = max(all_gather_object(first, self.groups.control))
        return self._timed(run, min(max(2, int(budget / max(slowest, 1e-9))), _MOST_REPEATS))

    def _timed(self, run: Callable[[], object], repeats: int) -> float:
        """Return the median of a few batches' means: something else may use the machine for a moment."""
        per_batch = ceil(repeats / _BATCHES)
        marks = [self.clock.mark()]
        for _ in range(min(repeats, _BATCHES)):
            for _ in range(per_batch):
                run()
            marks.append(self.clock.mark())
        times = self.clock.read(marks)
        return max(median(end - start for start, end in pairwise(times)) / per_batch, 1e-9)

    def gemm(self, m: int, k: int, n: int) -> Callable[[], object]:
        # Random values: GEMMs of zeros take less power, and so less time, than those of training.
        left = torch.randn(m, k, device=self.device, dtype=self.dtype)
        right = torch.randn(k, n, device=self.device, dtype=self.dtype)
        return partial(torch.mm, left, right, out=torch.empty(m, n, device=self.device, dtype=self.dtype))

    def sustained(self) -> float:
        """Return FLOP/s of the last GEMM, in the second half of its time: the card is then as warm and slow as in training."""
        m, k, n = self.effort.gemms[-1]
        run = self.gemm(m, k, n)
        self.seconds(run, self.effort.sustained / 2)
        return 2.0 * m * k * n / self.seconds(run, self.effort.sustained / 2)

    def attention(self) -> dict[str, float]:
        heads, tokens, dim = self.effort.attention
        shape = (1, heads, tokens, dim)
        query, key, value, gradient = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(4))
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        # Below the diagonal: two GEMMs forward, five backward, one of which recomputes the scores.
        flops = 7 * 2 * heads * dim * tokens * tokens / 2

        def run() -> None:
            out = scaled_dot_product_attention(query, key, value, is_causal=True)
            torch.autograd.grad(out, inputs, gradient)

        found = {}
        # A GPU that has neither of the fast kernels uses "efficient".
        for name in [name for name in ("cudnn", "flash") if missing(name, self.device) is None] or ["efficient"]:
            with attention_context([name], self.device)():
                found[name] = flops / self.seconds(run, self.effort.seconds)
        return found

    def addition(self, nbytes: int) -> Callable[[], object]:
        """Return an addition of two tensors into a third, of nbytes in all."""
        left, right, out = (self.ones(nbytes // 3) for _ in range(3))
        return partial(torch.add, left, right, out=out)

    def ones(self, nbytes: int) -> torch.Tensor:
        return torch.ones(max(1, nbytes // self.dtype.itemsize), device=self.device, dtype=self.dtype)

    def transfers(self, islands: Sequence[Sequence[int]]) -> tuple[Transfer, ...]:
        scopes = {"host": self.groups.world}
        if len(islands) > 1 and any(len(island) > 1 for island in islands):
            scopes["island"] = self.groups.build(islands)
        kinds = ("all_reduce", "all_gather", "reduce_scatter")
        cases = [(kind, scope, group) for scope, group in scopes.items() for kind in kinds]
        transport, found = Transport(self.groups), []
        for kind, scope, group in [*cases, ("message", "host", self.groups.world)]:
            for nbytes in self.effort.messages:
                run = self.message(transport, nbytes) if kind == "message" else self.collective(kind, group, nbytes)
                found.append(Transfer(kind, scope, group.size, nbytes, self.seconds(run, self.effort.seconds / 2)))
        return tuple(found)

    def collective(self, kind: str, group: Group, nbytes: int) -> Callable[[], object]:
        # Zeros, so that sums of sums stay finite.
        shard = self.ones(nbytes // group.size).zero_()
        whole = shard.repeat(group.size)
        start = {
            "all_reduce": lambda: all_reduce(whole, group),
            "all_gather": lambda: all_gather_into(whole, shard, group),
            "reduce_scatter": lambda: reduce_scatter_into(shard, whole, group),
        }[kind]
        return lambda: start().wait()

    def message(self, transport: Transport, nbytes: int) -> Callable[[], object]:
        """Return a run in which every rank sends to the next one of a ring, as stages do, and receives from the one before."""
        outgoing = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        stage, size = self.groups.coordinate("pipe"), self.groups.pipe.size

        def run() -> None:
            incoming = transport.receive([torch.empty_like(outgoing)], (stage - 1) % size)
            transport.send([outgoing], (stage + 1) % size)
            for tensor in incoming:
                tensor.wait()
            transport.finish()

        return run

    def slowdown(self) -> float:
        """Return the factor by which GEMMs are slower while all-reduces run all the time."""
        gemm, seconds = self.gemm(*self.effort.gemms[-1]), self.effort.seconds
        reduce = self.collective("all_reduce", self.groups.world, self.effort.messages[-1])
        alone = self.seconds(gemm, seconds), self.seconds(reduce, seconds)
        slowest, reduced = (max(times) for times in zip(*all_gather_object(alone, self.groups.control), strict=True))
        repeats = max(2, int(seconds / slowest))
        buffer = self.ones(self.effort.messages[-1]).zero_()
        # Twice what the GEMMs take alone, so that an all-reduce overlaps each of them.
        works = [all_reduce(buffer, self.groups.world) for _ in range(ceil(2 * repeats * slowest / reduced))]
        beside = self._timed(gemm, repeats)
        for work in works:
            work.wait()
        return max(1.0, beside / alone[0])


def measure_model(model: PlannedModel, device: torch.device) -> list[LayerCost]:
    """Measure a model's layers on a device of this host, with a micro-batch of one sample."""
    config = load({**model.config, "train_micro_batch_size_per_gpu": 1})
    return measure_layers(model.layers, Sample(*model.sample(1), model.loss_fn, make_precision(config)), config, device)


def operator_seconds(device: torch.device) -> float:
    """Return the seconds that the host needs to call an operator of a training: Python, autograd, the launch of its kernel.

    It is measured by a decoder's block, forward and both parts of the backward, with so few tokens that a GPU waits for it.
    """
    model, block = load_model("1b", seq=16), 2
    config = load({**model.config, "train_micro_batch_size_per_gpu": 1})
    costs = ModelProfile(model.layers, *model.sample(1), model.loss_fn, config).layers()[block]
    works = costs.forward, costs.input_gradient, costs.weight_gradient
    return sum(measure_model(model, device)[block]) / sum(work.operators for work in works)


def copy_rates(size: int) -> dict[tuple[int, int], float]:
    """Return bytes a second of copies between any two GPUs of this host, each pair alone."""
    rates = {}
    for a, b in combinations(range(size), 2):
        source, target = (torch.zeros(_COPIED, dtype=torch.uint8, device=f"cuda:{k}") for k in (a, b))
        target.copy_(source)
        clock = clock_of(source.device)
        torch.cuda.synchronize(a)
        torch.cuda.synchronize(b)
        with torch.cuda.device(a):
            begin = clock.mark()
            for _ in range(_COPIES):
                target.copy_(source, non_blocking=True)
            start, end = clock.read([begin, clock.mark()])
        rates[a, b] = _COPIES * _COPIED / (end - start)
    return rates


def islands_of(size: int, rates: dict[tuple[int, int], float]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that NVLink joins, maybe by way of others; each rank is in one island."""
    graph: nx.Graph[int] = nx.Graph(pair for pair, rate in rates.items() if rate > _NVLINK_ABOVE)
    graph.add_nodes_from(range(size))
    return tuple(sorted(tuple(sorted(island)) for island in nx.connected_components(graph)))
