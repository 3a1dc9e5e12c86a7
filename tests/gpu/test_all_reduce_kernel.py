"""The all-reduce kernel on real devices: right numbers, the same bits everywhere and every time, and no wait for ever."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist
from kernel_stand_ins import all_reduce_ref
from peer_kernels import ITERATIONS, POISON, ROUNDOFF, WORLDS, Guarded, gathered, opened, slices
from ranks import RankError, RankPools
from torch import Tensor, nn

from parallel3d.errors import CommunicationError
from parallel3d.kernels.all_reduce import HALF_BYTES, AllReduce
from parallel3d.tensor_parallel import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def random_size(rng: random.Random, width: int) -> int:
    """Single elements, tails, both sides of where the kernel changes its way, more than one call takes."""
    most = HALF_BYTES // width
    around = rng.choice((1, 8, 4096, 64 * 1024, 128 * 1024, 256 * 1024, most)) + rng.randrange(-9, 10)
    return max(1, rng.choice((rng.randrange(1, 70), around, around, rng.randrange(1, most // 8), most + around)))


def compare(dtype: torch.dtype) -> list[str]:
    """Return the errors of one case as text."""
    kernel, groups, device = opened()
    rng, generator = random.Random(5), torch.Generator(device=device).manual_seed(groups.rank)
    wrong = []
    for number in range(60):
        size, before, behind = random_size(rng, dtype.itemsize), rng.randrange(9), rng.randrange(9)
        # Each rank's tensors begin elsewhere.
        before, behind = (before + groups.rank) % 9, (behind + 2 * groups.rank) % 9
        x = torch.randn(before + size, device=device, generator=generator).to(dtype)[before:]
        guarded = Guarded((size,), behind, dtype, device)
        out = guarded.tensor
        given, parts = x.clone(), gathered(x)
        torch.cuda.set_sync_debug_mode("error")
        kernel.sum_into(out, x)
        if number % 3 == 0:
            kernel.start(x).wait()
        elif number % 3 == 1:
            kernel.sum_into(x, x)
        torch.cuda.set_sync_debug_mode("default")
        name = f"{dtype} x {size} at +{before}, out at +{behind}"
        exact = torch.stack([part.double() for part in parts]).sum(0)
        scale = torch.stack([part.double().abs() for part in parts]).sum(0)
        bound = ROUNDOFF[dtype] * exact.abs() + 8 * 2**-24 * scale + 2**-25  # the last of fp16's smallest numbers
        if not ((out.double() - exact).abs() <= bound).all():
            wrong.append(f"{name}: not the sum")
        if not torch.equal(out, all_reduce_ref(parts)):
            wrong.append(f"{name}: not the reference's bits")
        if not all(torch.equal(out, other) for other in gathered(out)):
            wrong.append(f"{name}: ranks differ")
        if not torch.equal(x, given if number % 3 == 2 else out):
            wrong.append(f"{name}: in place, or the input changed")
        if not guarded.is_intact_around():
            wrong.append(f"{name}: written outside")
    return wrong


@pytest.mark.parametrize("dtype", list(ROUNDOFF), ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_sums_of_any_size_anywhere(gpu_pool: RankPools, num_gpus: int, world: int, dtype: torch.dtype):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, compare, dtype, timeout=180) == [[]] * world


def soak() -> tuple[int, int]:
    """(calls, elements that were wrong) of calls of all kinds, back to back, on ranks that are now and then late."""
    kernel, groups, device = opened()
    size = dist.get_world_size()
    shared, own = random.Random(11), random.Random(100 + groups.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    # Whole numbers that fp16 holds: their sums are exact.
    largest = 300_000
    pattern = (torch.arange(largest, device=device) % 13).half()
    inputs = {factor: pattern * (factor + groups.rank) for factor in range(1, 6)}
    for _ in range(ITERATIONS):
        count = shared.choice((1, 100, 4099, 32 * 1024 + 1, 150_001, largest))
        factor, way = shared.randrange(1, 6), shared.randrange(3)
        x = inputs[factor][:count]
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(1_000_000))
        if way == 0:
            out = torch.full_like(x, POISON)
            kernel.sum_into(out, x)
        elif way == 1:
            out = x.clone()
            kernel.sum_into(out, out)
        else:
            out = x.clone()
            kernel.start(out).wait()
        wrong += (out != pattern[:count] * (factor * size + size * (size - 1) // 2)).sum()
    torch.cuda.synchronize()
    kernel.workspace.raise_if_failed()
    return ITERATIONS, int(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_calls_back_to_back_on_ranks_that_are_late(gpu_pool: RankPools, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, soak, timeout=300) == [(ITERATIONS, 0)] * world


def without_one(dies: bool, two_shot: bool) -> tuple[bool, str]:
    """(the result is NaN, what the next call says) on ranks whose last one never comes."""
    kernel, groups, device = opened(limit_s=2.0)
    absent = dist.get_world_size() - 1
    if groups.rank == absent:
        if dies:
            os._exit(3)
        return True, ""
    x = torch.ones(2**20 if two_shot else 1000, device=device)
    kernel.sum_into(x, x)
    kernel.sum_into(x, x)  # finds the failure at once, or is refused where that is known already
    torch.cuda.synchronize()
    try:
        kernel.sum_into(x, x)
    except CommunicationError as error:
        if dies:
            raise
        return bool(x.isnan().all()), str(error)
    return False, "nothing was raised"


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_peer_that_does_not_come_ends_the_wait(gpu_pool: RankPools, num_gpus: int, two_shot: bool):
    world = 4 if num_gpus >= 4 else 2
    *others, _ = gpu_pool.run(world, without_one, False, two_shot, timeout=60)
    for is_nan, said in others:
        assert is_nan
        assert said.startswith(f"rank {world - 1} did not come to all_reduce")
        assert "within 2 s" in said


def test_a_peer_that_dies_ends_the_wait(gpu_pool: RankPools, num_gpus: int):
    with pytest.raises(RankError) as caught:
        gpu_pool.run(2, without_one, True, False, timeout=60)
    assert "rank 1 did not come to all_reduce" in caught.value.tracebacks[0]


def train(asked: bool) -> list[Tensor]:
    groups, device = slices(), torch.device("cuda", torch.cuda.current_device())
    if asked:
        kernel = AllReduce.open(groups, device)
        assert kernel is not None
        groups.model.use_all_reduce(kernel)
    torch.manual_seed(1)
    group = groups.model
    layers = nn.Sequential(
        ColumnParallelLinear(256, 1024, group=group), nn.GELU(), RowParallelLinear(1024, 256, group=group)
    ).to(device)
    x = torch.randn(300, 256, device=device, generator=torch.Generator(device=device).manual_seed(2)).requires_grad_()
    y = layers(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in layers.parameters() if p.grad is not None))]


def test_layers_compute_the_same_as_with_nccl(gpu_pool: RankPools, num_gpus: int):
    nccl, first, second = (gpu_pool.run(2, train, asked, timeout=120) for asked in (False, True, True))
    for a, b, c in zip(nccl, first, second, strict=True):
        assert all(torch.allclose(left, right, rtol=1e-4, atol=1e-4) for left, right in zip(a, b, strict=True))
        assert all(torch.equal(left, right) for left, right in zip(b, c, strict=True))
