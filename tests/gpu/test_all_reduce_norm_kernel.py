"""The all-reduce with residual and norm on real devices: right numbers, the same bits everywhere, and no wait for ever."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peer_kernels import ITERATIONS, ROUNDOFF, WORLDS, Guarded, gathered, opened_norm
from ranks import RankPool
from torch import Tensor

from parallel3d.errors import CommunicationError
from parallel3d.kernels.all_reduce import MOST_BYTES, all_reduce_ref
from parallel3d.kernels.all_reduce_norm import LONGEST, Normed, empty_normed
from parallel3d.models import DecoderConfig
from parallel3d.models.blocks import Block
from parallel3d.models.tables import Tables
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import regions

pytestmark = pytest.mark.usefixtures("compiled_kernels")

EPS = 1e-5
CASES = 60


def random_shape(rng: random.Random, width: int) -> tuple[int, int]:
    """Rows and columns: single numbers, tails, what decoders have, both sides of where the kernel changes its way, more rows
    than one call takes."""
    columns = rng.choice((rng.randrange(1, 70), 1024, 4096, 8192, LONGEST, rng.randrange(1, LONGEST), 1023, 4099))
    nbytes = rng.choice((1, 40_000, 256 * 1024, 512 * 1024, 2**21, 2**23, rng.randrange(1, MOST_BYTES)))
    rows = nbytes // (columns * width) + rng.randrange(1, 4)
    return min(rows, MOST_BYTES // (columns * width)), columns


def differences(out: Normed, parts: list[Tensor], residual: Tensor, weight: Tensor) -> list[str]:
    """What is wrong, by the reference's bits and by float64."""
    dtype, wrong = residual.dtype, []
    exact = torch.stack([part.double() for part in parts]).sum(0)
    size = torch.stack([part.double().abs() for part in parts]).sum(0)
    # Rounded as a sum, and with the residual; the last of fp16's smallest numbers.
    bound = ROUNDOFF[dtype] * (exact.abs() + (exact + residual.double()).abs()) * 1.01 + 8 * 2**-24 * size + 2**-24
    if not ((out.hidden.double() - exact - residual.double()).abs() <= bound).all():
        wrong.append("not the sum and the residual")
    if not torch.equal(out.hidden, residual + all_reduce_ref(parts)):
        wrong.append("not the reference's bits")
    # A thread adds at most 32 squares, then a tree of 5 and at most 16 of those are added; the root halves errors.
    scale = (out.hidden.double().square().mean(-1) + EPS) ** -0.5
    if not ((out.scale.double() / scale - 1).abs() <= 30 * 2**-24).all():
        wrong.append(f"scale is off by {float((out.scale.double() / scale - 1).abs().max())}")
    if not torch.equal(out.normed, (out.hidden.float() * out.scale[:, None] * weight.float()).to(dtype)):
        wrong.append("not the norm by that scale")
    return wrong


def compare(dtype: torch.dtype) -> list[str]:
    """What is wrong."""
    kernel, _, groups, device = opened_norm()
    rng = random.Random(5)
    own, common = (torch.Generator(device=device).manual_seed(seed) for seed in (100 + groups.rank, 7))
    wrong = []
    for number in range(CASES):
        rows, columns = random_shape(rng, dtype.itemsize)
        # Each rank's tensors begin elsewhere; now and then at whole vectors, on all ranks or on some.
        aligned = number % 4 == 0 or (number % 4 == 1 and groups.rank == 0)
        offsets = [0 if aligned else (rng.randrange(9) + groups.rank) % 9 for _ in range(6)]
        rng.seed(number)  # ranks have drawn unlike often
        shapes = ((rows, columns), (rows, columns), (columns,))
        guarded = [Guarded(shape, offset, dtype, device) for shape, offset in zip(shapes, offsets, strict=False)]
        for given, generator in zip(guarded, (own, common, common), strict=True):
            given.tensor.copy_(torch.randn(given.tensor.shape, device=device, generator=generator))
        x, residual, weight = (given.tensor for given in guarded)
        kept, parts = [t.clone() for t in (x, residual, weight)], gathered(x)
        results = [
            Guarded(shape, offset, dtype, device) for shape, offset in zip(shapes[:2], offsets[3:], strict=False)
        ]
        results.append(Guarded((rows,), offsets[5], torch.float32, device))
        out, again = Normed(*(result.tensor for result in results)), empty_normed(x)
        torch.cuda.set_sync_debug_mode("error")
        kernel.norm_into(out, x, residual, weight, EPS)
        if number % 2:
            kernel.start(again, x, residual, weight, EPS, hidden=number % 4 == 1).wait()
        else:
            torch.ops.parallel3d.all_reduce_rms_norm(x, residual, weight, EPS, kernel.number, *again)
        torch.cuda.set_sync_debug_mode("default")
        found = differences(out, parts, residual, weight)
        if not all(torch.equal(a, b) for a, b in zip(out, again, strict=True)):
            found.append("another time other bits")
        if not all(torch.equal(result, other) for result in out for other in gathered(result)):
            found.append("ranks differ")
        if not all(torch.equal(a, b) for a, b in zip((x, residual, weight), kept, strict=True)):
            found.append("what is read was changed")
        if not all(tensor.is_intact_around() for tensor in (*guarded, *results)):
            found.append("written outside")
        wrong += [f"{dtype} x {rows} x {columns} at {offsets}: {what}" for what in found]
    return wrong


@pytest.mark.parametrize("dtype", list(ROUNDOFF), ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_of_any_size_anywhere(gpu_pool: RankPool, num_gpus: int, world: int, dtype: torch.dtype):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, compare, dtype, timeout=240) == [[]] * world


SHAPES = ((1, 100), (3, 4099), (64, 1024), (37, 4096), (75, 4096), (1, LONGEST), (300, 1001))


def soak() -> tuple[int, int]:
    """(calls, numbers that were wrong) of calls of all kinds, back to back, on ranks that are now and then late.

    Sums by the other kernel go between, through the same staging.
    """
    kernel, sums, groups, device = opened_norm()
    world = dist.get_world_size()
    shared, own = random.Random(11), random.Random(100 + groups.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    # Whole numbers that fp16 holds: their sums are exact.
    pattern = (torch.arange(max(rows * columns for rows, columns in SHAPES), device=device) % 13).half()
    inputs = {factor: pattern * (factor + groups.rank) for factor in range(1, 6)}
    weight = torch.linspace(0.5, 1.5, LONGEST, device=device).half()
    first: dict[tuple[tuple[int, int], int], Tensor] = {}
    for _ in range(ITERATIONS):
        shape, factor, way = shared.choice(SHAPES), shared.randrange(1, 6), shared.randrange(3)
        size = shape[0] * shape[1]
        x, residual = inputs[factor][:size].view(shape), pattern[:size].view(shape)
        total = pattern[:size].view(shape) * (factor * world + world * (world - 1) // 2)
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(1_000_000))
        if way == 0:
            out = torch.empty_like(x)
            sums.sum_into(out, x)
            wrong += (out != total).sum()
            continue
        results = empty_normed(x)
        if way == 1:
            kernel.norm_into(results, x, residual, weight[: shape[1]], EPS)
        else:
            kernel.start(results, x, residual, weight[: shape[1]], EPS, hidden=False).wait()
        hidden, normed, scale = results
        wrong += (hidden != total + residual).sum()
        wrong += (normed != (hidden.float() * scale[:, None] * weight[: shape[1]].float()).half()).sum()
        wrong += (scale != first.setdefault((shape, factor), scale)).sum()
    for (_, factor), scale in sorted(first.items()):
        assert all(torch.equal(scale, other) for other in gathered(scale)), factor
    torch.cuda.synchronize()
    kernel.calls.raise_if_failed()
    return ITERATIONS, int(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_calls_back_to_back_on_ranks_that_are_late(gpu_pool: RankPool, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, soak, timeout=300) == [(ITERATIONS, 0)] * world


def without_one(two_shot: bool) -> tuple[bool, str]:
    """(all results are NaN, what the next call says) on ranks whose last one never comes."""
    kernel, _, groups, device = opened_norm(limit_s=2.0)
    if groups.rank == dist.get_world_size() - 1:
        return True, ""
    x = torch.ones(1000 if two_shot else 3, 1024, device=device)
    out = empty_normed(x)
    kernel.norm_into(out, x, x, x[0], EPS)
    torch.cuda.synchronize()
    try:
        kernel.norm_into(out, x, x, x[0], EPS)
    except CommunicationError as error:
        return all(bool(result.isnan().all()) for result in out), str(error)
    return False, "nothing was raised"


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_peer_that_does_not_come_ends_the_wait(gpu_pool: RankPool, num_gpus: int, two_shot: bool):
    world = 4 if num_gpus >= 4 else 2
    *others, _ = gpu_pool.run(world, without_one, two_shot, timeout=60)
    for is_nan, said in others:
        assert is_nan
        assert said.startswith(f"rank {world - 1} did not come to all_reduce")


def train(fused: bool, halves: bool) -> list[Tensor]:
    """The output of a block in bf16 and all gradients."""
    _, _, groups, device = opened_norm()
    if not fused:
        groups.model.kernels.all_reduce_norm = None
    config = DecoderConfig(vocab_size=8, hidden_size=1024, ffn_size=2048, num_layers=1, num_heads=8, init_std=0.05)
    only_slices: Any = SimpleNamespace(model=groups.model)
    torch.manual_seed(1)
    block = Block(config, 0, Tables(config), context=BuildContext(only_slices, device)).to(device, torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(2)
    x = torch.randn(2, 333, 1024, device=device, generator=generator).bfloat16().requires_grad_()
    with mock.patch.object(regions, "HALVES_FROM", 0 if halves else 2**40):
        y = block(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return [t.detach().float().cpu() for t in (y, x.grad, *(p.grad for p in block.parameters() if p.grad is not None))]


@pytest.mark.parametrize("halves", [False, True])
def test_a_block_computes_what_it_does_by_one_kernel_after_the_other(gpu_pool: RankPool, num_gpus: int, halves: bool):
    plain, first, second = (gpu_pool.run(2, train, fused, halves, timeout=120) for fused in (False, True, True))
    for a, b, c in zip(plain, first, second, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(b, c, strict=True))
        for left, right in zip(a, b, strict=True):
            assert (left - right).norm() <= 2e-2 * left.norm()
    (y, *_), (other, *_) = first
    assert torch.equal(y, other), "on both ranks"
