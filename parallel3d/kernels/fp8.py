"""Matrices in fp8 with dynamic scales (arXiv:2209.05433), and their products: by torch._scaled_mm on CUDA, elsewhere emulated.

Every product is a @ b^T of two matrices [rows, k] that are contiguous along k, as the tensor cores need them. A scale belongs
to a whole matrix (tensorwise) or to each row (rowwise, so that it can be factored out of the sum over k): it makes the largest
magnitude there the largest number of the dtype. Numbers that are not finite make whole products, or their rows, NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.collectives import Group, all_reduce_max
from parallel3d.fake_device import has_memory, on_cuda
from parallel3d.kernels.fp8_accumulation import accumulate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# On CUDA both dims of a product's right matrix must be multiples of this.
MULTIPLE = 16
# A smaller largest magnitude counts as this one in a scale, as in torchao.
_LEAST = 1e-12
_BLOCK = 128  # rows and columns of a tile of round_on_gpu


@dataclass(frozen=True, eq=False)
class Scaled:
    """Matrix in fp8. values: [rows, k], contiguous, to be multiplied by inverse_scale, fp32: [] or, rowwise, [rows, 1]."""

    values: Tensor
    inverse_scale: Tensor


# A matrix and its transpose, None where it was not asked for.
Casts = tuple[Scaled | None, Scaled | None]


def cast(
    x: Tensor,
    dtype: torch.dtype,
    rowwise: bool,
    sharding: tuple[Group, int] | None = None,
    straight: bool = True,
    transposed: bool = True,
) -> Casts:
    """Return x [rows, k] and x^T in fp8, each if asked for.

    sharding: (group, dim): the group's ranks hold parts of the whole matrix along a dim, and use the whole's scales.
    """
    group, sharded = sharding or (None, None)
    scale = other = None
    if not rowwise:
        scale = other = _scale(x, dtype, rowwise, group)
    elif straight:
        scale = _scale(x, dtype, rowwise, group if sharded == 1 else None)
    if rowwise and transposed:
        other = _scale(x.t(), dtype, rowwise, group if sharded == 0 else None)
    rounding = round_on_gpu if _has_kernel(x) else round_ref
    return rounding(x, dtype, scale if straight else None, other if transposed else None)


def _scale(x: Tensor, dtype: torch.dtype, rowwise: bool, group: Group | None) -> Tensor:
    """Return the scale of a matrix, [] or [rows, 1]. group: ranks over whose parts the maximum is taken; None for x alone."""
    shape = (len(x), 1) if rowwise else ()
    # One pass, where abs and amax are two.
    peak = partial(torch.linalg.vector_norm, x, float("inf"))
    amax = (peak(dim=1, keepdim=True) if rowwise else peak()) if x.numel() else x.new_zeros(shape)
    amax = amax.float()
    if group is not None:
        all_reduce_max(amax, group).wait()
    return scale_of(amax, dtype)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales of matrices with these largest magnitudes, in fp32."""
    return torch.finfo(dtype).max / amax.clamp(min=_LEAST)


def largest_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude of each of these tensors, [parts] in fp32; of an empty one 0."""
    some = [part if part.numel() else part.new_zeros(1) for part in parts]
    return torch.stack(torch._foreach_norm(some, float("inf"))).float()


def round_ref(x: Tensor, dtype: torch.dtype, scale: Tensor | None, other: Tensor | None) -> Casts:
    """Return x * scale and x^T * other in fp8, None where the scale is. scale: [] or [rows, 1]; other: that or [columns, 1]."""
    one = None if scale is None else _rounded(x, dtype, scale)
    if one is not None and other is not None and not other.dim():
        return one, Scaled(one.values.t().contiguous(), one.inverse_scale)
    return one, None if other is None else _rounded(x.t(), dtype, other)


def _rounded(x: Tensor, dtype: torch.dtype, scale: Tensor) -> Scaled:
    return Scaled((x.float() * scale).to(dtype).contiguous(), scale.reciprocal())


def _has_kernel(x: Tensor) -> bool:
    """Return whether x is on CUDA and operators are not traced. Compiled graphs and traces use the operators of round_ref."""
    seen = torch.compiler.is_compiling() or not has_memory(x) or torch._C._len_torch_dispatch_stack()
    return x.is_cuda and not seen and x.dtype in (torch.bfloat16, torch.float32) and x.numel() > 0


def round_on_gpu(x: Tensor, dtype: torch.dtype, scale: Tensor | None, other: Tensor | None) -> Casts:
    """Round as `round_ref`, reading x once: the chain of operators moves three times the bytes."""
    rows, columns = x.shape
    one = None if scale is None else Scaled(x.new_empty(rows, columns, dtype=dtype), scale.reciprocal())
    turned = None if other is None else Scaled(x.new_empty(columns, rows, dtype=dtype), other.reciprocal())
    _round_to(x, scale, other, *(None if scaled is None else scaled.values for scaled in (one, turned)))
    return one, turned


def _round_to(x: Tensor, scale: Tensor | None, other: Tensor | None, out: Tensor | None, out_t: Tensor | None) -> None:
    from parallel3d.kernels.fp8_triton import round_both  # here: PyTorch for the CPU has no Triton

    rows, columns = x.shape
    given = scale if scale is not None else other
    if given is not None:
        grid, step = (-(-rows // _BLOCK), -(-columns // _BLOCK)), int(given.dim() > 0)
        round_both[grid](x.contiguous(), scale, other, out, out_t, rows, columns, STEP=step, BLOCK=_BLOCK, num_warps=8)


def round_into(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """out = x * scale as `cast` rounds a matrix that x is a part of. out: in fp8, x: both flat, scale: []."""
    if _has_kernel(x):
        shape = -1, gcd(x.numel(), _BLOCK)
        _round_to(x.view(shape), scale, None, out.view(shape), None)
    else:
        out.copy_(_rounded(x, out.dtype, scale).values)


def transpose(x: Scaled) -> Scaled:
    """Return the transpose of a matrix with one scale."""
    if not x.values.is_cuda:
        return Scaled(x.values.t().contiguous(), x.inverse_scale)
    # torch's copy would read bytes far from each other one by one.
    turned = x.values.new_empty(x.values.shape[::-1])
    _round_to(x.values, None, x.values.new_ones((), dtype=torch.float32), None, turned)
    return Scaled(turned, x.inverse_scale)


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
    """out += factor * a @ b^T if `adds`, else out = factor * a @ b^T, in one GEMM. Return False if no GEMM can do it.

    One can for matrices on CUDA with one scale each, whose dims 16 divides, and `out` in fp32.
    """
    if not on_cuda(out) or out.dtype != torch.float32 or not out.is_contiguous() or a.inverse_scale.dim():
        return False
    left, right = _padded(a.values), _padded(b.values)
    if not has_memory(out):  # a fake tensor: run an equal product, so that its work is counted
        torch._scaled_mm(left, right.t(), a.inverse_scale, b.inverse_scale, out_dtype=torch.float32, out=out)
        return True
    return accumulate(left, a.inverse_scale, right, b.inverse_scale, out, adds, factor)
