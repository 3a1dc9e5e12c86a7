"""Layers of a decoder but its blocks, which are in blocks.py: their base class and sharding, embedding, final norm and head."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.checkpoint.export import LayerNames
from parallel3d.comm.collectives import Group
from parallel3d.errors import DataError
from parallel3d.kernels.rms_norm import rms_norm
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.config import config_json
from parallel3d.models.huggingface.weights import Weights, load_layer, load_layer_later, stored_as
from parallel3d.models.loss import SlicedLogits
from parallel3d.models.tables import Tables
from parallel3d.parameters import slicing_of, whole_shape
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.dropout import SequenceDropout
from parallel3d.tensor_parallel.linear import ColumnParallelLinear
from parallel3d.tensor_parallel.regions import scatter_sequence, slicing_group, sum_gradients_over
from parallel3d.tensor_parallel.vocabulary import VocabParallelEmbedding


class Stream(NamedTuple):
    """The values that travel between layers if the input has more than token ids.

    - hidden: [batch, seq, hidden], or a rank's shard of the sequence.
    - attention_mask: as for `tables.combined`.
    - position_ids: [batch or 1, seq]; with no mask they also tell documents apart.
    - length: of the whole sequence, if hidden is a shard of it.
    """

    hidden: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    length: int | None = None


# Only hidden states if nothing else travels.
Travels = Tensor | Stream


def open_stream(x: Travels) -> Stream:
    """Return what travels as a Stream."""
    return x if isinstance(x, Stream) else Stream(x)


def close_stream(x: Stream) -> Travels:
    """Return a Stream in the form that travels."""
    return x.hidden if all(other is None for other in x[1:]) else x


class Dropout(nn.Dropout):
    """nn.Dropout of replicated hidden states, called like SequenceDropout."""

    def forward(self, input: Tensor, length: int | None = None) -> Tensor:
        """Run nn.Dropout; the length isn't needed."""
        return super().forward(input)


class Sharding:
    """Sharding of the layers that a rank builds over its tensor-parallel group.

    With sequence parallelism hidden states between regions are shards [batch, ceil(seq / tp), hidden], and the layers at the
    boundary of a region are given the length of the whole sequence.

    - context: context of the build; without one, the group is this rank alone.
    """

    def __init__(self, context: BuildContext | None):
        self.group: Group = slicing_group(None, context)
        self.sequence_parallel = context is not None and context.sequence_parallel and self.group.size > 1
        self.layout_independent = context is not None and context.layout_independent

    @property
    def of_linears(self) -> dict[str, Any]:
        """Arguments of tensor-parallel layers at the boundary of a region."""
        return {"sequence_parallel": self.sequence_parallel, "group": self.group}

    @property
    def of_dropout(self) -> dict[str, Any]:
        """Arguments of dropout of sharded tensors."""
        return {"layout_independent": self.layout_independent, "group": self.group}

    def dropout(self, rate: float) -> nn.Module:
        """Return dropout between regions; called with its input and the length of the whole sequence."""
        return SequenceDropout(rate, **self.of_dropout) if self.sequence_parallel else Dropout(rate)

    def norm(self, norm: nn.Module) -> nn.Module:
        """Return a norm, which now normalizes hidden states between regions."""
        if self.sequence_parallel:
            sum_gradients_over(norm.parameters(), self.group)
        return norm

    def scatter(self, x: Tensor) -> Tensor:
        """Return replicated hidden states as those between regions."""
        return scatter_sequence(x, self.group) if self.sequence_parallel else x

    def length(self, seq: int) -> int | None:
        """Return the sequence length that travels with hidden states between regions, or None."""
        return seq if self.sequence_parallel else None


class KeyValues:
    """Keys and values of the positions that a block has seen, and room for those to come: `length` positions."""

    def __init__(self, length: int):
        self.seen, self._length = 0, length
        self._kept: list[Tensor] = []

    def add(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keep those of new positions, [batch, heads, new, head_dim]; return those of all so far."""
        if not self._kept:
            self._kept = [x.new_empty(*x.shape[:2], self._length, x.shape[3]) for x in (key, value)]
        start, self.seen = self.seen, self.seen + key.shape[2]
        for kept, new in zip(self._kept, (key, value), strict=True):
            kept[:, :, start : self.seen] = new
        return [kept[:, :, : self.seen] for kept in self._kept]


class DecoderLayer(nn.Module, ABC):
    """A layer of a decoder, which knows how Hugging Face stores its parameters.

    A subclass makes its modules in `_make`. Its weights are then read (later, where the context says so) or drawn; on the meta
    device, neither.

    - layer, tables: for a block: its index, counted from 0, and the tables that all blocks of the model share.
    - weights: values to read instead of drawing them; frozen ones require no gradient.
    - dtype: dtype of the parameters; None for torch's default dtype.
    """

    _past: KeyValues | None = None

    def __init__(
        self,
        config: DecoderConfig,
        layer: int = 0,
        tables: Tables | None = None,
        weights: Weights | None = None,
        dtype: torch.dtype | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__()
        self.config, self._layer = config, layer
        self._tables = Tables(config) if tables is None else tables
        self._sharding = Sharding(context)
        reads_later = weights is not None and context is not None and context.reads_later
        with torch.device("meta") if reads_later else nullcontext():
            self._make()
        if dtype is not None:
            self.to(dtype)
        if weights is not None:
            stored = self.stored()
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(not weights.is_frozen(stored[name]))
        if weights is not None and context is not None and context.reads_later:
            load_layer_later(self, self.stored(), weights, context.device)
        elif any(parameter.is_meta for parameter in self.parameters()):
            return
        elif weights is not None:
            load_layer(self, self.stored(), weights)
        else:
            self._draw()

    @abstractmethod
    def _make(self) -> None:
        """Make the modules of the layer."""

    def stored(self) -> LayerNames:
        """Return how each parameter is stored in a Hugging Face checkpoint."""
        return {name: stored_as(self.config, self._layer, name, p) for name, p in self.named_parameters()}

    def config_json(self) -> dict[str, Any]:
        """Return the whole model's config.json. Raises ConfigError if Hugging Face has no such architecture."""
        return config_json(self.config)

    @property
    def max_positions(self) -> int:
        """Number of positions that the model is made for."""
        return self.config.max_positions

    def keep_past(self, length: int | None) -> None:
        """Keep keys and values of up to `length` positions from the next call on; None: drop them, and keep no more."""
        self._past = None if length is None else KeyValues(length)

    @torch.no_grad()
    def _draw(self) -> None:
        """Draw new weights: matrices normal with init_std, biases zero, factors of norms one."""
        config = self.config
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(0.0 if config.norm == "rms_plus_one" else 1.0)
            else:
                into_stream = config.depth_scaled_init and name.startswith(("attention_out", "down"))
                std = config.init_std / math.sqrt(2 * config.num_layers) if into_stream else config.init_std
                slicing = slicing_of(parameter)
                if slicing is None:
                    parameter.normal_(std=std)
                else:  # the whole is drawn: weights don't depend on the sharding
                    whole = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
                    parameter.copy_(slicing.part_of(whole.normal_(std=std)))


class PlusOneNorm(nn.RMSNorm):
    """RMSNorm with the factors 1 + weight, computed in fp32 or the input's wider dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., n] -> x / sqrt(mean(x^2) + eps) * (1 + weight)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


_NORMS: dict[str, Callable[..., nn.Module]] = {"rms": nn.RMSNorm, "rms_plus_one": PlusOneNorm, "layer": nn.LayerNorm}


def make_norm(config: DecoderConfig, size: int | None = None) -> nn.Module:
    """Return a norm of hidden states, or of vectors of another size."""
    return _NORMS[config.norm](size or config.hidden_size, eps=config.norm_eps)


def normalized(norm: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of the hidden states, and the hidden states to be used from here on."""
    if type(norm) is nn.RMSNorm and norm.eps is not None and not has_hooks(norm):
        return rms_norm(hidden, norm.weight, norm.eps)
    return norm(hidden), hidden


def check_tokens(inputs: Any, vocab_size: int) -> None:
    """Raise DataError for token ids on the host, alone or as input_ids, that are outside of a model's vocabulary."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    if isinstance(ids, Tensor) and ids.device.type == "cpu" and ids.numel() and not ids.is_floating_point():
        values = ids.numpy()
        low, high = values.min(), values.max()
        if low < 0 or high >= vocab_size:
            raise DataError(
                f"there is a token id {low if low < 0 else high}, but the model has words 0 to {vocab_size - 1}; use the "
                "model's own tokenizer, or make its embedding larger: model.resize_token_embeddings(len(tokenizer))"
            )


class TokenEmbedding(DecoderLayer):
    """Embedding: token ids [batch, seq], or {"input_ids", "attention_mask", "position_ids"} -> hidden states or a Stream."""

    def _make(self) -> None:
        config, sharding = self.config, self._sharding
        learned = config.rope is None
        # Learned positions are added to replicated hidden states.
        self.tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            sequence_parallel=sharding.sequence_parallel and not learned,
            group=sharding.group,
        )
        self.positions = nn.Embedding(config.max_positions, config.hidden_size) if learned else None
        self.dropout = sharding.dropout(config.embedding_dropout)

    def check_inputs(self, inputs: Any) -> None:
        """Raise DataError for token ids outside of the vocabulary; called before a step."""
        check_tokens(inputs, self.config.vocab_size)

    def forward(self, inputs: Tensor | dict[str, Tensor | None]) -> Travels:
        """Embed tokens.

        Raises DataError for unknown keys, for a mask [batch, heads, seq, seq] that isn't of bools or integers, and for more
        positions than there are learned ones.
        """
        given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        ids, mask, positions = (given.pop(key, None) for key in ("input_ids", "attention_mask", "position_ids"))
        if given or ids is None:
            raise DataError(
                f"the inputs of a decoder are token ids, or a dict of input_ids, attention_mask and position_ids, "
                f"not {inputs!r}"
            )
        if mask is not None and mask.dim() == 4 and mask.is_floating_point():
            # Transformers adds such a mask to the scores: its zeros attend.
            raise DataError(
                f"attention_mask {list(mask.shape)} is of {mask.dtype}; give bools, True where a position attends: mask == 0 "
                "of a mask that is added to the scores"
            )
        hidden = self.tokens(ids)
        if self.config.embedding_scale != 1:
            hidden = hidden * hidden.new_full((), self.config.embedding_scale)
        if self.positions is not None:
            if ids.shape[1] > self.config.max_positions:
                raise DataError(f"{ids.shape[1]} tokens in a row, but max_positions is {self.config.max_positions}")
            where = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
            hidden = self._sharding.scatter(hidden + self.positions(where))
        length = self._sharding.length(ids.shape[1])
        return close_stream(Stream(self.dropout(hidden, length), mask, positions, length))


class FinalNorm(DecoderLayer):
    """The last norm. After it only the hidden states travel, and the sequence's length if they are a shard of it.

    In a generation they are those of the last position, unless they are a shard.
    """

    def _make(self) -> None:
        self.norm = self._sharding.norm(make_norm(self.config))

    def forward(self, x: Travels) -> Travels:
        """Normalize the hidden states."""
        hidden, _, _, length = open_stream(x)
        if self._past is not None and length is None:
            hidden = hidden[:, -1:]
        return close_stream(Stream(self.norm(hidden), length=length))


class Head(DecoderLayer):
    """Head: hidden states -> logits [batch, seq, vocab]; SlicedLogits if the vocabulary is sharded."""

    def _make(self) -> None:
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        self.logits = ColumnParallelLinear(hidden, vocab, False, **self._sharding.of_linears)

    def forward(self, x: Travels) -> Tensor | SlicedLogits:
        """Return the logits."""
        stream = open_stream(x)
        logits, group = self.logits(stream.hidden, stream.length), self._sharding.group
        return logits if group.size == 1 else SlicedLogits(logits, group, self.config.vocab_size)
