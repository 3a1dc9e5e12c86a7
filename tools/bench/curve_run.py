"""One process of a loss curve; rank 0 prints a line `RESULT {"curves": {...}}`. Started by curves.py.

The arguments are ours.py's, and --plain. With it each process trains alone, in plain PyTorch, as one of PLAIN; else all
train together by the engine, as ours.py does. Both see the same micro-batches: walks on a fixed Markov chain, always new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import ours
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_llama import SIZES, Size

import parallel3d
from parallel3d.rng import layer_seed

BASE_SEED = 1234  # PipelineModule's
STATES = 512  # of the chain at most, so that there is something to learn within 50 steps
CHANCES = (0.55, 0.25, 0.15, 0.05)  # of a state's successors: at best a loss of 1.1 nats


@dataclass(frozen=True)
class Plain:
    """Settings of a plain run. reverse: micro-batches, and so their gradients' sum, in the other order; compiled: by
    torch.compile, layer by layer, which keeps in fp32 what lies between the operators that it fuses.
    """

    dtype: torch.dtype
    reverse: bool = False
    math_attention: bool = False
    compiled: bool = False

    def attention(self) -> AbstractContextManager[Any]:
        """PyTorch's choice, or another kernel for the same."""
        return sdpa_kernel(SDPBackend.MATH) if self.math_attention else nullcontext()


# By rank. Those in bf16 differ in rounding alone: what they differ by is the noise.
PLAIN = {
    "plain fp32": Plain(torch.float32),
    "plain bf16": Plain(torch.bfloat16),
    "plain bf16, other order": Plain(torch.bfloat16, reverse=True),
    "plain bf16, other order and attention": Plain(torch.bfloat16, reverse=True, math_attention=True),
    "plain bf16, compiled": Plain(torch.bfloat16, compiled=True),
    "plain bf16, compiled, other order": Plain(torch.bfloat16, reverse=True, compiled=True),
}


@cache
def successors(states: int) -> list[list[int]]:
    """[states, len(CHANCES)]: where each state may go, the likeliest first."""
    numbers: list[list[int]] = torch.randint(
        states, (states, len(CHANCES)), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return numbers


def walk(size: Size, micro_batch: int, number: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of the `number`-th micro-batch of all, [micro_batch, seq] each."""
    generator = torch.Generator().manual_seed(number)
    states = min(size.vocab, STATES)
    chosen = torch.multinomial(torch.tensor(CHANCES), micro_batch * size.seq, replacement=True, generator=generator)
    now = torch.randint(states, (micro_batch,), generator=generator).tolist()
    following, tokens = successors(states), [now]
    for choices in chosen.view(size.seq, micro_batch).tolist():
        now = [following[state][choice] for state, choice in zip(now, choices, strict=True)]
        tokens.append(now)
    ids = torch.tensor(tokens).t()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def stream(args: argparse.Namespace, replica: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """A replica's micro-batches: of each step's, counted over all replicas, every dp-th."""
    number = replica
    while True:
        inputs, labels = walk(SIZES[args.size], args.micro_batch, number)
        yield inputs.to(device), labels.to(device)
        number += args.dp


def train_plainly(args: argparse.Namespace, how: Plain, device: torch.device) -> list[float]:
    """The losses of a run without engine: bf16 weights rounded from fp32 masters, gradients summed up in fp32."""
    layers = []
    for k, spec in enumerate(ours.layer_specs(args)):
        torch.manual_seed(layer_seed(BASE_SEED, k))
        with device:
            layers.append(spec.build())
    model = nn.Sequential(*layers)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(how.dtype)
    for layer in model if how.compiled else ():
        layer.compile()
    config = ours.make_config(args, device.type == "cuda")
    optimizer = torch.optim.AdamW(masters, **config["optimizer"]["params"])
    data, count = stream(args, 0, device), args.micro_batches
    losses = []
    for _ in range(args.steps):
        batch = [next(data) for _ in range(count)]
        total = torch.zeros((), dtype=torch.float64, device=device)
        for master in masters:
            master.grad = torch.zeros_like(master)
        for inputs, labels in batch[::-1] if how.reverse else batch:
            with how.attention():
                loss = ours.loss_of(args)(model(inputs), labels)
                (loss / count).backward()
            total += loss.detach() / count
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad += p.grad
                p.grad = None
        nn.utils.clip_grad_norm_(masters, config["gradient_clipping"])
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        losses.append(total)
    return [float(loss) for loss in losses]


def plain_curves(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the curves of PLAIN, one per process; processes share devices where there are fewer. Collective."""
    dist.init_process_group("gloo")
    torch.set_float32_matmul_precision("high")
    name = list(PLAIN)[dist.get_rank()]
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", dist.get_rank() % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    curves: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(curves, (name, train_plainly(args, PLAIN[name], device)))
    return dict(curves)


def engine_curve(args: argparse.Namespace) -> list[float]:
    """The losses of a case. Collective."""
    engine = ours.build(args)
    data = stream(args, engine.grid.get_data_parallel_rank(), engine.device)
    losses = [engine.train_batch(data) for _ in range(args.steps)]
    return [float(loss) for loss in losses]


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--plain", action="store_true")
    own, rest = parser.parse_known_args()
    sys.argv = [sys.argv[0], *rest]
    args = ours.parse_arguments()
    curves = plain_curves(args) if own.plain else {"case": engine_curve(args)}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"curves": curves}), flush=True)
    parallel3d.comm.destroy() if not own.plain else dist.destroy_process_group()


if __name__ == "__main__":
    main()
