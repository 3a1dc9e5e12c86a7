"""Products in fp8 by tensor cores, against those that the CPU emulates."""

from __future__ import annotations

import pytest
import torch
from reference import distance

from parallel3d.kernels.fp8 import (
    E4M3,
    E5M2,
    Scaled,
    cast,
    largest_of,
    multiply,
    multiply_into,
    multiply_ref,
    round_into,
    round_on_gpu,
    round_ref,
    scale_of,
    transpose,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs tensor cores for fp8"
)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 250, 4096])
def test_all_products_of_a_layer(rowwise: bool, dtype: torch.dtype, tokens: int):
    """Casts are the CPU's to the bit. use_fast_accum sums with some 14 bits; results in bf16 have 8."""
    x, weight, gradient = torch.randn(tokens, 512), torch.randn(1536, 512) * 0.02, torch.randn(tokens, 1536) * 1e-5
    results = []
    for device in ("cpu", "cuda"):
        x_casts, weight_casts = (cast(t.to(device, torch.bfloat16), E4M3, rowwise) for t in (x, weight))
        casts = x_casts, weight_casts, cast(gradient.to(device, torch.bfloat16), E5M2, rowwise)
        results.append(casts)
    for wanted, own in zip(*results, strict=True):
        for got, right in zip(own, wanted, strict=True):
            assert torch.equal(got.values.float(), right.values.cuda().float())
            assert torch.equal(got.inverse_scale, right.inverse_scale.cuda())
    (rows, columns), (straight, transposed), (g, g_columns) = results[1]
    for a, b in ((rows, straight), (g, transposed), (g_columns, columns)):
        assert distance(multiply(a, b, dtype), multiply_ref(a, b, dtype)) < 4e-3


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(1, 16), (250, 400), (2560, 6912)])
@pytest.mark.parametrize("rowwise", [False, True])
def test_casts_in_one_pass_are_those_of_the_operators(dtype: torch.dtype, shape: tuple[int, int], rowwise: bool):
    """To the bit: of a matrix that is not contiguous, of subnormal results, of what is not finite."""
    rows, columns = shape
    x = torch.randn(columns, rows, device="cuda", dtype=torch.bfloat16).t() ** 9
    x = torch.where(x.abs() < torch.finfo(dtype).max / 8, x, x.sign())
    x[0, 3] = float("nan")
    scales = [torch.rand(n, 1, device="cuda") * 8 if rowwise else torch.full((), 3.0, device="cuda") for n in shape]
    pairs = []
    for scale, other in (scales, (scales[0], None), (None, scales[1])):
        pairs += zip(round_on_gpu(x, dtype, scale, other), round_ref(x, dtype, scale, other), strict=True)
    x[0, 2:4] = torch.tensor([float("-inf"), 1.0])
    pairs += zip(cast(x, dtype, rowwise), cast(x.cpu(), dtype, rowwise), strict=True)
    for got, wanted in pairs:
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            own, right = (scaled.values.cpu().float().nan_to_num(7.0) for scaled in (got, wanted))
            assert torch.equal(own, right)
            assert torch.equal(got.inverse_scale.cpu(), wanted.inverse_scale.cpu())


@pytest.mark.parametrize("cut", [32, 4096 + 96, 250 * 400 - 32])
def test_parts_of_a_weight_are_rounded_as_the_whole(cut: int):
    """And transposed later, to the bit. cut: where the shard of one rank ends."""
    weight = torch.randn(250, 400, device="cuda", dtype=torch.bfloat16) ** 5
    shards = weight.view(-1).split([cut, weight.numel() - cut])
    amax = largest_of([*shards, weight.new_empty(0)])
    assert torch.equal(amax[:2].max(), weight.abs().max().float())
    assert amax[2] == 0
    scale, values = scale_of(amax.max(), E4M3), torch.empty_like(weight, dtype=E4M3)
    for out, shard in zip(values.view(-1).split([cut, weight.numel() - cut]), shards, strict=True):
        round_into(out, shard, scale)
    straight, transposed = cast(weight, E4M3, rowwise=False)
    for got, wanted in zip(
        (Scaled(values, scale), transpose(Scaled(values, scale))), (straight, transposed), strict=True
    ):
        assert torch.equal(got.values.view(torch.uint8), wanted.values.view(torch.uint8))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("tokens", "offset"), [(250, 0), (4096, 4)])
def test_gradients_are_added_in_fp32_by_the_product(adds: bool, tokens: int, offset: int):
    """offset: of the accumulator in a flat buffer, so that it is aligned to 16 bytes alone."""
    x, gradient = torch.randn(tokens, 512, device="cuda"), torch.randn(tokens, 1536, device="cuda") * 1e-5
    _, columns = cast(x.bfloat16(), E4M3, rowwise=False)
    _, g_columns = cast(gradient.bfloat16(), E5M2, rowwise=False)
    before = torch.randn(1536, 512, device="cuda") * 1e-3
    flat = torch.full((before.numel() + offset,), float("nan"), device="cuda")
    out = flat[offset:].view_as(before)
    if adds:
        out.copy_(before)
    assert multiply_into(g_columns, columns, out, adds, 0.5)
    product = 0.5 * multiply_ref(g_columns, columns, torch.float64)
    assert distance(out, before + product if adds else product) < 4e-3
