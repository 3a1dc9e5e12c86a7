"""Where the decoder meets tensor slicing: which of its layers are sliced over the ranks of a group, and their borders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.comm.collectives import Group
from parallel3d.models.config import DecoderConfig
from parallel3d.parameters import slicing_of, whole_shape
from parallel3d.rng import own_stream
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.dropout import SequenceDropout, SlicedDropout
from parallel3d.tensor_parallel.embedding import VocabParallelEmbedding
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.tensor_parallel.regions import (
    gather_features,
    scatter_sequence,
    slicing_group,
    sum_gradients_over,
)
from parallel3d.tensor_parallel.slicing import AttentionHeads, cut


class Dropout(nn.Dropout):
    """nn.Dropout of replicated hidden states, which needs no length of theirs."""

    def forward(self, input: Tensor, length: int | None = None) -> Tensor:
        """As nn.Dropout's."""
        return super().forward(input)


def is_identity(dropout: nn.Module) -> bool:
    """Whether a dropout of Slices drops nothing, and nobody is to be told."""
    return type(dropout) is Dropout and not (dropout.training and dropout.p) and not has_hooks(dropout)


class Slices:
    """A rank's slices of the layers that it builds: makes them, and stands at the borders of their regions.

    context: of the build; without one, a group of this rank alone. With sequence parallelism hidden states between regions
    are shards [batch, ceil(seq / tp), hidden], and what is behind a boundary is given the whole sequence's length.
    """

    def __init__(self, context: BuildContext | None):
        self.group: Group = slicing_group(None, context)
        self.sequence_parallel = context is not None and context.sequence_parallel and self.group.size > 1
        self.layout_independent = context is not None and context.layout_independent

    def dropout(self, rate: float) -> nn.Module:
        """Return dropout between regions; called with its input and the length of the whole sequence."""
        if not self.sequence_parallel:
            return Dropout(rate)
        return SequenceDropout(rate, layout_independent=self.layout_independent, group=self.group)

    def attention_dropout(self, config: DecoderConfig) -> SlicedDropout:
        """Return dropout of attention probabilities, [batch, a rank's heads, query, key]."""
        heads = AttentionHeads(config.num_heads, config.kv_heads, head_dim=1)
        return SlicedDropout(
            config.attention_dropout,
            config.num_heads,
            dim=-3,
            segments=[heads.query],
            layout_independent=self.layout_independent,
            group=self.group,
        )

    def own_numbers(self, device: torch.device) -> AbstractContextManager[None]:
        """For dropout inside a region: each rank draws for its own heads."""
        return own_stream(self.group.index, self.group.size, device)

    def embedding(self, vocab_size: int, size: int, scatters: bool) -> VocabParallelEmbedding:
        """[batch, seq] token ids -> hidden states; scatters: those between regions, else replicated ones."""
        return VocabParallelEmbedding(
            vocab_size, size, sequence_parallel=scatters and self.sequence_parallel, group=self.group
        )

    def attention(
        self, config: DecoderConfig
    ) -> tuple[ColumnParallelLinear, ColumnParallelLinear, ColumnParallelLinear, RowParallelLinear]:
        """Query, key and value, (hidden states, length) -> [..., a rank's heads], and the way back from the heads."""
        hidden, query, key = (
            config.hidden_size,
            config.num_heads * config.dim_of_head,
            config.kv_heads * config.dim_of_head,
        )
        heads = AttentionHeads(config.num_heads, config.kv_heads, config.dim_of_head)
        inwards = [
            ColumnParallelLinear(
                hidden,
                size,
                config.qkv_bias,
                sequence_parallel=self.sequence_parallel,
                segments=[segment],
                group=self.group,
            )
            for size, segment in ((query, heads.query), (key, heads.key_value), (key, heads.key_value))
        ]
        out = RowParallelLinear(
            query,
            hidden,
            config.attention_out_bias,
            sequence_parallel=self.sequence_parallel,
            segments=[heads.query],
            group=self.group,
        )
        return inwards[0], inwards[1], inwards[2], out

    def column(self, size: int, segments: Sequence[int], bias: bool) -> ColumnParallelLinear:
        """(hidden states between regions, length) -> [..., a rank's part of each segment]."""
        return ColumnParallelLinear(
            size,
            sum(segments),
            bias,
            sequence_parallel=self.sequence_parallel,
            segments=tuple(segments),
            group=self.group,
        )

    def row(self, size: int, out: int, bias: bool) -> RowParallelLinear:
        """[..., a rank's part of size] -> hidden states between regions."""
        return RowParallelLinear(size, out, bias, sequence_parallel=self.sequence_parallel, group=self.group)

    def norm(self, norm: nn.Module) -> nn.Module:
        """A norm of hidden states between regions."""
        if self.sequence_parallel:
            sum_gradients_over(norm.parameters(), self.group)
        return norm

    def scatter(self, x: Tensor) -> Tensor:
        """Replicated hidden states -> those between regions."""
        return scatter_sequence(x, self.group) if self.sequence_parallel else x

    def length(self, seq: int) -> int | None:
        """Return the sequence length that travels with hidden states between regions, or None."""
        return seq if self.sequence_parallel else None


@dataclass(frozen=True)
class SlicedLogits:
    """One rank's part, [batch, seq, its words], of the logits over a vocabulary that the ranks of `group` share."""

    local: Tensor
    group: Group
    vocab_size: int

    def __getattr__(self, name: str) -> NoReturn:
        # A field is asked for here where an object has none yet: torch.compile asks one whose __init__ it traces.
        if name.startswith("_") or name in type(self).__dataclass_fields__:
            raise AttributeError(name)
        raise AttributeError(
            f"SlicedLogits have no {name!r}: they are this rank's {self.local.shape[-1]} of {self.vocab_size} words; "
            "logits.whole() is a tensor of all, and models.CausalLMLoss takes them as they are"
        )

    def whole(self) -> Tensor:
        """[batch, seq, vocab], on every rank. Collective over the group."""
        return gather_features(self.local, cut(self.vocab_size, None, self.group.size), self.group)


def fill_whole(parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """parameter = its part of what `fill` makes of the whole tensor, so that random weights don't depend on the slicing."""
    slicing = slicing_of(parameter)
    if slicing is None:
        fill(parameter)
    else:
        whole = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
        parameter.copy_(slicing.part_of(fill(whole)))
