"""Where the decoder meets tensor slicing: the parts of its layers that are sliced over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.errors import ConfigError
from parallel3d.models.config import DecoderConfig
from parallel3d.pipe.specs import BuildContext


class Slices:
    """A rank's slices of the layers that it builds: makes their linears and embeddings, and stands at their borders.

    context: of the build, None for whole layers. Raises ConfigError for more than one rank in its group.
    """

    def __init__(self, context: BuildContext | None):
        if context is not None and context.groups.model.size > 1:
            raise ConfigError(
                f"tensor slicing over {context.groups.model.size} ranks is not yet supported by the decoder; give the axis "
                "'model' 1 rank"
            )

    def embedding(self, vocab_size: int, size: int) -> nn.Module:
        """[...] token ids -> [..., size]."""
        return nn.Embedding(vocab_size, size)

    def attention(self, config: DecoderConfig) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Query, key and value, [..., hidden] as `enter` gave it -> [..., a rank's heads], and the way back from the heads."""
        hidden, query, key = (
            config.hidden_size,
            config.num_heads * config.dim_of_head,
            config.kv_heads * config.dim_of_head,
        )
        inwards = [nn.Linear(hidden, size, config.qkv_bias) for size in (query, key, key)]
        return inwards[0], inwards[1], inwards[2], nn.Linear(query, hidden, config.attention_out_bias)

    def column(self, size: int, segments: Sequence[int], bias: bool) -> nn.Module:
        """[..., size] as `enter` gave it -> [..., a rank's part of each segment]."""
        return nn.Linear(size, sum(segments), bias)

    def row(self, size: int, out: int, bias: bool) -> nn.Module:
        """[..., a rank's part of size] -> [..., out], summed over the ranks."""
        return nn.Linear(size, out, bias)

    def enter(self, x: Tensor) -> Tensor:
        """What column layers take of replicated hidden states, for all layers of one input."""
        return x


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
