"""Measure what each policy of recomputation holds and costs: one GPU, one JSON file, two tables.

python tools/bench/recomputation.py --out recomputation.json                     # 7b blocks, and the peaks of 1b and 3b
python tools/bench/recomputation.py --peaks "" --blocks 8 --repeats 15           # the blocks alone
python tools/bench/recomputation.py --cpu --model gpt2 --seq 256 --how eager --peaks ""

Blocks of a decoder in bf16, one after the other, forward and backward, attention by cuDNN where it can. What a block holds is
what was allocated between the forward and the backward, the block's input included. The policies take turns, so that the
device's clock and heat are the same for all; a time is the median over the turns.

Peaks are those of trainings of whole models (plan_accuracy.py), beside the planner's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Last, so that a package that PYTHONPATH names goes before this checkout's.
sys.path.append(str(Path(__file__).parents[2]))

import plan_accuracy
import torch
from host import cuda_version, find_gpus
from results import as_markdown, as_text
from run import describe_run, split_names
from torch import Tensor

import parallel3d
from parallel3d.config import load
from parallel3d.monitor.memory import LiveStorages
from parallel3d.pipe import PipelineModule
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.model import PlannedModel, load_model

HOW = ("eager", "compiled")
# Words of the layout of each policy, and of each model whose peaks are measured.
WORDS = {"none": "", "cheap": ",cheap", "attention": ",attention", "full": ",ckpt1"}
LAYOUTS = {"1b": "m2,mb4", "3b": "m2"}
GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """Blocks to measure: of a model, in micro-batches of so many samples of `seq` tokens; calls: micro-batches a turn."""

    model: str
    seq: int
    micro_batch: int
    blocks: int
    calls: int
    repeats: int


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="7b", help="as p3d plan takes it, of parallel3d's own layers")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--calls", type=int, default=8, help="micro-batches a turn")
    parser.add_argument("--repeats", type=int, default=11, help="turns")
    parser.add_argument("--how", default="eager,compiled", help="eager, compiled or both, separated by a comma")
    parser.add_argument("--peaks", default="1b,3b", help="models to train; '' for none")
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("recomputation.json"))
    args = parser.parse_args()
    if unknown := [how for how in split_names(args.how) if how not in HOW]:
        parser.error(f"--how has no {unknown[0]!r}; it has {', '.join(HOW)}")
    if unknown := [model for model in split_names(args.peaks) if model not in LAYOUTS]:
        parser.error(f"--peaks has no {unknown[0]!r}; it has {', '.join(LAYOUTS)}")
    if min(args.blocks, args.calls, args.repeats) < 1:
        parser.error("--blocks, --calls and --repeats are at least 1")
    return args


def make_config(work: Workload, policy: str, compiled: bool, on_gpu: bool) -> dict[str, Any]:
    """Return the configuration of blocks under a policy; its step has more micro-batches than are run."""
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 8 + work.calls * (work.repeats + 1),
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},  # whose state is small
        "steps_per_print": None,
        "attention": {"backend": ["cudnn", "flash", "efficient", "math"] if on_gpu else "auto"},
        "activation_checkpointing": {"policy": policy},
        "compile": {"enabled": compiled},
        "pipeline": {"stages": 1},
    }


class Blocks:
    """Blocks that train under a policy, without steps of the optimizer."""

    def __init__(self, model: PlannedModel, work: Workload, policy: str, compiled: bool, on_gpu: bool):
        config = make_config(work, policy, compiled, on_gpu)
        module = PipelineModule(list(model.layers[1 : 1 + work.blocks]), seed_layers=True, config=config)
        self._engine, *_ = parallel3d.initialize(model=module, config=config)
        self._on_gpu = on_gpu
        shape = work.micro_batch, work.seq, model.layers[0].module_args[0].hidden_size
        generator = torch.Generator().manual_seed(0)
        # What a GPU multiplies sets its power, and so its clock: not constants.
        values = (torch.randn(shape, generator=generator) for _ in range(2))
        self._x, self._gradient = (v.to(self._engine.device, torch.bfloat16) for v in values)

    def _forward(self) -> Tensor:
        y: Tensor = self._engine(self._x)
        return y

    def _backward(self, y: Tensor) -> None:
        self._engine.backward((y * self._gradient).sum())
        self._engine.step()

    def held(self) -> int:
        """Return the bytes that a forward of all blocks leaves allocated, its output among them."""
        if self._on_gpu:
            before = torch.cuda.memory_allocated()
            y = self._forward()
            held = torch.cuda.memory_allocated() - before
        else:
            with LiveStorages() as storages:
                y = self._forward()
                held = storages.nbytes
        self._backward(y)
        return held

    def run(self, calls: int) -> float:
        """Return the seconds of a micro-batch through all blocks, forward and backward."""
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            self._backward(self._forward())
        self._synchronize()
        return (time.perf_counter() - begin) / calls

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def predicted(model: PlannedModel, work: Workload, policy: str, compiled: bool, device: Any) -> int:
    """Return the bytes that the planner says a block holds, its input included."""
    config = load(
        {"train_micro_batch_size_per_gpu": work.micro_batch, **model.config, "compile": {"enabled": compiled}}
    )
    profile = ModelProfile(model.layers, *model.sample(1), model.loss_fn, config, device)
    if policy == "full":
        return sum(profile.layers(micro_batch=work.micro_batch)[1].inputs)
    selective: Any = None if policy == "none" else policy
    layer = profile.layers(1, False, work.micro_batch, int(selective is not None), selective)[1]
    saved = layer.whole.saved
    return saved.own + sum(layer.inputs[k] for k in saved.inputs)


def measure(model: PlannedModel, work: Workload, how: str, on_gpu: bool) -> list[dict[str, Any]]:
    """Return a row for each policy: GiB of a block, held and predicted, and the milliseconds of each turn."""
    compiled, device = how == "compiled", "cuda" if on_gpu else "cpu"
    policies = {p: Blocks(model, work, p, compiled, on_gpu) for p in WORDS}
    for blocks in policies.values():
        blocks.run(2)
    held = {p: blocks.held() for p, blocks in policies.items()}
    times: dict[str, list[float]] = {p: [] for p in policies}
    for _ in range(work.repeats):
        for p, blocks in policies.items():
            times[p].append(blocks.run(work.calls) / work.blocks * 1e3)
    return [
        {
            "how": how,
            "policy": p,
            "gib": held[p] / work.blocks / GIB,
            "predicted_gib": predicted(model, work, p, compiled, device) / GIB,
            "ms": times[p],
        }
        for p in policies
    ]


def block_table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of text: what a block holds and how long it takes under each policy, beside "none"."""
    table = [["how", "policy", "GiB a block", "of none", "predicted", "ms a block", "min-max", "of none"]]
    for row in rows:
        none = next(r for r in rows if (r["how"], r["policy"]) == (row["how"], "none"))
        table.append(
            [
                row["how"],
                row["policy"],
                f"{row['gib']:.3f}",
                f"{row['gib'] / none['gib']:.3f}",
                f"{row['predicted_gib']:.3f} ({row['predicted_gib'] / row['gib'] - 1:+.1%})",
                f"{median(row['ms']):.3f}",
                f"{min(row['ms']):.3f}-{max(row['ms']):.3f}",
                f"{median(row['ms']) / median(none['ms']):.3f}",
            ]
        )
    return table


def measure_peaks(models: Sequence[str], args: argparse.Namespace) -> int:
    """Train each model under each policy and print its peaks; 0 if all trained."""
    layouts = [f"{model}:{LAYOUTS[model]}{words}" for model in models for words in WORDS.values()]
    out = args.out.with_name(f"{args.out.stem}_peaks.json")
    words = ["--layouts", *layouts, "--steps", "2", "--out", str(out)]
    return plan_accuracy.main([*words, *(["--commit", args.commit] if args.commit else [])])


def main() -> int:
    """Measure, write, print; 0 if all trainings have ended well."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    work = Workload(args.model, args.seq, args.micro_batch, args.blocks, args.calls, args.repeats)
    model = load_model(work.model, work.seq)
    run = describe_run(args, gpus, work, "recomputation.py") | {"blocks": []}
    print(f"{run['hardware']['name']}, commit {run['commit']}", flush=True)
    for how in split_names(args.how):
        run["blocks"] += measure(model, work, how, bool(gpus))
        gc.collect()
        torch.cuda.empty_cache()
        args.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        print("", as_text(block_table(run["blocks"])), sep="\n", flush=True)
    print("", as_markdown(block_table(run["blocks"])), "", sep="\n", flush=True)
    parallel3d.comm.destroy()
    models = split_names(args.peaks)
    return measure_peaks(models, args) if models else 0


if __name__ == "__main__":
    sys.exit(main())
