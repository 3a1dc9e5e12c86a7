"""Matrices in fp8 with dynamic scales (arXiv:2209.05433), and their products: by torch._scaled_mm on CUDA, elsewhere emulated.

Every product is a @ b^T of two matrices [rows, k] that are contiguous along k, as the tensor cores need them. A scale belongs
to a whole matrix (tensorwise) or to each row (rowwise, so that it can be factored out of the sum over k): it makes the largest
magnitude there the largest number of the dtype. Numbers that are not finite make whole products, or their rows, NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.collectives import Group, all_reduce_max
from parallel3d.fake_device import on_cuda
from parallel3d.kernels.fp8_accumulation import accumulate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Both dims of a product's right matrix must be multiples of it on CUDA.
MULTIPLE = 16
# Smallest magnitude that is made the largest number, torchao's.
_LEAST = 1e-12


@dataclass(frozen=True, eq=False)
class Scaled:
    """Matrix in fp8. values: [rows, k], contiguous, to be multiplied by inverse_scale, fp32: [] or, rowwise, [rows, 1]."""

    values: Tensor
    inverse_scale: Tensor


def cast(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    sharding: tuple[Group, int] | None = None,
    straight: bool = True,
    transposed: bool = True,
) -> tuple[Scaled | None, Scaled | None]:
    """Return x [rows, k] and x^T in fp8, each if asked for: None in place of the other.

    sharding: (group, dim): the group's ranks hold parts of the whole matrix along a dim, and use the whole's scales.
    """
    group, sharded = sharding or (None, None)
    if rowwise:
        ways = ((x, 1, straight), (x.t(), 0, transposed))
        one, other = (
            _rounded(m, dtype, _scale(m, dtype, rowwise, group if sharded == along else None)) if wanted else None
            for m, along, wanted in ways
        )
        return one, other
    scale = _scale(x, dtype, rowwise, group)
    if not straight:
        return None, _rounded(x.t(), dtype, scale) if transposed else None
    one = _rounded(x, dtype, scale)
    return one, Scaled(one.values.t().contiguous(), one.inverse_scale) if transposed else None


def _scale(x: Tensor, dtype: torch.dtype, rowwise: bool, group: Group | None) -> Tensor:
    """Return the scale of a matrix, [] or [rows, 1]. group: of the ranks whose maxima count too."""
    shape = (len(x), 1) if rowwise else ()
    amax = (x.abs().amax(1, keepdim=True) if rowwise else x.abs().amax()) if x.numel() else x.new_zeros(shape)
    amax = amax.float()
    if group is not None:
        all_reduce_max(amax, group).wait()
    return torch.finfo(dtype).max / amax.clamp(min=_LEAST)


def _rounded(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Scaled:
    return Scaled((x.float() * scale).to(dtype).contiguous(), scale.reciprocal())


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Return a @ b^T, [rows of a, rows of b], summed and scaled in fp32, then rounded to `dtype`."""
    return (multiply_on_gpu if on_cuda(a.values) else multiply_ref)(a, b, dtype)


def multiply_ref(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Multiply as `multiply`, by a GEMM in fp32."""
    product = a.values.float() @ b.values.float().t()
    return (product * (a.inverse_scale * b.inverse_scale.t())).to(dtype)


def multiply_on_gpu(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Multiply as `multiply`, by tensor cores that sum with fewer bits (use_fast_accum). b has a multiple of 16 rows.

    Rowwise products are rounded to bf16 first: all versions of that kernel have only this output.
    """
    left, right = _padded(a.values), _padded(b.values)
    in_fp32 = not a.inverse_scale.dim() and dtype in (torch.float32, torch.float64)
    product: Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=a.inverse_scale,
        scale_b=b.inverse_scale.t(),
        out_dtype=torch.float32 if in_fp32 else torch.bfloat16,
        use_fast_accum=True,
    )
    return product.to(dtype)


def _padded(values: Tensor) -> Tensor:
    """Return a matrix in fp8 with zeros after its rows, whose length the tensor cores need to be a multiple of 16."""
    missing = -values.shape[1] % MULTIPLE
    # Padding by nothing would copy.
    return F.pad(values.view(torch.uint8), (0, missing)).view(values.dtype) if missing else values


def multiply_into(a: Scaled, b: Scaled, out: Tensor, adds: bool, factor: float) -> bool:
    """out += factor * a @ b^T if `adds`, else out = that, by a GEMM that adds itself. Return False where there is none.

    There is one for matrices on CUDA with one scale each, whose dims 16 divides, and `out` in fp32.
    """
    if not out.is_cuda or out.dtype != torch.float32 or not out.is_contiguous() or a.inverse_scale.dim():
        return False
    left, right = _padded(a.values), _padded(b.values)
    return accumulate(left, a.inverse_scale, right, b.inverse_scale, out, adds, factor)
