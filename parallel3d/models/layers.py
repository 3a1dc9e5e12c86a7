"""Base of the layers of a decoder, and those at its ends: embedding, final norm, head. Blocks: see blocks.py."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.checkpoint.export import LayerNames
from parallel3d.errors import DataError
from parallel3d.kernels.rms_norm import rms_norm
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.config import config_json
from parallel3d.models.huggingface.names import EMBEDDING, FINAL_NORM, HEAD, Piece, names_of
from parallel3d.models.huggingface.weights import Weights, load_layer
from parallel3d.models.sliced import SlicedLogits, Slices, fill_whole
from parallel3d.specs import BuildContext


class Stream(NamedTuple):
    """The values that travel between layers if the input has more than token ids.

    hidden: [batch, seq, hidden]; attention_mask: see Tables.mask; position_ids: [batch or 1, seq]; length: of the sequence,
    where hidden is a rank's shard of it.
    """

    hidden: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    length: int | None = None


# The hidden states alone where there is nothing else.
Travels = Tensor | Stream


def open_stream(x: Travels) -> Stream:
    """Return what travels as a Stream."""
    return x if isinstance(x, Stream) else Stream(x)


def close_stream(x: Stream) -> Travels:
    """As it travels."""
    return x.hidden if all(other is None for other in x[1:]) else x


class DecoderLayer(nn.Module):
    """A layer of a decoder, which knows how Hugging Face stores its parameters. pieces: what it is made of."""

    def __init__(self, config: DecoderConfig, *pieces: Piece):
        super().__init__()
        self.config = config
        self._pieces = pieces

    def stored(self) -> LayerNames:
        """How each parameter is stored in a Hugging Face checkpoint."""
        return {name: stored for piece in self._pieces for name, stored in names_of(self.config, piece).items()}

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


def make_norm(config: DecoderConfig) -> nn.Module:
    """Return a norm of hidden states."""
    make = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return make(config.hidden_size, eps=config.norm_eps)


def normalized(norm: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of hidden, hidden as what follows shall take it)."""
    if type(norm) is nn.RMSNorm and norm.eps is not None and not has_hooks(norm):
        return rms_norm(hidden, norm.weight, norm.eps)
    return norm(hidden), hidden


class TokenEmbedding(DecoderLayer):
    """Token ids [batch, seq], or {"input_ids", "attention_mask", "position_ids"} -> hidden states, a Stream with the others."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, EMBEDDING)
        self._slices = Slices(context)
        learned = config.rope is None
        self.tokens = self._slices.embedding(config.vocab_size, config.hidden_size, scatters=not learned)
        self.positions = nn.Embedding(config.max_positions, config.hidden_size) if learned else None
        self.dropout = self._slices.dropout(config.embedding_dropout)
        self._finish(weights, dtype)

    def forward(self, inputs: Tensor | dict[str, Tensor | None]) -> Travels:
        """Embed tokens. Raises DataError for unknown keys, and for more positions than there are learned ones."""
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
        return close_stream(Stream(self.dropout(hidden, length), mask, positions, length))


class FinalNorm(DecoderLayer):
    """The last norm; from here on hidden states travel alone, but for the length of a sequence of which they are a shard."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, FINAL_NORM)
        self.norm = Slices(context).norm(make_norm(config))
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Travels:
        """Normalize the hidden states."""
        hidden, _, _, length = open_stream(x)
        return close_stream(Stream(self.norm(hidden), length=length))


class Head(DecoderLayer):
    """Hidden states -> logits [batch, seq, vocab]; under tensor slicing a rank's SlicedLogits, which CausalLMLoss takes too."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__(config, HEAD)
        self._group = Slices(context).group
        self.logits = Slices(context).column(config.hidden_size, (config.vocab_size,), False)
        self._finish(weights, dtype)

    def forward(self, x: Travels) -> Tensor | SlicedLogits:
        """Return the logits."""
        stream = open_stream(x)
        logits = self.logits(stream.hidden, stream.length)
        return logits if self._group.size == 1 else SlicedLogits(logits, self._group, self.config.vocab_size)
