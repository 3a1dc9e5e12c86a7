"""Measure what fp8 saves of a decoder block's forward and backward: one GPU at its power limit, one JSON file, one table.

python tools/bench/fp8.py --out fp8.json
python tools/bench/fp8.py --cpu --size tiny --seconds 1
python tools/bench/run.py --size 3b --micro_batches 8 --cases pp1-compile-cudnn,pp1-compile-cudnn-fp8   # a whole step

Blocks of examples/train_llama.py, one after the other, compiled, attention by cuDNN where it can, micro-batch 1, without steps
of the optimizer. Weights are cast to fp8 once, as in a step of many micro-batches. Each variant runs for some seconds, so that
the device reaches its power limit; its time is the median over the second half of them. torchao's tensor-wise linears run in
the same blocks, without parallel3d, if it is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ours  # noqa: F401 (first: it finds the example's layers, and this checkout's package)
import torch
from host import cuda_version, find_gpus
from plain import BACKENDS
from results import TORCHAO, as_text, block_table
from run import describe_run
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from train_llama import SIZES, Block, Size

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

CALLS = 10  # forwards and backwards of all blocks between two synchronizations
# Variants of parallel3d -> their configuration.
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8": {"enabled": True}},
    "fp8, weight gradients in bf16": {"fp8": {"enabled": True, "weight_gradient": "bf16"}},
    "fp8, row-wise": {"fp8": {"enabled": True, "recipe": "rowwise"}},
}


@dataclass(frozen=True)
class Workload:
    """Blocks to measure, for how many seconds."""

    size: str
    blocks: int
    seconds: float


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b", help="of the model whose blocks are measured")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each variant")
    parser.add_argument(
        "--without", action="append", default=[], choices=[*VARIANTS, TORCHAO], help="variant to leave out"
    )
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("fp8.json"))
    return parser.parse_args()


def own_blocks(work: Workload, variant: str) -> Callable[[Tensor, Tensor], None]:
    """Return a function that runs compiled blocks of parallel3d forward and backward, of (input, gradient of the output)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 10**6,  # no step ends
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "steps_per_print": None,
        "attention": {"backend": ["cudnn", "flash", "efficient", "math"] if torch.cuda.is_available() else "auto"},
        "compile": {"enabled": True},
        **VARIANTS[variant],
    }
    size = SIZES[work.size]
    # The first and the last layer, embedding and head elsewhere, stay out of fp8.
    layers = [LayerSpec(nn.Identity), *(LayerSpec(Block, size) for _ in range(work.blocks)), LayerSpec(nn.Identity)]
    model = PipelineModule(layers, num_stages=1, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)

    def run(x: Tensor, gradient: Tensor) -> None:
        engine.backward((engine(x) * gradient).sum())
        engine.step()

    return run


def torchao_blocks(work: Workload) -> Callable[[Tensor, Tensor], None]:
    """Return the same of plain blocks whose linears are torchao's; gradients accumulate in bf16."""
    from torchao.float8 import convert_to_float8_training

    blocks = nn.Sequential(*(Block(SIZES[work.size]) for _ in range(work.blocks))).to(torch.bfloat16)
    if torch.cuda.is_available():
        blocks.cuda()
    convert_to_float8_training(blocks)
    for block in blocks:
        block.compile(dynamic=False)

    def run(x: Tensor, gradient: Tensor) -> None:
        with sdpa_kernel(BACKENDS, set_priority=True):
            (blocks(x) * gradient).sum().backward()

    return run


def sustained(run: Callable[[Tensor, Tensor], None], size: Size, seconds: float) -> list[float]:
    """Return the seconds of a call, of each group of CALLS in the second half of the time."""
    generator = torch.Generator().manual_seed(0)
    # What a GPU multiplies sets its power, and so its clock: not constants.
    x, gradient = (torch.randn(1, size.seq, size.hidden, generator=generator).bfloat16() for _ in range(2))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        x, gradient = x.cuda(), gradient.cuda()
    x.requires_grad_()  # as what another block returns
    times: list[float] = []
    end = None
    while end is None or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(CALLS if end is not None else 3):
            run(x, gradient)
            x.grad = None
        if on_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if end is None:  # compiled and warm
            end = now + seconds
        else:
            times.append((now - start) / CALLS)
    return times[len(times) // 2 :]


def main() -> int:
    """Measure, write, print."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    work = Workload(args.size, args.blocks, args.seconds)
    variants = [*VARIANTS, *([TORCHAO] if importlib.util.find_spec("torchao") else [])]
    result = describe_run(args, gpus, work, "fp8.py") | {"blocks": []}
    print(f"{result['hardware']['name']}, commit {result['commit']}", flush=True)
    for variant in variants:
        if variant in args.without:
            continue
        torch._dynamo.reset()
        run = torchao_blocks(work) if variant == TORCHAO else own_blocks(work, variant)
        times = sustained(run, SIZES[work.size], work.seconds)
        peak = torch.cuda.max_memory_allocated() if gpus else 0
        row = {"variant": variant, "ms": [t / work.blocks * 1e3 for t in times], "peak_gib": peak / 2**30}
        result["blocks"].append(row)
        print(f"{variant}: {median(row['ms']):.3f} ms a block", flush=True)
        del run
        gc.collect()
        if gpus:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("", as_text(block_table(result["blocks"])), sep="\n", flush=True)
    parallel3d.comm.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main())
