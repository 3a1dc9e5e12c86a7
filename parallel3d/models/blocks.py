"""Decoders as lists of layers: each block is one layer or two, attention and feed-forward, between which a stage may end."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.autograd.split_backward import autocast_dtype
from parallel3d.errors import ConfigError, nearest
from parallel3d.kernels.rotary import rotate
from parallel3d.kernels.swiglu import swiglu
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.weights import Weights
from parallel3d.models.layers import (
    DecoderLayer,
    FinalNorm,
    Head,
    Stream,
    TokenEmbedding,
    Travels,
    close_stream,
    make_norm,
    normalized,
    open_stream,
)
from parallel3d.models.tables import Tables, combined
from parallel3d.specs import LayerSpec, TiedLayerSpec
from parallel3d.tensor_parallel.dropout import SlicedDropout
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, column_outputs
from parallel3d.tensor_parallel.regions import sum_gradients_over
from parallel3d.tensor_parallel.slicing import AttentionHeads, cut

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class _Mixing(nn.Module):
    """Operators between the linears of attention: norms of heads and rotary positions, if any, and the attention itself."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self._head_dim = config.dim_of_head
        norms = (make_norm(config, self._head_dim) if config.head_norms else nn.Identity() for _ in range(2))
        self.query_norm, self.key_norm = norms

    def forward(
        self,
        projected: Sequence[Tensor],
        rotation: tuple[Tensor, Tensor] | None,
        causal: Tensor | None,
        attention_mask: Tensor | None,
        mix: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Apply `mix` to query, key and value, each [batch, seq, a rank's heads * head_dim] -> the shape of the queries.

        rotation, causal: of Tables.
        """
        # [batch, seq, heads, head_dim]
        query, key, value = (y.unflatten(-1, (-1, self._head_dim)) for y in projected)
        query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotate(query, key, *rotation)
        mask = combined(causal, attention_mask)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        return mix(query, key, value, mask).transpose(1, 2).flatten(2)


class _Activation(nn.Module):
    """Activation of the feed-forward network: [..., ffn], or gate before up, [..., 2 ffn] -> [..., ffn]."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self._function, self._gated = _ACTIVATIONS[config.activation], config.gated
        self._is_swiglu = config.gated and config.activation == "silu"

    def forward(self, up: Tensor) -> Tensor:
        """Apply the activation, gated if the configuration says so."""
        if self._is_swiglu:
            return swiglu(up)
        if not self._gated:
            return self._function(up)
        gate, up = up.chunk(2, dim=-1)
        return self._function(gate) * up


class _Residual(DecoderLayer):
    """Layer that adds to the hidden states [batch, seq, hidden], which travel alone or in a Stream."""

    def _make(self) -> None:
        self.dropout = self._sharding.dropout(self.config.residual_dropout)

    @staticmethod
    def cost_key(config: DecoderConfig, layer: int, *others: object, **options: object) -> object:
        """Return a key that layers of equal cost share, see LayerSpec.costs_like; of the position only the window counts."""
        return config, config.window(layer), options.get("dtype")

    def compile(self, **options: Any) -> None:
        """Compile what runs between the ends of the stream. The tables stay outside, as each growth would compile again."""
        vars(self)["_run"] = FirstShapes(self._run, type(self).__name__, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle a compiled layer as a plain one, as nn.Module does."""
        return {name: value for name, value in super().__getstate__().items() if name != "_run"}

    def forward(self, x: Travels) -> Travels:
        """Add to the hidden states."""
        hidden, attention_mask, position_ids, length = open_stream(x)
        hidden = self._run(hidden, length, *self._of_tables(hidden, attention_mask, position_ids, length))
        return close_stream(Stream(hidden, attention_mask, position_ids, length))

    @abstractmethod
    def _run(self, hidden: Tensor, length: int | None, *of_tables: Any) -> Tensor:
        """Return the hidden states to which the layer has added. length: of the whole sequence, if hidden is a shard."""

    def _of_tables(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, length: int | None
    ) -> tuple[Any, ...]:
        """Return the further arguments of `_run`."""
        return ()

    def _add(self, hidden: Tensor, change: Tensor, length: int | None) -> Tensor:
        return hidden + self.dropout(change, length)


class Attention(_Residual):
    """First half of a block: x + attention(norm(x)) on hidden states [batch, seq, hidden]."""

    def _make(self) -> None:
        config, sharding = self.config, self._sharding
        heads = AttentionHeads(config.num_heads, config.kv_heads, config.dim_of_head)
        hidden, options = config.hidden_size, sharding.of_linears
        self.attention_norm = sharding.norm(make_norm(config))
        # Three layers and not one: ranks that share a key and value head don't share queries.
        self.query, self.key, self.value = (
            ColumnParallelLinear(hidden, part.size, config.qkv_bias, segments=[part], **options)
            for part in (heads.query, heads.key_value, heads.key_value)
        )
        self.attention_out = RowParallelLinear(
            heads.query.size, hidden, config.attention_out_bias, segments=[heads.query], **options
        )
        self.mixing = _Mixing(config)
        if sharding.group.size > 1:
            sum_gradients_over(self.mixing.parameters(), sharding.group)  # each rank has the gradients of its heads
        # Dropout of probabilities [batch, a rank's heads, query, key].
        whole_heads = [replace(heads, head_dim=1).query]
        self.attention_dropout = SlicedDropout(
            config.attention_dropout, config.num_heads, dim=-3, segments=whole_heads, **sharding.of_dropout
        )
        self._own_heads = cut(config.num_heads, whole_heads, sharding.group.size).slicing(1, sharding.group.index)
        self._window = config.window(self._layer)
        super()._make()

    def _run(self, hidden: Tensor, length: int | None, *of_tables: Any) -> Tensor:
        mixed, hidden = self._mixed(hidden, length, *of_tables)
        return self._add(hidden, self.attention_out(mixed), length)

    def _of_tables(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, length: int | None
    ) -> tuple[Any, ...]:
        """Return rotation, causal mask and attention mask."""
        seq, device = hidden.shape[1] if length is None else length, hidden.device
        dtype, seen = autocast_dtype(hidden) or hidden.dtype, 0 if self._past is None else self._past.seen
        rotation = self._tables.rotary(seq, dtype, device, position_ids) if self.config.rope is not None else None
        causal = self._tables.causal(seq, device, self._window, attention_mask, position_ids, seen)
        if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            attention_mask = self._own_heads.part_of(attention_mask)
        return rotation, causal, attention_mask

    def _mixed(self, hidden: Tensor, length: int | None, *of_tables: Any) -> tuple[Tensor, Tensor]:
        """Return the output of a rank's heads, and the hidden states to which its projection is added."""
        normed, hidden = normalized(self.attention_norm, hidden)
        projected = column_outputs((self.query, self.key, self.value), normed, length)
        drops = self.training and self.config.attention_dropout
        mix = self._mix_with_dropout if drops else _mix if self._past is None else self._mix_with_past
        return self.mixing(projected, *of_tables, mix), hidden

    def _mix_with_past(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert self._past is not None
        key, value = self._past.add(key, value)
        return _mix(query, key, value, mask)

    def _mix_with_dropout(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self._sharding.layout_independent:
            return attend(query, key, value, mask, self.attention_dropout)
        with self._sharding.group.own_stream(query.device):  # each rank draws for its own heads
            return _mix(query, key, value, mask, self.config.attention_dropout)


class FeedForward(_Residual):
    """Second half of a block: x + mlp(norm(x)) on hidden states [batch, seq, hidden]."""

    def _make(self) -> None:
        config, options = self.config, self._sharding.of_linears
        hidden, ffn = config.hidden_size, config.ffn_size
        ups = (ffn, ffn) if config.gated else (ffn,)
        self.mlp_norm = self._sharding.norm(make_norm(config))
        self.up = ColumnParallelLinear(hidden, sum(ups), config.mlp_bias, segments=ups, **options)
        self.activation = _Activation(config)
        self.down = RowParallelLinear(ffn, hidden, config.mlp_bias, **options)
        super()._make()

    def _run(self, hidden: Tensor, length: int | None, *of_tables: Any) -> Tensor:
        return self._feed_forward(*normalized(self.mlp_norm, hidden), length)

    def _feed_forward(self, normed: Tensor, hidden: Tensor, length: int | None) -> Tensor:
        return self._add(hidden, self.down(self.activation(self.up(normed, length))), length)


class Block(Attention, FeedForward):
    """Block of a decoder: x + attention(norm(x)), then x + mlp(norm(x)) on hidden states [batch, seq, hidden]."""

    def _run(self, hidden: Tensor, length: int | None, *of_tables: Any) -> Tensor:
        normed, hidden = normalized(self.mlp_norm, super()._run(hidden, length, *of_tables))
        return self._feed_forward(normed, hidden, length)


def _mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Compute attention by PyTorch's fastest implementation; shapes and mask as for `attend`."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        # A single position sees all of the keys. A bool also where torch.compile has symbols for sizes.
        is_causal=True if mask is None and query.shape[2] > 1 else False,  # noqa: SIM210
        enable_gqa=query.shape[1] != key.shape[1],
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute attention with the given dropout, which needs all probabilities [batch, heads, seq, seq] in memory.

    - query: [batch, heads, seq, head_dim].
    - key, value: with as many heads, or fewer, each for several consecutive query heads.
    - mask: True where a position attends; None for causal attention.
    """
    shared = query.shape[1] // key.shape[1]
    key, value = (heads.repeat_interleave(shared, dim=1) for heads in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    return dropout(scores.masked_fill(~mask, -math.inf).softmax(-1)) @ value


def decoder(
    config: DecoderConfig,
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    units: Literal["block", "half"] = "block",
) -> list[LayerSpec]:
    """Return the layers of a decoder for a PipelineModule: token ids [batch, seq] -> logits [batch, seq, vocab].

    - dtype: dtype of the weights; None for torch's default dtype.
    - weights: values that the layers of a rank read when they are built; None to draw new ones.
    - units: "block": each block is one layer; "half": it is two, attention and feed-forward, between which a stage may end.

    The inputs may also be a dict, see TokenEmbedding. Raises ConfigError for other units.
    """
    if units not in ("block", "half"):
        raise ConfigError(f'units is {units!r}; give "block" or "half".{nearest(str(units), ("block", "half"))}')
    tables = Tables(config)
    given: dict[str, Any] = {"weights": weights, "dtype": dtype}
    kinds: tuple[type[DecoderLayer], ...] = (Block,) if units == "block" else (Attention, FeedForward)
    blocks = [LayerSpec(kind, config, k, tables, **given) for k in range(config.num_layers) for kind in kinds]
    norm = LayerSpec(FinalNorm, config, **given)
    if not config.tied:
        return [LayerSpec(TokenEmbedding, config, **given), *blocks, norm, LayerSpec(Head, config, **given)]
    # Tied by the weight, not as a module: learned positions belong only to the embedding.
    embedding = TiedLayerSpec("embedding", TokenEmbedding, config, tied_weight_attr="tokens.weight", **given)
    return [
        embedding,
        *blocks,
        norm,
        TiedLayerSpec("embedding", Head, config, tied_weight_attr="logits.weight", **given),
    ]
