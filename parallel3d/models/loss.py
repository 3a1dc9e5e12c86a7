"""The loss of a causal language model, how a decoder's layers are sharded, and logits that stay sharded by the vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group
from parallel3d.errors import DataError
from parallel3d.parameters import slicing_of, whole_shape
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.dropout import SequenceDropout
from parallel3d.tensor_parallel.regions import gather_features, scatter_sequence, slicing_group, sum_gradients_over
from parallel3d.tensor_parallel.slicing import cut
from parallel3d.tensor_parallel.vocabulary import EAGER, Passes, vocab_parallel_cross_entropy

IGNORED = -100  # label of a position that doesn't count, as in transformers


def next_labels(labels: Tensor, ignored: int = IGNORED) -> Tensor:
    """Return the label of the token after each position, [batch, seq] like `labels`; `ignored` at the last."""
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignored)], dim=-1)


@dataclass(frozen=True)
class CausalLMLoss:
    """Cross entropy of each position's label, from logits [batch, seq, vocab] and labels [batch, seq], at least in fp32.

    It is computed `chunk` positions at a time, so that no copy of all logits in fp32 exists. With SlicedLogits each rank
    computes its part of the vocabulary. Raises DataError for labels of another shape.

    - shift: labels are the token ids themselves, as in transformers: each position predicts the token after it.
    - per_token: return (sum, number of labels that count), for a mean over all tokens of a batch; otherwise the mean of a call.
    - z_loss: weight of logsumexp^2 (arXiv:2204.02311).
    - ignore_index: labels with this value don't count.
    """

    shift: bool = False
    per_token: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int = IGNORED
    chunk: int = 512
    passes: Passes = field(default=EAGER, repr=False)

    def in_one(self) -> CausalLMLoss:
        """Return this loss, computed for all positions at once."""
        return replace(self, chunk=sys.maxsize)

    def compiled(self, **options: Any) -> CausalLMLoss:
        """Return this loss for all positions at once, compiled with these options between its collectives, without copies."""
        return replace(self.in_one(), passes=Passes.compiled(**options))

    def __call__(self, logits: Tensor | SlicedLogits, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, or (sum of losses, number of tokens)."""
        if isinstance(logits, Tensor):
            logits = SlicedLogits(logits, slicing_group(None, None), logits.shape[-1])
        local = logits.local
        if local.shape[:-1] != labels.shape:
            raise DataError(f"labels are {list(labels.shape)}, but the logits {list(local.shape)}; give one a position")
        if self.shift:
            labels = next_labels(labels, self.ignore_index)
        count = (labels != self.ignore_index).sum()
        # Not slices: the backward of each would make a gradient of all logits' size.
        chunk = min(self.chunk, max(1, labels.shape[1]))
        chunks = zip(local.split(chunk, dim=1), labels.split(chunk, dim=1), strict=True)
        losses = partial(
            vocab_parallel_cross_entropy,
            group=logits.group,
            vocab_size=logits.vocab_size,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            z_loss=self.z_loss,
            passes=self.passes,
        )
        total = torch.stack([losses(part, wanted).sum() for part, wanted in chunks]).sum()
        return (total, count) if self.per_token else total / count.clamp(min=1)


causal_lm_loss = CausalLMLoss()


class Dropout(nn.Dropout):
    """nn.Dropout of replicated hidden states, called like SequenceDropout."""

    def forward(self, input: Tensor, length: int | None = None) -> Tensor:
        """Run nn.Dropout; the length isn't needed."""
        return super().forward(input)


class Sharding:
    """Sharding of the layers that a rank builds over its tensor-parallel group.

    With sequence parallelism hidden states between regions are shards [batch, ceil(seq / tp), hidden], and the layers at the
    boundary of a region are given the length of the whole sequence.

    - context: of the build; without one, the group is this rank alone.
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


@dataclass(frozen=True)
class SlicedLogits:
    """One rank's part, [batch, seq, its words], of logits that are sharded by the vocabulary over the ranks of `group`."""

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
        """Return all logits, [batch, seq, vocab], on every rank. Collective over the group."""
        return gather_features(self.local, cut(self.vocab_size, None, self.group.size), self.group)


def fill_whole(parameter: Tensor, fill: Callable[[Tensor], Tensor]) -> None:
    """Set a parameter to its part of the whole tensor that `fill` fills: random weights don't depend on the sharding."""
    slicing = slicing_of(parameter)
    if slicing is None:
        fill(parameter)
    else:
        whole = torch.empty(whole_shape(parameter), dtype=parameter.dtype, device=parameter.device)
        parameter.copy_(slicing.part_of(fill(whole)))
