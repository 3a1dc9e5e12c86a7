"""A byte-level GPT as a list of pipeline layers: each module takes the previous one's output as its one argument.

A pre-norm GPT-2 (learned positions, causal attention, GELU) with the token shift of RWKV, which lets a small model
learn from little text: without it, heads that look at the previous byte take most of a short run to form.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
INIT_STD = 0.02


class TokenEmbedding(nn.Module):
    """Tokens plus learned positions. ids: [batch, seq] -> [batch, seq, hidden], for any seq up to context."""

    def __init__(self, vocab: int, hidden: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))
        self.positions = nn.Parameter(torch.empty(context, hidden))
        nn.init.normal_(self.weight, std=INIT_STD)
        nn.init.normal_(self.positions, std=INIT_STD)

    def forward(self, ids: Tensor) -> Tensor:
        seq, context = ids.shape[1], len(self.positions)
        if seq > context:
            raise ValueError(f"{seq} tokens do not fit in context {context}; cut the sequence or raise the context")
        return F.embedding(ids, self.weight) + self.positions[:seq]


class Block(nn.Module):
    """Attention and MLP, each normalized before and added to the residual. x: [batch, seq, hidden] -> the same.

    layers: the number of blocks in the model; the projections onto the residual start scaled by 1 / sqrt(2 * layers).
    """

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"{heads} heads cannot share hidden size {hidden}; choose heads that divide it")
        residual_std = INIT_STD / math.sqrt(2 * layers)
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = _linear(hidden, 3 * hidden, INIT_STD)
        self.attention_out = _linear(hidden, hidden, residual_std)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = _linear(hidden, 4 * hidden, INIT_STD)
        self.mlp_out = _linear(4 * hidden, hidden, residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(shift_half(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(shift_half(self.mlp_norm(x))), approximate="tanh"))

    def attention(self, x: Tensor) -> Tensor:
        """Causal self-attention. x: [batch, seq, hidden] -> the same."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, hidden / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class Head(nn.Module):
    """Final norm and projection. x: [batch, seq, hidden] -> logits [batch, seq, vocab]."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.projection = _linear(hidden, vocab, INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


def shift_half(x: Tensor) -> Tensor:
    """Take the second half of the channels from one position earlier. x: [batch, seq, hidden]. arXiv:2305.13048."""
    now, before = x.chunk(2, dim=-1)
    return torch.cat([now, F.pad(before, (0, 0, 1, -1))], dim=-1)


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats. logits: [batch, seq, vocab], labels: [batch, seq] -> scalar."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


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


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear
