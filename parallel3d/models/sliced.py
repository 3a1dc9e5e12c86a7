"""Where the decoder meets tensor slicing: the parts of its layers that are sliced over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.errors import ConfigError
from parallel3d.pipe.specs import BuildContext


@dataclass(frozen=True)
class Heads:
    """A rank's heads: of queries, and of keys and values."""

    queries: int
    keys: int


def _check(context: BuildContext | None) -> None:
    if context is not None and context.groups.model.size > 1:
        raise ConfigError(
            f"tensor slicing over {context.groups.model.size} ranks is not yet supported by the decoder; give 'model' 1 rank"
        )


def heads_of(num_heads: int, num_kv_heads: int, context: BuildContext | None) -> Heads:
    """What a rank holds of the heads."""
    _check(context)
    return Heads(num_heads, num_kv_heads)


def column_linear(size: int, segments: Sequence[int], bias: bool, context: BuildContext | None) -> nn.Module:
    """[..., size] -> [..., a rank's part of each segment]."""
    _check(context)
    return nn.Linear(size, sum(segments), bias)


def row_linear(size: int, out: int, bias: bool, context: BuildContext | None) -> nn.Module:
    """[..., a rank's part of size] -> [..., out], summed over the ranks."""
    _check(context)
    return nn.Linear(size, out, bias)


def token_embedding(vocab_size: int, size: int, context: BuildContext | None) -> nn.Module:
    """[...] token ids -> [..., size]."""
    _check(context)
    return nn.Embedding(vocab_size, size)


def token_losses(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, ignore_index: int = -100, z_loss: float = 0.0
) -> Tensor:
    """Cross entropy of each token, at least in fp32; 0 where labels are ignore_index. logits: [n, vocab]; labels: [n]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        logits, labels, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square() * (labels != ignore_index)
    return losses


@dataclass(frozen=True)
class Part:
    """Which part of a whole tensor a rank's parameter is: these ranges of it along dim, in order, then padding."""

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]


def part_of(parameter: Tensor) -> Part:
    """What a parameter is of the whole one: all of it, unless it is sliced."""
    slicing = getattr(parameter, "slicing", None)
    if slicing is None:
        size = parameter.shape[0] if parameter.dim() else 1
        return Part(0, size, ((0, size),))
    return Part(slicing.dim, slicing.size, tuple(tuple(r) for r in slicing.ranges))


def fill_whole(parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """parameter = its part of what `fill` makes of the whole tensor, so that random weights don't depend on the slicing."""
    part = part_of(parameter)
    if getattr(parameter, "slicing", None) is None:
        fill(parameter)
        return
    whole = fill(torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device))
    parameter.zero_()
    offset = 0
    for start, stop in part.ranges:
        length = stop - start
        parameter.narrow(part.dim, offset, length).copy_(whole.narrow(part.dim, start, length))
        offset += length


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Of the whole tensor that a parameter is a part of."""
    if getattr(parameter, "slicing", None) is None:
        return tuple(parameter.shape)
    part = part_of(parameter)
    return tuple(part.size if dim == part.dim else size for dim, size in enumerate(parameter.shape))
