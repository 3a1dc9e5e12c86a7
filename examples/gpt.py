"""A byte-level GPT as a list of pipeline layers: each module takes the previous one's output as its one argument.

A pre-norm GPT-2 (learned positions, causal attention, GELU) with the token shift of RWKV, which lets a small model
learn from little text: without it, heads that look at the previous byte take most of a short run to form.

Every layer is sharded over the ranks of context.groups.model, which may be one rank; context is what LayerSpec.build
passes. Under sequence parallelism x, between the sharded parts, is a shard of the sequence, [batch, ceil(seq / tp), hidden],
and the logits have the padding at the end of the last shard: causal layers let nothing of it into the bytes before.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import (
    AttentionHeads,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    enter_region,
    scatter_sequence,
    sum_gradients_over,
    vocab_parallel_cross_entropy,
)
from parallel3d.tensor_parallel.linear import from_linear

VOCABULARY = 256
INIT_STD = 0.02


class TokenEmbedding(nn.Module):
    """Tokens plus learned positions. ids: [batch, seq] -> [batch, seq, hidden], for any seq up to max_length."""

    def __init__(self, vocab: int, hidden: int, max_length: int, context: BuildContext) -> None:
        super().__init__()
        words, positions = torch.empty(vocab, hidden), torch.empty(max_length, hidden)
        nn.init.normal_(words, std=INIT_STD)
        nn.init.normal_(positions, std=INIT_STD)
        whole = nn.Embedding.from_pretrained(words, freeze=False)
        self.tokens = VocabParallelEmbedding.from_embedding(whole, **_slices(context))
        self.positions = nn.Parameter(positions)
        self.context = context

    def forward(self, ids: Tensor) -> Tensor:
        seq, max_length = ids.shape[1], len(self.positions)
        if seq > max_length:
            raise ValueError(f"{seq} tokens do not fit in context {max_length}; cut the sequence or raise the context")
        positions = self.positions[:seq]
        if self.context.sequence_parallel:
            positions = scatter_sequence(positions, self.context.groups.model)
        return self.tokens(ids) + positions


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to the residual. x: [batch, seq, hidden] -> the same.

    layers: the number of blocks in the model; the projections onto the residual start scaled by 1 / sqrt(2 * layers).
    A rank has the attention of some heads, and a part of the MLP's inner features.
    """

    def __init__(self, hidden: int, heads: int, layers: int, context: BuildContext) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads cannot share hidden size {hidden}; choose heads that divide it")
        residual_std = INIT_STD / math.sqrt(2 * layers)
        self.head_dim, self.context = hidden // heads, context
        split = AttentionHeads(heads, heads, self.head_dim)
        qkv = [split.query, split.key_value, split.key_value]
        self.attention_norm = _norm(hidden, context)
        self.qkv = _column(hidden, 3 * hidden, INIT_STD, context, segments=qkv, in_region=True)
        self.attention_out = _row(hidden, hidden, residual_std, context, segments=[split.query])
        self.mlp_norm = _norm(hidden, context)
        self.mlp_in = _column(hidden, 4 * hidden, INIT_STD, context, in_region=True)
        self.mlp_out = _row(4 * hidden, hidden, residual_std, context)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.enter(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.enter(self.mlp_norm(x))), approximate="tanh"))

    def enter(self, x: Tensor) -> Tensor:
        """Return the column layers' input: the whole sequence, since the token shift crosses shards, shifted."""
        return shift_half(enter_region(x, self.context.groups.model, self.context.sequence_parallel))

    def attention(self, x: Tensor) -> Tensor:
        """Return causal self-attention. x: [batch, seq, hidden], from `enter` -> [batch, seq, hidden]."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, this rank's heads, seq, head_dim]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Final norm and projection. x: [batch, seq, hidden] -> logits [batch, seq, this rank's part of vocab]."""

    def __init__(self, hidden: int, vocab: int, context: BuildContext) -> None:
        super().__init__()
        self.norm = _norm(hidden, context)
        self.projection = _column(hidden, vocab, INIT_STD, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class Loss(nn.Module):
    """Mean cross entropy in nats. logits: as Head returns them, labels: [batch, seq] -> scalar, the same on every rank."""

    def __init__(self, vocab: int, context: BuildContext) -> None:
        super().__init__()
        self.vocab, self.group = vocab, context.groups.model

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits[:, : labels.shape[1]]  # without the padding of sequence parallelism
        return vocab_parallel_cross_entropy(logits, labels, self.group, self.vocab).mean()


def shift_half(x: Tensor) -> Tensor:
    """Take the second half of the channels from one position earlier. x: [batch, seq, hidden]. arXiv:2305.13048."""
    now, before = x.chunk(2, dim=-1)
    return torch.cat([now, F.pad(before, (0, 0, 1, -1))], dim=-1)


@torch.no_grad()
def sample(
    forward: Callable[[Tensor], Tensor],
    prompt: bytes,
    num_bytes: int,
    context: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> bytes:
    """Continue prompt by num_bytes bytes, each drawn from softmax(logits / temperature); temperature 0 is greedy.

    forward: ids [1, seq] -> logits [1, seq, vocab]; it sees the last context bytes at most. Returns the new bytes.
    Raises ValueError for an empty prompt or a negative temperature.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one byte to continue from, such as a newline")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or more")
    text = list(prompt)
    for _ in range(num_bytes):
        logits = forward(torch.tensor([text[-context:]]))[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text[len(prompt) :])


def _norm(hidden: int, context: BuildContext) -> nn.LayerNorm:
    norm = nn.LayerNorm(hidden)
    if context.sequence_parallel:  # each rank sees its shard of the sequence alone
        sum_gradients_over(norm.parameters(), context.groups.model)
    return norm


def _column(inputs: int, outputs: int, std: float, context: BuildContext, **options: Any) -> ColumnParallelLinear:
    return from_linear(ColumnParallelLinear, _linear(inputs, outputs, std), **_slices(context), **options)


def _row(inputs: int, outputs: int, std: float, context: BuildContext, **options: Any) -> RowParallelLinear:
    return from_linear(RowParallelLinear, _linear(inputs, outputs, std), **_slices(context), **options)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    """Build the whole layer, of which every rank keeps its shard: so weights don't depend on the number of ranks."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


def _slices(context: BuildContext) -> dict[str, Any]:
    return {"sequence_parallel": context.sequence_parallel, "group": context.groups.model}
