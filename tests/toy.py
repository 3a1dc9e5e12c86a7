"""A small model with all that real ones do between stages, and its data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from reference import Item, MicroBatch
from torch import Tensor, nn

VOCABULARY, HIDDEN, SAMPLES, LENGTH = 11, 16, 2, 5


# Between layers travels a tensor, or a dict with it and with what comes along: a mask, token ids, a float tensor that
# wants no gradient, a residual that skips all layers, None, and a python int that each layer counts up.


def hidden_of(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else state["x"]


def with_hidden(state: Any, x: Tensor) -> Any:
    return x if isinstance(state, Tensor) else {**state, "x": x, "depth": state["depth"] + 1}


class Embed(nn.Module):
    """ids or (ids, mask, shift, None, depth) -> state."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, hidden) * 0.3)

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return F.embedding(batch, self.weight)
        ids, mask, shift, nothing, depth = batch
        x = F.embedding(ids, self.weight)
        return {"x": x, "skip": x, "tokens": (mask, ids), "more": [shift, nothing], "depth": depth}


class TiedEmbed(Embed):
    """An embedding whose weight, and a bias that the embedding itself doesn't use, make logits too."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__(vocabulary, hidden)
        self.bias = nn.Parameter(torch.randn(vocabulary) * 0.1)


def logits(module: nn.Module, state: Any) -> Tensor:
    x = hidden_of(state)
    if not isinstance(state, Tensor):
        x = x + state["skip"] + (state["tokens"][1] % 2).unsqueeze(-1)
    return F.linear(x, module.weight, module.bias)


class Head(nn.Linear):
    def forward(self, state: Any) -> Tensor:
        return logits(self, state)


class Attention(nn.Module):
    """Causal attention with two heads, which heeds the mask where there is one."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, state: Any) -> Any:
        x = hidden_of(state)
        query, key, value = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if not isinstance(state, Tensor):
            mask, _ = state["tokens"]
            allowed = allowed & mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return with_hidden(state, x + self.out(mixed.transpose(1, 2).flatten(-2)))


class MLP(nn.Module):
    def __init__(self, hidden: int, dropout: float = 0.0):
        super().__init__()
        self.dropout = dropout
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, state: Any) -> Any:
        x = hidden_of(state)
        y = self.up(x)
        if not isinstance(state, Tensor):
            shift, nothing = state["more"]
            assert nothing is None
            y = y + shift / state["depth"]
        return with_hidden(state, x + self.down(F.dropout(F.gelu(y), self.dropout, self.training)))


class Norm(nn.LayerNorm):
    def forward(self, state: Any) -> Any:
        return with_hidden(state, super().forward(hidden_of(state)))


def halve(state: Any) -> Any:
    return with_hidden(state, hidden_of(state) / 2)


def model(tied: bool, num_blocks: int = 3, dropout: float = 0.0) -> list[Item]:
    """2 * num_blocks + 4 layers."""
    pair = [Item(Attention, (HIDDEN,)), Item(MLP, (HIDDEN, dropout))]
    blocks = pair * num_blocks
    body = [*blocks, Item(halve), Item(Norm, (HIDDEN,))]
    if tied:
        embed = {"make": TiedEmbed, "args": (VOCABULARY, HIDDEN), "tie": "embed"}
        return [Item(**embed), *body, Item(**embed, call=logits)]
    return [Item(Embed, (VOCABULARY, HIDDEN)), *body, Item(Head, (HIDDEN, VOCABULARY))]


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def micro_batch(index: int, kind: str = "tensor") -> MicroBatch:
    """The index-th of all micro-batches of a run. kind: "tensor"; "tuple"; "lengths": tuples of changing length."""
    generator = torch.Generator().manual_seed(index)
    shape = (SAMPLES, LENGTH if kind != "lengths" else (5, 3, 6, 4, 3)[index % 5])
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.randint(VOCABULARY, shape, generator=generator)
    if kind == "tensor":
        return ids, labels
    mask = torch.rand(shape, generator=generator) < 0.7
    mask[:, 0] = True
    shift = torch.randn(*shape, 1, generator=generator)
    return (ids, mask, shift, None, 2), labels
