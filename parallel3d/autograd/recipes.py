"""Recipes of parameters' gradients: already computed, or computed when the sink adds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.fake_device import on_cuda


class Recipe(ABC):
    """Gradient to be added to an accumulator. All recipes but Value compute it when it is added."""

    @abstractmethod
    def value(self) -> Tensor:
        """Return the gradient, differentiable, as autograd computes it."""

    def put(self, accumulator: Tensor, adds: bool, factor: float = 1.0) -> None:
        """accumulator += factor * value if `adds`, else accumulator = factor * value."""
        _put(self.value(), accumulator, adds, factor)


def _put(value: Tensor, accumulator: Tensor, adds: bool, factor: float) -> None:
    if adds:
        accumulator.add_(value, alpha=factor)
    else:
        _multiply(accumulator.copy_(value.to_dense()), factor)


def _multiply(accumulator: Tensor, factor: float) -> None:
    if factor != 1.0:
        accumulator.mul_(factor)


@dataclass(eq=False)
class Value(Recipe):
    """A gradient that autograd has computed. gradient: [*parameter.shape], maybe sparse."""

    gradient: Tensor

    def value(self) -> Tensor:
        """Return the gradient."""
        return self.gradient


@dataclass(eq=False)
class Product(Recipe):
    """Gradient of a linear layer's weight, left^T @ right. left: [n, out], right: [n, in]."""

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        """Return the product, differentiable, as autograd computes it."""
        return self.left.t().mm(self.right)

    def put(self, accumulator: Tensor, adds: bool, factor: float = 1.0) -> None:
        """accumulator (+)= factor * value, in one GEMM and one pass over the accumulator if the dtypes allow it."""
        left, right = self.left.t(), self.right
        options: dict[str, Any] = {"out": accumulator}
        if not left.dtype == right.dtype == accumulator.dtype:
            half = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
            # On CUDA torch multiplies half-precision operands and rounds the result once, to fp32.
            if not (half and on_cuda(accumulator) and accumulator.dtype == torch.float32):
                return _put(left.mm(right), accumulator, adds, factor)
            options["out_dtype"] = torch.float32
        if adds:
            torch.addmm(accumulator, left, right, alpha=factor, **options)
        else:
            torch.mm(left, right, **options)
            _multiply(accumulator, factor)


@dataclass(eq=False)
class RowSum(Recipe):
    """Gradient of a bias, the sum over rows. rows: [n, out]."""

    rows: Tensor

    def value(self) -> Tensor:
        """Return the sum, differentiable, as autograd computes it."""
        return self.rows.sum(0)

    def put(self, accumulator: Tensor, adds: bool, factor: float = 1.0) -> None:
        """accumulator (+)= factor * value, summed in the wider dtype."""
        value = self.rows.sum(0, dtype=torch.promote_types(self.rows.dtype, accumulator.dtype))
        _put(value, accumulator, adds, factor)


@dataclass(eq=False)
class Scatter(Recipe):
    """Gradient of an embedding's weight, each row added at its index. rows: [*indices.shape, dim]."""

    rows: Tensor
    indices: Tensor
    num_embeddings: int
    padding_idx: int

    def value(self) -> Tensor:
        """Return the gradient, differentiable, as autograd computes it."""
        # index_add_ takes a fifth of the time on CUDA, but its atomics make the sum depend on the run.
        embedding_dense_backward = torch.ops.aten.embedding_dense_backward
        return embedding_dense_backward(self.rows, self.indices, self.num_embeddings, self.padding_idx, False)
