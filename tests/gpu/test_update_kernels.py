"""Gradients reduced, shards updated and weights gathered by kernels and copies on real devices, beside NCCL and float64."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_stand_ins import reduce_scatter_ref
from ranks import RankError, RankPools
from torch import Tensor, nn

import parallel3d
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import KernelsConfig
from parallel3d.errors import CommunicationError
from parallel3d.kernels.fused_adamw import open_update_kernels
from parallel3d.kernels.reduce_scatter import HALF_BYTES, ReduceScatter
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.optimizer import ShardedOptimizer
from parallel3d.zero.policy import ZeroPolicy

pytestmark = pytest.mark.usefixtures("compiled_kernels")

WORLDS = [2, 4, 8]
WIRES = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
GUARD, POISON = 64, 77.0
ITERATIONS = 10_000
# The keys that ask for each way to update and gather.
UPDATES: dict[str, dict[str, bool]] = {
    "torch": {},
    "kernel": {"optimizer_step": True},
}


def replicas() -> tuple[ProcessGroups, torch.device]:
    groups = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [1, dist.get_world_size(), 1]))
    return groups, torch.device("cuda", torch.cuda.current_device())


def opened(limit_s: float = 60.0) -> tuple[ReduceScatter, ProcessGroups, torch.device]:
    groups, device = replicas()
    kernel = ReduceScatter.open(groups, device, limit_s)
    assert kernel is not None, "p3d doctor says why"
    return kernel, groups, device


def gathered(x: Tensor) -> list[Tensor]:
    """Every rank's, by NCCL."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def random_size(rng: random.Random, world: int) -> int:
    """Return the size of a shard: single elements, tails, more than one call processes."""
    most = HALF_BYTES // world // 2
    around = rng.choice((1, 8, 4096, 64 * 1024, 256 * 1024, most)) + rng.randrange(-9, 10)
    return max(1, rng.choice((rng.randrange(1, 70), around, around, most + around)))


def reduce(wire: torch.dtype, dtype: torch.dtype) -> list[str]:
    """Return the errors of one case as text."""
    kernel, groups, device = opened()
    world, rank = groups.data.size, groups.data.index
    rng, generator = random.Random(5), torch.Generator(device=device).manual_seed(rank)
    wrong = []
    for number in range(40):
        size, before, behind = random_size(rng, world), rng.randrange(9), rng.randrange(9)
        whole = torch.randn(before + world * size, device=device, generator=generator).to(dtype)[before:]
        memory = torch.full((size + 2 * GUARD,), POISON, device=device, dtype=dtype)
        out = memory[GUARD + behind : GUARD + behind + size]
        in_place, accumulate = number % 3 == 0, number % 4 == 1
        if in_place:
            out = whole[rank * size : (rank + 1) * size]
        elif accumulate:
            out.normal_(generator=generator)
        squares = torch.full((kernel.squares_size(size, wire),), POISON, dtype=torch.float64, device=device)
        had, parts, given = out.clone(), [whole.clone() for whole in gathered(whole)], whole.clone()
        torch.cuda.set_sync_debug_mode("error")
        if number % 2:
            kernel.start(out, whole, wire, accumulate, squares).wait()
        else:
            kernel.reduce_into(out, whole, wire, accumulate, squares)
        torch.cuda.set_sync_debug_mode("default")
        name = (
            f"{dtype} by {wire} x {size} at +{before}, out at +{behind}, in place {in_place}, accumulate {accumulate}"
        )
        mine = [part[rank * size : (rank + 1) * size] for part in parts]
        expected = (reduce_scatter_ref(mine, wire) + (had.float() if accumulate else 0)).to(dtype)
        exact = torch.stack([part.double() for part in mine]).sum(0) + (had.double() if accumulate else 0)
        scale = torch.stack([part.double().abs() for part in mine]).sum(0) + had.double().abs()
        if not torch.equal(out, expected):
            wrong.append(f"{name}: not the reference's bits")
        if not ((out.double() - exact).abs() <= (WIRES[wire] + WIRES[dtype] + 8 * 2**-24) * scale + 2**-25).all():
            wrong.append(f"{name}: not the sum")
        if not torch.isclose(squares.sum(), out.double().square().sum(), rtol=1e-12):
            wrong.append(f"{name}: not the sum of squares")
        kept = torch.ones_like(whole, dtype=torch.bool)
        kept[rank * size : (rank + 1) * size] = not in_place
        if not torch.equal(whole[kept], given[kept]):
            wrong.append(f"{name}: the input changed")
        untouched = torch.cat([memory[: GUARD + behind], memory[GUARD + behind + size :]])
        if not (untouched == POISON).all():
            wrong.append(f"{name}: written outside")
    return wrong


@pytest.mark.parametrize(
    ("wire", "dtype"),
    [(wire, torch.float32) for wire in WIRES] + [(torch.bfloat16,) * 2, (torch.float16,) * 2],
    ids=str,
)
@pytest.mark.parametrize("world", WORLDS)
def test_reductions_of_any_size_anywhere(
    gpu_pool: RankPools, num_gpus: int, world: int, wire: torch.dtype, dtype: torch.dtype
):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, reduce, wire, dtype, timeout=180) == [[]] * world


def compare_errors() -> tuple[float, float]:
    """The largest error, against float64, of sums of bf16 gradients that travel in bf16, and of NCCL's in fp32."""
    kernel, groups, device = opened()
    world, rank = groups.data.size, groups.data.index
    size = 2**20
    whole = (
        torch.randn(world * size, device=device, generator=torch.Generator(device).manual_seed(rank)).bfloat16().float()
    )
    exact = torch.stack([part.double() for part in gathered(whole)]).sum(0)[rank * size : (rank + 1) * size]
    out, by_nccl = (torch.empty(size, device=device) for _ in range(2))
    kernel.reduce_into(out, whole, torch.bfloat16, False, None)
    dist.reduce_scatter(by_nccl, list(whole.chunk(world)))
    own, nccls = (float((result.double() - exact).abs().max()) for result in (out, by_nccl))
    return own, nccls


def test_bf16_gradients_are_summed_no_worse_than_in_fp32(gpu_pool: RankPools, num_gpus: int):
    for own, by_nccl in gpu_pool.run(4 if num_gpus >= 4 else 2, compare_errors, timeout=120):
        assert own <= by_nccl


def soak() -> tuple[int, int]:
    """(calls, elements that were wrong) of calls of all kinds, back to back, on ranks that are now and then late."""
    kernel, groups, device = opened()
    world, rank = groups.data.size, groups.data.index
    shared, own = random.Random(11), random.Random(100 + rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    # Whole numbers that bf16 holds: their sums are exact.
    largest = 100_000
    pattern = torch.arange(world * largest, device=device).remainder(13).float()
    for _ in range(ITERATIONS):
        size, factor, wire = (
            shared.choice((1, 100, 4099, 32 * 1024 + 1, largest)),
            shared.randrange(1, 6),
            shared.choice(list(WIRES)),
        )
        whole = pattern[: world * size] * (factor + rank)
        expected = pattern[rank * size : (rank + 1) * size] * (factor * world + world * (world - 1) // 2)
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(1_000_000))
        out = torch.full((size,), 1.0, device=device)
        accumulate = shared.random() < 0.5
        if shared.random() < 0.5:
            kernel.reduce_into(out, whole, wire, accumulate, None)
        else:
            kernel.start(out, whole, wire, accumulate, None).wait()
        wrong += (out != expected + accumulate).sum()
    torch.cuda.synchronize()
    kernel.workspace.raise_if_failed()
    return ITERATIONS, int(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_back_to_back_on_ranks_that_are_late(gpu_pool: RankPools, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, soak, timeout=300) == [(ITERATIONS, 0)] * world


def without_one(dies: bool) -> tuple[bool, str]:
    """(the result is NaN, what the next call says) on ranks whose last one never comes."""
    kernel, groups, device = opened(limit_s=2.0)
    absent = dist.get_world_size() - 1
    if groups.rank == absent:
        if dies:
            os._exit(3)
        return True, ""
    whole, out = torch.ones((absent + 1) * 1000, device=device), torch.ones(1000, device=device)
    kernel.reduce_into(out, whole, torch.bfloat16, False, None)
    torch.cuda.synchronize()
    try:
        kernel.reduce_into(out, whole, torch.bfloat16, False, None)
    except CommunicationError as error:
        if dies:
            raise
        return bool(out.isnan().all()), str(error)
    return False, "nothing was raised"


def test_a_replica_that_does_not_come_ends_the_wait(gpu_pool: RankPools, num_gpus: int):
    world = 4 if num_gpus >= 4 else 2
    *others, _ = gpu_pool.run(world, without_one, False, timeout=60)
    for is_nan, said in others:
        assert is_nan
        assert said.startswith(f"rank {world - 1} did not come to reduce_scatter")


def test_a_replica_that_dies_ends_the_wait(gpu_pool: RankPools, num_gpus: int):
    with pytest.raises(RankError) as caught:
        gpu_pool.run(2, without_one, True, timeout=60)
    assert "rank 1 did not come to reduce_scatter" in caught.value.tracebacks[0]


class Sharded:
    """Parameters of odd sizes in bf16 with fp32 masters over all ranks, which AdamW updates, and the same in plain torch."""

    def __init__(self, way: str, stage: int, bucket_size: int, gradient_dtype: torch.dtype = torch.float32):
        self.groups, self.device = replicas()
        generator = torch.Generator().manual_seed(3)
        shapes = [(1,), (7, 5), (130, 33), (64,), (515, 129), (3, 3, 3), (2048, 64), (31,)]
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.plain = [nn.Parameter(v.to(self.device, torch.float64)) for v in values]
        self.parameters = [nn.Parameter(v.to(self.device)) for v in values]
        infos = [ParameterInfo(f"layers.{k}.weight", p, (0,)) for k, p in enumerate(self.parameters)]
        policy = ZeroPolicy(stage, bucket_size, torch.bfloat16, gradient_dtype, reduce_per_micro_batch=stage == 2)
        self.buckets: list[Bucket] = make_buckets(infos, policy, self.groups.data, self.groups.rank)
        self.reference = torch.optim.AdamW(self._grouped(self.plain), lr=0.01)
        optimizer = torch.optim.AdamW(self._grouped(self.parameters), lr=0.01, fused=True)
        config = KernelsConfig(**UPDATES[way])
        self.sharded = ShardedOptimizer(
            optimizer,
            self.buckets,
            self.parameters,
            open_kernel=lambda own: open_update_kernels(optimizer, own, self.groups, self.device, config),
        )
        self.module = nn.ParameterList(self.parameters)

    @staticmethod
    def _grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[::2], "weight_decay": 0.1},
            {"params": parameters[1::2], "lr": 0.003, "betas": (0.8, 0.95)},
        ]

    def step(self, number: int, divisor: float | None, late: bool) -> None:
        """Step on gradients that all ranks draw with the same seed."""
        generator = torch.Generator(self.device).manual_seed(number)
        untouched = {self.parameters[number % 8]} if number % 3 == 0 else set()
        gradients = {p: torch.randn(p.shape, device=self.device, generator=generator) for p in self.parameters}
        gradients = {p: gradient.to(self.buckets[0].gradient_dtype) for p, gradient in gradients.items()}
        gradients |= {p: torch.zeros_like(p) for p in untouched}
        for plain, p in zip(self.plain, self.parameters, strict=True):
            plain.grad = None if p in untouched else gradients[p].double() / (divisor or 1.0)
        self.reference.step()
        for bucket in self.buckets:
            flat = torch.zeros(bucket.numel, device=self.device, dtype=bucket.gradient_dtype)
            for k, info in enumerate(bucket.infos):
                bucket.view(flat, k).copy_(gradients[info.parameter])
            bucket.gradient_shard.copy_(flat[bucket.shard])
        if late:
            torch.cuda._sleep(2_000_000)
        scale = None if divisor is None else torch.tensor(divisor, dtype=torch.float64, device=self.device)
        self.sharded.step(untouched, scale)
        self.sharded.gather()

    def wrong(self) -> int:
        """Elements of the weights that aren't the rounded reference's, nor next to it."""
        self.sharded.wait_for_module(self.module)
        found = 0
        for plain, p in zip(self.plain, self.parameters, strict=True):
            found += int(((p.double() - plain).abs() > 2**-8 * plain.abs() + 1e-5).sum())
        return found


def update(way: str, stage: int, gradient_dtype: torch.dtype) -> tuple[list[int], list[Tensor]]:
    """(wrong elements after each step, the weights at the end)."""
    case = Sharded(way, stage, 5000, gradient_dtype)
    rng = random.Random(case.groups.rank)
    found = []
    for number in range(12):
        case.step(number, 3.0 if number % 2 else None, rng.random() < 0.3)
        if stage == 2 and way == "kernel":
            assert all(not bucket.gradient_shard.any() for bucket in case.buckets), "not cleared"
        found.append(case.wrong())
    return found, [p.detach().cpu() for p in case.parameters]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", list(UPDATES))
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_updates_are_adamws_on_every_replica(
    gpu_pool: RankPools, num_gpus: int, world: int, way: str, stage: int, gradient_dtype: torch.dtype
):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    results = gpu_pool.run(world, update, way, stage, gradient_dtype, timeout=120)
    for found, weights in results:
        assert found == [0] * 12
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][1], strict=True))


def overflow(way: str) -> list[str]:
    """Return what a skipped step has changed."""
    case = Sharded(way, 1, 5000)
    case.step(1, None, False)
    case.sharded.wait_for_module(case.module)

    def state() -> dict[str, list[Tensor]]:
        moments = [t.clone() for s in case.sharded.optimizer.state.values() for t in s.values()]
        masters = [bucket.master.clone() for bucket in case.buckets if bucket.master is not None]
        return {"state": moments, "masters": masters, "weights": [p.detach().clone() for p in case.parameters]}

    before, changed = state(), []
    for skips in (True, False):
        for bucket in case.buckets:
            bucket.gradient_shard.fill_(float("inf") if skips else 1.0)
        case.sharded.step(set(), None, torch.tensor(skips, device=case.device))
        case.sharded.gather()
        case.sharded.wait_for_module(case.module)
        same = [name for name, tensors in state().items() if all(map(torch.equal, tensors, before[name]))]
        changed += [f"skips {skips}: {same} stay"] if len(same) != 3 * skips else []
    return changed


def test_an_overflow_changes_nothing(gpu_pool: RankPools, num_gpus: int):
    assert gpu_pool.run(2, overflow, "kernel", timeout=60) == [[], []]


def many_updates(way: str) -> int:
    """Wrong elements in all of many steps, of which ranks now and then come late to gather or to read."""
    case = Sharded(way, 1, 5000)
    rng, wrong = random.Random(50 + case.groups.rank), torch.zeros((), dtype=torch.int64, device=case.device)
    weights = [bucket.weights for bucket in case.buckets]
    for number in range(ITERATIONS // 10):
        for bucket in case.buckets:
            bucket.gradient_shard.fill_(1.0 + number % 3)
        case.sharded.step(set(), None)
        case.sharded.gather()
        if rng.random() < 0.1:
            torch.cuda._sleep(rng.randrange(1_000_000))
        case.sharded.wait_for_module(case.module)
        for bucket, whole in zip(case.buckets, weights, strict=True):
            assert whole is not None
            assert bucket.master is not None
            wrong += (whole[bucket.shard] != bucket.master.bfloat16()).sum()
            # What came is what the others have: sums of whole weights are equal on all ranks.
            total = whole.double().sum()
            both = torch.stack([total, -total])
            if number % 50 == 0:
                dist.all_reduce(both, op=dist.ReduceOp.MAX)
                wrong += (both[0] != -both[1]).long()
    return int(wrong)


def test_many_updates_on_ranks_that_are_late(gpu_pool: RankPools, num_gpus: int):
    world = 4 if num_gpus >= 4 else 2
    assert gpu_pool.run(world, many_updates, "kernel", timeout=300) == [0] * world


TRAINING: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "gradient_clipping": 0.5,
    "steps_per_print": None,
}


def mean_square(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.float() - labels).square().mean()


def train(stage: int, kernels: dict[str, bool], dtypes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(losses, norms of gradients) of training on the ranks of the world as replicas."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)).to(device)
    model = parallel3d.pipe.PipelineModule(list(copy.deepcopy(net)), num_stages=1, loss_fn=mean_square)
    config = {**TRAINING, "zero_optimization": {"stage": stage}, "kernels": kernels, **dtypes}
    engine, *_ = parallel3d.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    inputs, labels = torch.randn(4, 64, generator=generator), torch.randn(4, 8, generator=generator)
    batches = iter(lambda: (inputs.to(device), labels.to(device)), None)
    losses, norms = [], []
    for _ in range(12):
        losses.append(engine.train_batch(batches).item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "dtypes", [{}, {"communication_data_type": "bf16"}, {"data_types": {"grad_accum_dtype": "bf16"}}], ids=str
)
def test_training_goes_as_with_torch_and_nccl(gpu_pool: RankPools, num_gpus: int, stage: int, dtypes: dict[str, Any]):
    plain, stepped, every = (
        gpu_pool.run(2, train, stage, dict.fromkeys(kernels, True), dtypes, timeout=120)
        for kernels in ([], ["optimizer_step"], ["optimizer_step", "reduce_scatter"])
    )
    for found in (stepped, every):
        for (losses, norms), (other_losses, other_norms) in zip(found, plain, strict=True):
            assert losses[-1] < 0.5 * losses[0]
            assert losses == pytest.approx(other_losses, rel=0.02)
            assert norms == pytest.approx(other_norms, rel=0.05)
