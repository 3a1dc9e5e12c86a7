"""A small decoder whose layers are sliced where a context is given, and plain torch where none is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from reference import Item, MicroBatch
from torch import Tensor, nn

from parallel3d.tensor_parallel import (
    AttentionHeads,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    enter_region,
    sum_gradients_over,
    vocab_parallel_cross_entropy,
)

# Not divisible by 4, nor some by 2: words, the feed-forward size, the sequence, the key and value heads.
WORDS, HIDDEN, FFN, SEQ, SAMPLES, HEAD_DIM = 257, 16, 22, 7, 2, 4
HEADS = AttentionHeads(num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM)


def column(context: Any, fan_in: int, fan_out: int, bias: bool = True, **options: Any) -> nn.Module:
    if context is None:
        return nn.Linear(fan_in, fan_out, bias)
    shared = {"sequence_parallel": context.sequence_parallel, "context": context}
    return ColumnParallelLinear(fan_in, fan_out, bias, **shared, **options)


def row(context: Any, fan_in: int, fan_out: int, **options: Any) -> nn.Module:
    if context is None:
        return nn.Linear(fan_in, fan_out)
    shared = {"sequence_parallel": context.sequence_parallel, "context": context}
    return RowParallelLinear(fan_in, fan_out, **shared, **options)


def norm(context: Any) -> nn.LayerNorm:
    layer = nn.LayerNorm(HIDDEN)
    if context is not None and context.sequence_parallel:
        sum_gradients_over(layer.parameters(), context.groups.model)
    return layer


def whole_sequence(context: Any) -> dict[str, int]:
    return {"length": SEQ} if context is not None and context.sequence_parallel else {}


class Embed(nn.Module):
    def __init__(self, context: Any = None):
        super().__init__()
        self.words: Any = nn.Embedding(WORDS, HIDDEN)
        if context is not None:
            self.words = VocabParallelEmbedding.from_embedding(
                self.words, sequence_parallel=context.sequence_parallel, group=context.groups.model
            )
        self.context = context

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


def logits(embed: nn.Module, x: Tensor) -> Tensor:
    """Return logits from tied embeddings."""
    if embed.context is None:
        return F.linear(x, embed.words.weight)
    return embed.words.logits(x, **whole_sequence(embed.context))


class Head(nn.Module):
    def __init__(self, context: Any = None):
        super().__init__()
        self.project, self.context = column(context, HIDDEN, WORDS), context

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, **whole_sequence(self.context))


class Attention(nn.Module):
    def __init__(self, context: Any = None):
        super().__init__()
        self.norm = norm(context)
        parts = {"q": HEADS.query, "k": HEADS.key_value, "v": HEADS.key_value}
        for name, part in parts.items():
            sliced = {"segments": [part], "in_region": True} if context is not None else {}
            # A bias of keys moves no score but by rounding: its gradient is zero, and Adam would normalize noise.
            self.add_module(name, column(context, HIDDEN, part.size, bias=name != "k", **sliced))
        self.o = row(context, HEADS.query.size, HIDDEN, **({"segments": [HEADS.query]} if context is not None else {}))
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.context is not None:
            group, sequence_parallel = self.context.groups.model, self.context.sequence_parallel
            y = enter_region(y, group, sequence_parallel, **whole_sequence(self.context))
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, context: Any = None):
        super().__init__()
        self.norm, self.context = norm(context), context
        self.gate_up = column(context, HIDDEN, 2 * FFN, **({"segments": (FFN, FFN)} if context is not None else {}))
        self.down = row(context, FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x), **whole_sequence(self.context)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Norm(nn.Module):
    def __init__(self, context: Any = None):
        super().__init__()
        self.norm = norm(context)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class SlicedLoss(nn.Module):
    """Cross entropy of logits sliced over the vocabulary; (sum, count) where per_token."""

    def __init__(self, per_token: bool, context: Any = None):
        super().__init__()
        self.per_token, self.group = per_token, context.groups.model

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        losses = vocab_parallel_cross_entropy(x, labels, self.group, WORDS)
        return (losses.sum(), (labels != -100).sum()) if self.per_token else losses.mean()


def plain_loss(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def model(tied: bool, num_blocks: int = 2) -> list[Item]:
    """2 * num_blocks + 3 layers."""
    body = [*[Item(Attention), Item(MLP)] * num_blocks, Item(Norm)]
    if tied:
        embed = {"make": Embed, "tie": "words", "attributes": ("words.weight",)}
        return [Item(**embed), *body, Item(**embed, call=logits)]
    return [Item(Embed), *body, Item(Head)]


def micro_batch(index: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(WORDS, (SAMPLES, SEQ + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
