"""One process of a plain PyTorch training loop on the layers of ours.py; prints a line `RESULT {...}`.

torchrun --nproc_per_node 1 tools/bench/plain.py --size 1b --micro_batches 8 --compile --cudnn

What a careful user writes for one GPU: bf16 weights whose gradients autograd accumulates in bf16, fp32 masters with fused
AdamW, clipping at 1.0; with --compile each block, and the loss.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from typing import Any

import ours  # first: it finds the example's layers
import torch
import torch.distributed as dist
from measured import measure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_llama import SIZES, Block, Size, decoder_layers, fixed_batch, loss_fn

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--compile", action="store_true", help="compile blocks and loss")
    parser.add_argument("--cudnn", action="store_true", help="attention by cuDNN where it can")
    parser.set_defaults(pp=1, dp=1, tp=1, zero=0, schedule="", chunks=1)
    return parser.parse_args()


class PlainLoop:
    """A model, its fp32 masters and their optimizer. `step` trains one batch."""

    def __init__(self, args: argparse.Namespace, size: Size, device: torch.device):
        layers = []
        for k, spec in enumerate(decoder_layers(size, "block")):
            torch.manual_seed(1234 + k)  # the engine's weights
            with device:
                layers.append(spec.build(None))
        self.model, self.loss_fn = nn.Sequential(*layers), loss_fn
        if args.compile:
            self.loss_fn = torch.compile(loss_fn)
            for layer in layers:
                if isinstance(layer, Block):
                    layer.compile()
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().clone() for p in self.parameters]
        for p in self.parameters:
            p.data = p.data.bfloat16()
        options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.masters, **options, fused=device.type == "cuda")
        batch = fixed_batch(size, args.micro_batch, args.micro_batches, seed=0)
        self.batch = [(x.to(device), y.to(device)) for x, y in batch]

    def step(self) -> Tensor:
        """Train the batch; return its mean loss."""
        total = 0.0
        for inputs, labels in self.batch:
            loss = self.loss_fn(self.model(inputs), labels) / len(self.batch)
            loss.backward()
            total = total + loss.detach()
        for master, p in zip(self.masters, self.parameters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return total


def main() -> None:
    """Train, measure, print."""
    args = parse_arguments()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")  # for the helpers that ours.py shares
    loop = PlainLoop(args, SIZES[args.size], torch.device("cuda", 0) if cuda else torch.device("cpu"))
    with sdpa_kernel(BACKENDS, set_priority=True) if args.cudnn else nullcontext():
        measured = measure(loop.step, args.warmup, args.steps)
    kind = "compiled" if args.compile else "eager"
    name = f"plain PyTorch, {kind}, m{args.micro_batches} mb{args.micro_batch}"
    print("RESULT " + json.dumps(ours.make_result(args, measured, {"name": name})), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
