"""A Llama-shaped decoder on synthetic tokens: what a layout costs in time and memory.

The layers are plain PyTorch with the package's kernels of RMSNorm and SwiGLU. Sizes go from one for the CPU to 13 B parameters.
It shows schedules and their chunks, half blocks as layers (--units half) and activation checkpointing, and prints losses, the
median time of a step and the peak memory as JSON. It learns one fixed batch by heart, so the loss falls within a few steps.
Weights are fp32, matmuls TF32 on CUDA.

parallel3d --num_gpus 4 examples/train_llama.py --size 1b --stages 4
parallel3d --num_procs 4 examples/train_llama.py --size tiny --stages 2 --schedule interleaved --chunks 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d
from parallel3d.kernels.rms_norm import rms_norm
from parallel3d.kernels.swiglu import swiglu
from parallel3d.pipe import LayerSpec, PipelineModule


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int


SIZES = {
    "tiny": Size(layers=8, hidden=64, heads=4, ffn=176, vocab=256, seq=32),
    "125m": Size(layers=12, hidden=768, heads=12, ffn=2048, vocab=32000, seq=1024),
    "1b": Size(layers=24, hidden=2048, heads=16, ffn=5504, vocab=32000, seq=2048),
    "3b": Size(layers=32, hidden=2560, heads=20, ffn=6912, vocab=32000, seq=4096),
    "7b": Size(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000, seq=4096),
    "13b": Size(layers=40, hidden=5120, heads=40, ffn=13824, vocab=32000, seq=4096),
    "30b": Size(layers=60, hidden=6656, heads=52, ffn=17920, vocab=32000, seq=4096),
}


class Embedding(nn.Module):
    """ids: [batch, seq] -> [batch, seq, hidden]."""

    def __init__(self, size: Size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size.vocab, size.hidden).normal_(std=0.02))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Attention(nn.Module):
    """x + rotary attention of RMSNorm(x). x: [batch, seq, hidden] -> the same."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.head_dim = size.heads, size.hidden // size.heads
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=0.02)
        frequencies = 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(size.seq), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding. x: [batch, seq, heads, head_dim]. arXiv:2104.09864."""
        seq = x.shape[1]
        first, second = x.chunk(2, dim=-1)
        cos, sin = (t[:seq, None].to(x.dtype) for t in (self.cos, self.sin))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, hidden = x.shape
        # Split on the last dim: cuDNN's attention takes these strides as they are.
        normed, x = rms_norm(x, self.norm.weight, self.norm.eps)
        qkv = self.qkv(normed).split(hidden, dim=-1)
        query, key, value = (t.unflatten(-1, (self.heads, self.head_dim)) for t in qkv)
        query, key, value = (t.transpose(1, 2) for t in (self.rotate(query), self.rotate(key), value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class FeedForward(nn.Module):
    """x + SwiGLU of RMSNorm(x). x: [batch, seq, hidden] -> the same. arXiv:2002.05202."""

    def __init__(self, size: Size):
        super().__init__()
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.gate_up = nn.Linear(size.hidden, 2 * size.ffn, bias=False)
        self.down = nn.Linear(size.ffn, size.hidden, bias=False)
        for linear in (self.gate_up, self.down):
            nn.init.normal_(linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        normed, x = rms_norm(x, self.norm.weight, self.norm.eps)
        return x + self.down(swiglu(self.gate_up(normed)))


class Block(nn.Module):
    """Attention and feed-forward as one unit. x: [batch, seq, hidden] -> the same."""

    def __init__(self, size: Size):
        super().__init__()
        self.attention, self.feed_forward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attention(x))


# What a block is made of: one layer, or two between which a stage may end.
UNITS = {"block": [Block], "half": [Attention, FeedForward]}


class Head(nn.Module):
    """x: [batch, seq, hidden] -> logits [batch, seq, vocab]."""

    def __init__(self, size: Size):
        super().__init__()
        self.norm = nn.RMSNorm(size.hidden, eps=1e-5)
        self.out = nn.Linear(size.hidden, size.vocab, bias=False)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def decoder_layers(size: Size, units: str) -> list[LayerSpec]:
    """Return the layers: embedding, blocks in these units, head."""
    blocks = [LayerSpec(unit, size) for _ in range(size.layers) for unit in UNITS[units]]
    return [LayerSpec(Embedding, size), *blocks, LayerSpec(Head, size)]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over tokens, computed in fp32."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def fixed_batch(size: Size, micro_batch: int, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(size.vocab, (count, micro_batch, size.seq + 1), generator=generator)
    return [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in ids]


def forever(batch: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--micro_batch", type=int, default=1)
    parser.add_argument("--micro_batches", type=int, default=8, help="micro-batches a step, of each replica")
    parser.add_argument("--units", choices=UNITS, default="block", help="what a stage holds a whole number of")
    parser.add_argument("--checkpoint", type=int, default=0, help="layers a group of activation checkpointing")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    size = SIZES[args.size]

    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.95]}},
        "steps_per_print": None,
        "pipeline": {
            "schedule": args.schedule,
            "num_chunks": args.chunks,
            "placement": "v" if args.schedule == "zbv" else "loop",
            "activation_checkpoint_interval": args.checkpoint,
        },
    }
    layers = decoder_layers(size, args.units)
    model = PipelineModule(layers, num_stages=args.stages, loss_fn=loss_fn, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    replica = engine.grid.get_data_parallel_rank()
    data = forever(fixed_batch(size, args.micro_batch, args.micro_batches, seed=replica))

    losses, times = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        losses.append(float(engine.train_batch(data)))
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if engine.device.type == "cuda" else None
    if engine.global_rank == 0:
        step_s = statistics.median(times[len(times) // 2 :])
        tokens = engine.train_batch_size() * size.seq
        result = {"losses": losses, "step_s": step_s, "tokens_per_s": tokens / step_s, "peak_gib_rank0": peak}
        print(json.dumps(result), flush=True)
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
