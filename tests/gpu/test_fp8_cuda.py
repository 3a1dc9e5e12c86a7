"""Products in fp8 by tensor cores, against those that the CPU emulates."""

from __future__ import annotations

import pytest
import torch
from reference import distance

from parallel3d.kernels.fp8 import E4M3, E5M2, cast, multiply, multiply_ref


@pytest.mark.skipif(
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
