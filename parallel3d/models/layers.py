"""The layers of a decoder, each an entry in the list: embedding, blocks, final norm, head."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.checkpoint.stored import LayerNames
from parallel3d.errors import DataError
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.config import config_json
from parallel3d.models.huggingface.names import layer_names
from parallel3d.models.huggingface.weights import Weights, load_layer
from parallel3d.models.sliced import SlicedLogits, Slices, fill_whole
from parallel3d.models.tables import Tables
from parallel3d.pipe.specs import BuildContext


class Stream(NamedTuple):
    """What travels between layers where the input has more than token ids.

    hidden: [batch, seq, hidden]; attention_mask: see Tables.mask; position_ids: [batch or 1, seq]; length: of the sequence,
    where hidden is a rank's shard of it.
    """

    hidden: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    length: int | None = None


# The hidden states alone where there is nothing else.
Travels = Tensor | Stream


def _open(x: Travels) -> Stream:
    return x if isinstance(x, Stream) else Stream(x)


def _close(x: Stream) -> Travels:
    return x.hidden if all(other is None for other in x[1:]) else x


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class DecoderLayer(nn.Module):
    """A layer of a decoder at its place in the list, which knows how Hugging Face stores its parameters."""

    def __init__(self, config: DecoderConfig, place: int):
        super().__init__()
        self.config = config
        self._place = place

    def stored(self) -> LayerNames:
        """How each parameter is stored in a Hugging Face checkpoint."""
        return layer_names(self.config, self._place)

    def config_json(self) -> dict[str, Any]:
        """The whole model's config.json. Raises ConfigError where Hugging Face has no such architecture."""
        return config_json(self.config)

    def _finish(self, weights: Weights | None, dtype: torch.dtype | None) -> None:
        """Last in a constructor: the weights are read, or drawn anew; counted on the meta device, neither."""
        if dtype is not None:
            self.to(dtype)
        if any(parameter.is_meta for parameter in self.parameters()):
            return
        if weights is not None:
            load_layer(self, self.stored(), weights)
        else:
            self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        """Matrices are normal with init_std, biases zero, the weights of norms one."""
        config = self.config
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                into_stream = config.depth_scaled_init and name.startswith(("attention_out", "down"))
                std = config.init_std / math.sqrt(2 * config.num_layers) if into_stream else config.init_std
                fill_whole(parameter, partial(torch.Tensor.normal_, std=std))


def _make_norm(config: DecoderConfig) -> nn.Module:
    make = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return make(config.hidden_size, eps=config.norm_eps)


class TokenEmbedding(DecoderLayer):
    """Token ids [batch, seq], or {"input_ids", "attention_mask", "position_ids"} -> hidden states, a Stream with the others."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, 0)
        self._slices = Slices(context)
        learned = config.rope is None
        self.tokens = self._slices.embedding(config.vocab_size, config.hidden_size, scatters=not learned)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size) if learned else None
        self.dropout = self._slices.dropout(config.embedding_dropout)
        self._finish(weights, dtype)

    def forward(self, inputs: Tensor | dict[str, Tensor | None]) -> Travels:
        """See the class. Raises DataError for other keys, and for more positions than there are learned ones."""
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        ids, mask, positions = (given.pop(key, None) for key in ("input_ids", "attention_mask", "position_ids"))
        if given or ids is None:
            raise DataError(
                f"the inputs of a decoder are token ids, or a dict of input_ids, attention_mask and position_ids, "
                f"not {inputs!r}"
            )
        hidden = self.tokens(ids)
        if self.positions is not None:
            if ids.shape[1] > self.config.max_positions:
                raise DataError(f"{ids.shape[1]} tokens in a row, but max_positions is {self.config.max_positions}")
            where = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            hidden, positions = self._slices.scatter(hidden + self.positions(where)), None
        length = self._slices.length(ids.shape[1])
        return _close(Stream(self.dropout(hidden, length), mask, positions, length))


class Block(DecoderLayer):
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
        super().__init__(config, layer + 1)
        self._tables, self._window = tables, config.window(layer)
        self._slices = Slices(context)
        self._activation = _ACTIVATIONS[config.activation]
        hidden, ffn = config.hidden_size, config.ffn_size
        self.attention_norm = self._slices.norm(_make_norm(config))
        # Three layers and not one: where ranks share a key and value head, they don't share queries.
        self.query, self.key, self.value, self.attention_out = self._slices.attention(config)
        self.attention_dropout = self._slices.attention_dropout(config)
        self.mlp_norm = self._slices.norm(_make_norm(config))
        self.up = self._slices.column(hidden, (ffn, ffn) if config.gated else (ffn,), config.mlp_bias)
        self.down = self._slices.row(ffn, hidden, config.mlp_bias)
        self.dropout = self._slices.dropout(config.residual_dropout)
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """See the class."""
        stream = _open(x)
        hidden, length = stream.hidden, stream.length
        hidden = hidden + self.dropout(self._attend(stream._replace(hidden=self.attention_norm(hidden))), length)
        hidden = hidden + self.dropout(self._mlp(self.mlp_norm(hidden), length), length)
        return _close(stream._replace(hidden=hidden))

    def _attend(self, stream: Stream) -> Tensor:
        x, tables = self._slices.enter(stream.hidden, stream.length), self._tables
        # [batch, seq, heads, head_dim]
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.config.dim_of_head)) for layer in (self.query, self.key, self.value)
        )
        if self.config.rope is not None:
            cos, sin = tables.rotary(query, stream.position_ids)
            query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mask = tables.mask(query, self._window, stream.attention_mask)
        query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
        if self.training and self.config.attention_dropout:
            mixed = self._mix_with_dropout(query, key, value, mask)
        else:
            mixed = _mix(query, key, value, mask)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def _mix_with_dropout(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self._slices.layout_independent:
            return attend(query, key, value, mask, self.attention_dropout)
        with self._slices.own_numbers(query.device):
            return _mix(query, key, value, mask, self.config.attention_dropout)

    def _mlp(self, x: Tensor, length: int | None) -> Tensor:
        up = self.up(x, length)
        if not self.config.gated:
            return self.down(self._activation(up))
        gate, up = up.chunk(2, dim=-1)
        return self.down(self._activation(gate) * up)


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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + head_dim / 2) of x [batch, seq, heads, head_dim] by their positions' angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FinalNorm(DecoderLayer):
    """The last norm; from here on hidden states travel alone, but for the length of a sequence of which they are a shard."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, config.num_layers + 1)
        self.norm = Slices(context).norm(_make_norm(config))
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """See the class."""
        stream = _open(x)
        return _close(Stream(self.norm(stream.hidden), length=stream.length))


class Head(DecoderLayer):
    """Hidden states -> logits [batch, seq, vocab]; under tensor slicing a rank's SlicedLogits, which CausalLMLoss takes too."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, config.num_layers + 2)
        self._group = Slices(context).group
        self.logits = Slices(context).column(config.hidden_size, (config.vocab_size,), False)
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Tensor | SlicedLogits:
        """See the class."""
        stream = _open(x)
        logits = self.logits(stream.hidden, stream.length)
        return logits if self._group.size == 1 else SlicedLogits(logits, self._group, self.config.vocab_size)
