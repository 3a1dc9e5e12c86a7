"""Gradients of parameters that are computed, or still to be computed, when the sink takes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from parallel3d.fake_device import on_cuda

# torch.mm and addmm(..., out_dtype=): half operands, the product rounded once, into fp32. CUDA only.
_HAS_MIXED_MM = all("dtype_out" in op.overloads() for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


class Value(NamedTuple):
    """A gradient that autograd has computed. gradient: [*parameter.shape], maybe sparse."""

    gradient: Tensor

    def value(self) -> Tensor:
        """Return the gradient."""
        return self.gradient

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value."""
        accumulator.add_(self.gradient)

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value."""
        accumulator.copy_(self.gradient.to_dense())


class Product(NamedTuple):
    """left^T @ right, the gradient of a linear layer's weight. left: [n, out], right: [n, in]."""

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        """Return the product, differentiable, as autograd computes it."""
        return self.left.t().mm(self.right)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value, in one GEMM if the dtypes allow it."""
        left, right = self.left.t(), self.right
        if left.dtype == right.dtype == accumulator.dtype:
            accumulator.addmm_(left, right)
        elif _multiplies_into(accumulator, left, right):
            torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.add_(left.mm(right))

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value, without a pass over what it held."""
        left, right = self.left.t(), self.right
        if left.dtype == right.dtype == accumulator.dtype:
            torch.mm(left, right, out=accumulator)
        elif _multiplies_into(accumulator, left, right):
            torch.mm(left, right, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.copy_(left.mm(right))


class RowSum(NamedTuple):
    """The sum over rows, the gradient of a bias. rows: [n, out]."""

    rows: Tensor

    def value(self) -> Tensor:
        """Return the sum, differentiable, as autograd computes it."""
        return self.rows.sum(0)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value, summed in the wider dtype."""
        accumulator.add_(self._sum(accumulator.dtype))

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value, summed in the wider dtype."""
        accumulator.copy_(self._sum(accumulator.dtype))

    def _sum(self, dtype: torch.dtype) -> Tensor:
        return self.rows.sum(0, dtype=torch.promote_types(self.rows.dtype, dtype))


class Scatter(NamedTuple):
    """Each row added at its index, the gradient of an embedding's weight. rows: [*indices.shape, dim]."""

    rows: Tensor
    indices: Tensor
    num_embeddings: int
    padding_idx: int

    def value(self) -> Tensor:
        """Return the gradient, differentiable, as autograd computes it."""
        embedding_dense_backward = torch.ops.aten.embedding_dense_backward
        return embedding_dense_backward(self.rows, self.indices, self.num_embeddings, self.padding_idx, False)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value."""
        # Not by index_add_, a fifth of the time on CUDA: its atomics make the sum depend on the run.
        accumulator.add_(self.value())

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value."""
        accumulator.copy_(self.value())


# A gradient to be added to an accumulator; all but Value are not computed yet.
Recipe = Value | Product | RowSum | Scatter


def _multiplies_into(accumulator: Tensor, left: Tensor, right: Tensor) -> bool:
    half = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
    return _HAS_MIXED_MM and half and on_cuda(accumulator) and accumulator.dtype == torch.float32
