"""Collectives that autograd follows, in three pairs, each the other's backward.

The ranks of a tensor-parallel group compute one function together. A tensor is *replicated* (the same on every rank, and
its gradient too), a *shard* (rank r has part r along a dim) or *partial* (the ranks' tensors add up to it). With y the
result, L the loss, n the group's size and [x_r] the concatenation over ranks:

| forward                                                | backward                                         |
|--------------------------------------------------------|--------------------------------------------------|
| copy_to_region       y = x, used by sharded layers     | dL/dx = sum_r dL/dy_r           (all-reduce)     |
| reduce_from_region   y = sum_r x_r       (all-reduce)  | dL/dx_r = dL/dy                                  |
| gather_from_region   y = [x_r]           (all-gather)  | dL/dx_r = part r of dL/dy                        |
| scatter_to_region    y_r = part r of x                 | dL/dx = [dL/dy_r]               (all-gather)     |
| all_gather           y = [x_r], used by sharded layers | dL/dx_r = part r of sum_s dL/dy_s (reduce-scatter) |
| reduce_scatter       y_r = part r of sum_s x_s         | dL/dx_s = [dL/dy_r]             (all-gather)     |

copy and reduce are f and g of arXiv:1909.08053, all_gather and reduce_scatter g and g-bar of arXiv:2205.05198.
Parts along a dim are equally long; CommunicationError if the group's size doesn't divide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm import collectives
from parallel3d.comm.collectives import GROUPS, Group, Work
from parallel3d.errors import CommunicationError
from parallel3d.operators import define

# A collective in progress: waits (CUDA: makes the current stream wait) and returns the result.
Started = Callable[[], Tensor]


def _finish(work: Work, operand: Tensor, result: Started) -> Tensor:
    """Wait and return the result. operand: held until here, because the allocator would reuse its memory before."""
    work.wait()
    return result()


def start_all_reduce(x: Tensor, group: Group, hidden: bool = False) -> Started:
    """Start to sum over the group in the memory of `x`, which must be contiguous. Not differentiable.

    hidden: whether a matrix product runs at the same time. The backend is used then, because it slows the product less: it
    uses fewer multiprocessors than the group's kernel.
    """
    kernel = None if hidden else group.all_reduce_kernel
    if kernel is not None and kernel.takes(x):
        work = kernel.start(x)
    else:
        work = collectives.all_reduce(x, group)
    return partial(_finish, work, x, lambda: x)


def start_all_gather(x: Tensor, group: Group, dim: int) -> Started:
    """Start x: [..., n, ...] -> [..., n * group.size, ...], every rank's along `dim` in group order. Not differentiable."""
    if group.size == 1:
        return lambda: x
    shard = x.contiguous()
    blocks = shard.new_empty(group.size, *shard.shape)
    work = collectives.all_gather_into(blocks.view(-1), shard.view(-1), group)
    return partial(_finish, work, shard, lambda: _join(blocks, dim))


def start_reduce_scatter(x: Tensor, group: Group, dim: int) -> Started:
    """Start x: [..., n * group.size, ...] -> [..., n, ...], this rank's part of the sum over the group. Not differentiable.

    Raises CommunicationError if the group's size doesn't divide x.shape[dim].
    """
    if group.size == 1:
        return lambda: x
    blocks = _cut(x, group, dim).contiguous()
    # Not empty_like: strides of dims of size 1 would be those of the whole, another shape to torch.compile.
    shard = blocks.new_empty(blocks.shape[1:])
    work = collectives.reduce_scatter_into(shard.view(-1), blocks.view(-1), group)
    return partial(_finish, work, blocks, lambda: shard)


def _cut(x: Tensor, group: Group, dim: int) -> Tensor:
    """Cut x into blocks: [..., n * size, ...] -> [size, ..., n, ...]."""
    dim = dim % x.dim()
    if x.shape[dim] % group.size:
        raise CommunicationError(
            f"dim {dim} of {list(x.shape)} can't be cut into {group.size} equal parts; pad it to a multiple of {group.size}"
        )
    return x.unflatten(dim, (group.size, x.shape[dim] // group.size)).movedim(dim, 0)


def _join(blocks: Tensor, dim: int) -> Tensor:
    """Join blocks: [size, ..., n, ...] -> [..., n * size, ...], a view if all dims before `dim` have size 1."""
    shape = blocks.shape[1:]
    dim = dim % len(shape)
    if math.prod(shape[:dim]) == 1:
        return blocks.view(*shape[:dim], -1, *shape[dim + 1 :]) if blocks.numel() else blocks.flatten(0, dim + 1)
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def _copy(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group, in_place: bool = False) -> Tensor:
    kernel = group.all_reduce_kernel
    if kernel is None or not kernel.takes(x):
        # Else a copy: a gradient that arrives here may be another consumer's too.
        return start_all_reduce(x if in_place else x.clone(memory_format=torch.contiguous_format), group)()
    given = x.contiguous()
    total = given if in_place else torch.empty_like(given)
    kernel.sum_into(total, given)
    return total


def _gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_all_gather(x, group, dim)()


def _own_part(x: Tensor, group: Group, dim: int) -> Tensor:
    return _cut(x, group, dim)[group.index].contiguous()


def _reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    return start_reduce_scatter(x, group, dim)()


# The forwards of the table, on (x, group) or (x, group, dim), each with the name of its backward.
_TABLE: dict[str, tuple[Callable[..., Tensor], str]] = {
    "copy": (_copy, "sum"),
    "sum": (_sum, "copy"),
    "sum_in_place": (partial(_sum, in_place=True), "copy"),
    "gather": (_gather, "own_part"),
    "own_part": (_own_part, "gather"),
    "all_gather": (_gather, "reduce_scatter"),
    "reduce_scatter": (_reduce_scatter, "all_gather"),
}


def _fake(x: Tensor, name: str, group: int, dim: Sequence[int]) -> Tensor:
    """Return a tensor like the result."""
    shape, size = list(x.shape), GROUPS[group].size
    for d in dim:
        shape[d] = shape[d] * size if "gather" in name else shape[d] // size
    return x.new_empty(shape)


# The collectives in a compiled graph; "copy" needs no operator there.
_in_graph = define(
    "collective",
    "(Tensor x, str name, int group, int[] dim) -> Tensor",
    lambda x, name, group, dim: _TABLE[name][0](x, GROUPS[group], *dim),
    _fake,
)


class _Collective(torch.autograd.Function):
    """Applies a function of the table; its backward is differentiable itself, but in a compiled graph."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, group: int, *dim: int) -> Tensor:
        ctx.transposed, ctx.group, ctx.dim = _TABLE[name][1], group, dim
        if name == "sum_in_place":
            ctx.mark_dirty(x)
        return _run(name, x, group, *dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        run = _run if torch.compiler.is_compiling() else _Collective.apply
        return None, run(ctx.transposed, gradient, ctx.group, *ctx.dim), None, *(None for _ in ctx.dim)


def _run(name: str, x: Tensor, group: int, *dim: int) -> Tensor:
    if torch.compiler.is_compiling():
        y: Tensor = x.view_as(x) if name == "copy" else _in_graph(x, name, group, dim)
        return y
    return _TABLE[name][0](x, GROUPS[group], *dim)


def _apply(name: str, x: Tensor, group: Group, *dim: int) -> Tensor:
    y: Tensor = x if group.size == 1 else _Collective.apply(name, x, group.number, *dim)
    return y


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """x: [...], replicated -> itself, with partial gradients from sharded layers: the backward all-reduces them."""
    return _apply("copy", x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """x: [...], partial -> the sum over the group, replicated."""
    return _apply("sum", x, group)


def reduce_from_region_(x: Tensor, group: Group) -> Tensor:
    """Sum as reduce_from_region, in the memory of `x` unless that is a view; for a result that no backward needs."""
    # Whether an operation returns a view is not specified; autograd forbids changing some views in place.
    in_place = not torch.compiler.is_compiling() and x.is_contiguous() and not x._is_view()
    return _apply("sum_in_place" if in_place else "sum", x, group)


def gather_from_region(x: Tensor, group: Group, dim: int) -> Tensor:
    """x: [..., n, ...], a shard along `dim` -> [..., n * group.size, ...], replicated, as are its gradients."""
    return _apply("gather", x, group, dim)


def scatter_to_region(x: Tensor, group: Group, dim: int) -> Tensor:
    """x: [..., n * group.size, ...], replicated -> [..., n, ...], this rank's shard along `dim`."""
    return _apply("own_part", x, group, dim)


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """x: [..., n, ...], a shard -> [..., n * group.size, ...], with partial gradients from sharded layers."""
    return _apply("all_gather", x, group, dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """x: [..., n * group.size, ...], partial -> [..., n, ...], this rank's shard of the sum along `dim`."""
    return _apply("reduce_scatter", x, group, dim)
