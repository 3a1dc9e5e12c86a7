"""The blocks of a decoder, as one layer each or as two: attention and feed-forward, between which a stage may end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.kernels.rotary import rotate
from parallel3d.kernels.swiglu import swiglu
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.names import Piece
from parallel3d.models.huggingface.weights import Weights
from parallel3d.models.layers import DecoderLayer, Stream, Travels, close_stream, make_norm, normalized, open_stream
from parallel3d.models.sliced import Slices
from parallel3d.models.tables import Tables, combined
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.linear import column_outputs

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class _Mixing(nn.Module):
    """Rotary positions, where there are any, and attention of one layer: what lies between its linears."""

    def __init__(self, head_dim: int):
        super().__init__()
        self._head_dim = head_dim

    def forward(
        self,
        projected: Sequence[Tensor],
        rotation: tuple[Tensor, Tensor] | None,
        causal: Tensor | None,
        attention_mask: Tensor | None,
        mix: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Query, key and value as [batch, seq, a rank's heads * head_dim] -> as the queries, mixed by `mix`.

        rotation, causal: of Tables, whose growth compiled code would have to watch.
        """
        # [batch, seq, heads, head_dim]
        query, key, value = (y.unflatten(-1, (-1, self._head_dim)) for y in projected)
        if rotation is not None:
            query, key = rotate(query, key, *rotation)
        mask = combined(causal, attention_mask)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return mix(query, key, value, mask).transpose(1, 2).flatten(2)


class _Activation(nn.Module):
    """[..., ffn], or gate before up, [..., 2 ffn] -> [..., ffn]."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self._function, self._gated = _ACTIVATIONS[config.activation], config.gated
        self._is_swiglu = config.gated and config.activation == "silu"

    def compile(self, *args: Any, **options: Any) -> None:
        """As nn.Module's, if there is more than one kernel to fuse."""
        if self._gated and not self._is_swiglu:
            super().compile(*args, **options)

    def forward(self, up: Tensor) -> Tensor:
        """Apply the activation, gated if the configuration says so."""
        if self._is_swiglu:
            return swiglu(up)
        if not self._gated:
            return self._function(up)
        gate, up = up.chunk(2, dim=-1)
        return self._function(gate) * up


class _Residual(DecoderLayer):
    """A layer that adds to the hidden states [batch, seq, hidden] of what travels."""

    def __init__(self, config: DecoderConfig, context: BuildContext | None, *pieces: Piece):
        super().__init__(config, *pieces)
        self._slices = Slices(context)
        self.dropout = self._slices.dropout(config.residual_dropout)

    @staticmethod
    def cost_key(config: DecoderConfig, layer: int, *others: object, **options: object) -> object:
        """Return a key that layers of equal cost share, see LayerSpec.costs_like; of the position only the window counts."""
        return config, config.window(layer), options.get("dtype")

    def compile(self, *args: Any, **options: Any) -> None:
        """As nn.Module's; where nothing fuses around the linears, only of what lies between two of them.

        The whole layer's graph would break at each linear, which costs the host nearly what the plain layer does.
        """
        config = self.config
        if config.norm != "rms" or config.residual_dropout or config.attention_dropout:
            super().compile(*args, **options)
            return
        for part in self.children():
            if isinstance(part, (_Mixing, _Activation)):
                part.compile(*args, **options)

    # Not of a Stream: torch.compile of PyTorch 2.11 can't carry a NamedTuple that it made over a break of its graph.
    def _add(self, hidden: Tensor, change: Tensor, length: int | None) -> Tensor:
        return hidden + self.dropout(change, length)


class _Attends(_Residual):
    """The attention of one layer; its parameters have the same names in a block as in a layer of their own."""

    def _make_attention(self, layer: int, tables: Tables) -> None:
        config = self.config
        self.attention_norm = self._slices.norm(make_norm(config))
        # Three layers and not one: where ranks share a key and value head, they don't share queries.
        self.query, self.key, self.value, self.attention_out = self._slices.attention(config)
        self._tables, self._window = tables, config.window(layer)
        self.mixing = _Mixing(config.dim_of_head)
        self.attention_dropout = self._slices.attention_dropout(config)

    def _mixed(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, length: int | None
    ) -> tuple[Tensor, Tensor]:
        """(what is mixed of a rank's heads, what is added to)."""
        normed, hidden = normalized(self.attention_norm, hidden)
        projected = column_outputs((self.query, self.key, self.value), normed, length)
        rotation = self._tables.rotary(projected[0], position_ids) if self.config.rope is not None else None
        causal = self._tables.causal(projected[0], self._window, attention_mask)
        drops = self.training and self.config.attention_dropout
        mix = self._mix_with_dropout if drops else _mix
        return self.mixing(projected, rotation, causal, attention_mask, mix), hidden

    def _mix_with_dropout(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self._slices.layout_independent:
            return attend(query, key, value, mask, self.attention_dropout)
        with self._slices.own_numbers(query.device):
            return _mix(query, key, value, mask, self.config.attention_dropout)


class _FeedsForward(_Residual):
    """The feed-forward network of one layer; names: as for attention."""

    def _make_feed_forward(self) -> None:
        config = self.config
        hidden, ffn = config.hidden_size, config.ffn_size
        self.mlp_norm = self._slices.norm(make_norm(config))
        self.up = self._slices.column(hidden, (ffn, ffn) if config.gated else (ffn,), config.mlp_bias)
        self.activation = _Activation(config)
        self.down = self._slices.row(ffn, hidden, config.mlp_bias)

    def _feed_forward(self, normed: Tensor, hidden: Tensor, length: int | None) -> Tensor:
        return self._add(hidden, self.down(self.activation(self.up(normed, length))), length)


class Block(_Attends, _FeedsForward):
    """x + attention(norm(x)), then x + mlp(norm(x)), on the hidden states [batch, seq, hidden] of what travels."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        tables: Tables,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, context, Piece("attention", layer), Piece("feed_forward", layer))
        self._make_attention(layer, tables)
        self._make_feed_forward()
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """Run attention and feed-forward with their residuals."""
        hidden, attention_mask, position_ids, length = open_stream(x)
        mixed, hidden = self._mixed(hidden, attention_mask, position_ids, length)
        normed, hidden = self._added_and_normed(mixed, hidden, length)
        hidden = self._feed_forward(normed, hidden, length)
        return close_stream(Stream(hidden, attention_mask, position_ids, length))

    def _added_and_normed(self, mixed: Tensor, hidden: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """(the feed-forward's norm of the hidden states with what attention adds, these)."""
        return normalized(self.mlp_norm, self._add(hidden, self.attention_out(mixed), length))


class Attention(_Attends):
    """x + attention(norm(x)), on the hidden states [batch, seq, hidden] of what travels: the first half of a block."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        tables: Tables,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, context, Piece("attention", layer))
        self._make_attention(layer, tables)
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """Add attention to the hidden states."""
        hidden, attention_mask, position_ids, length = open_stream(x)
        mixed, hidden = self._mixed(hidden, attention_mask, position_ids, length)
        hidden = self._add(hidden, self.attention_out(mixed), length)
        return close_stream(Stream(hidden, attention_mask, position_ids, length))


class FeedForward(_FeedsForward):
    """x + mlp(norm(x)), on the hidden states [batch, seq, hidden] of what travels: the second half of a block."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, context, Piece("feed_forward", layer))
        self._make_feed_forward()
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """Add the feed-forward network to the hidden states."""
        hidden, attention_mask, position_ids, length = open_stream(x)
        hidden = self._feed_forward(*normalized(self.mlp_norm, hidden), length)
        return close_stream(Stream(hidden, attention_mask, position_ids, length))


def _mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """The fastest attention that there is; shapes and mask: see `attend`."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention whose dropout is given, and which therefore holds all its probabilities, [batch, heads, seq, seq].

    query: [batch, heads, seq, head_dim]; key, value: as many or fewer heads, each for heads in a row; mask: True
    where there is attention, causal for None.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(shared, dim=1) for heads in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return dropout(scores.masked_fill(~mask, -math.inf).softmax(-1)) @ value
