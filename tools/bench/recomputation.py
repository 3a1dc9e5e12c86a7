"""Measure what each policy of recomputation holds and costs: one GPU, a JSON file for blocks and one for peaks, tables.

python tools/bench/recomputation.py --out recomputation.json                     # 7b blocks, and the peaks of 1b and 3b
python tools/bench/recomputation.py --peaks "" --blocks 8 --repeats 15           # the blocks alone
python tools/bench/recomputation.py --cpu --model gpt2 --seq 256 --how eager --peaks tiny

Blocks of a decoder in bf16, one after the other, forward and backward, attention by cuDNN where it can. What a block holds is
what was allocated between the forward and the backward, the block's input included. The policies take turns, so that the
device's clock and heat are the same for all; a time is the median over the turns.

"auto" has two budgets: halfway between what "cheap" and "none" need, and between "full" and "attention". What blocks need is
what their weights, gradients and optimizer take, and the peak of a micro-batch.

Peaks are those of trainings of whole models (plan_accuracy.py), beside the planner's.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Last, so that a package that PYTHONPATH names goes before this checkout's.
sys.path.append(str(Path(__file__).parents[2]))

import plan_accuracy
import torch
from accuracy import peak_errors
from host import cuda_version, find_gpus
from policies import policy_table, verdicts
from results import as_markdown, as_text
from run import describe_run, split_names
from torch import Tensor

import parallel3d
from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.monitor.memory import LiveStorages
from parallel3d.pipe import PipelineModule
from parallel3d.pipe.calls import policy_rule
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.model import PlannedModel, load_model

HOW = ("eager", "compiled")
# Words of the layout of each policy, and of each model whose peaks are measured.
WORDS = {"none": "", "cheap": ",cheap", "attention": ",attention", "full": ",ckpt1"}
LAYOUTS = {"1b": "m2,mb4", "3b": "m2", "tiny": "m2"}
PEAK = 0.03  # of the error of predicted peaks
GIB = 2**30
EVALUATION = 20.0  # seconds that predictions of peaks may take


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
    parser.add_argument("--peaks", default="1b,3b", help="models to train: 1b, 3b, tiny; '' for none")
    parser.add_argument(
        "--budget", type=float, default=280.0, help="seconds of all; trainings that are too long are skipped"
    )
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


def make_config(work: Workload, policy: str, compiled: bool, on_gpu: bool, budget: float | None) -> dict[str, Any]:
    """Return the configuration of blocks under a policy; its step has more micro-batches than are run. budget: in GiB."""
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 8 + work.calls * (work.repeats + 1),
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},  # whose state is small
        "steps_per_print": None,
        "attention": {"backend": ["cudnn", "flash", "efficient", "math"] if on_gpu else "auto"},
        "activation_checkpointing": {"policy": policy, "memory_budget": budget},
        "compile": {"enabled": compiled},
        "pipeline": {"stages": 1},
    }


class Allocation:
    """Context that measures what is allocated inside. held: bytes that are left at its end; peak: the most at a time."""

    def __init__(self, on_gpu: bool):
        self._storages = None if on_gpu else LiveStorages()
        self.held = self.peak = 0

    def __enter__(self) -> Allocation:
        if self._storages is not None:
            self._storages.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._storages is not None:
            self._storages.__exit__(*error)
            self.held, self.peak = self._storages.nbytes, self._storages.peak
        else:
            self.held = torch.cuda.memory_allocated() - self._before
            self.peak = torch.cuda.max_memory_allocated() - self._before


class Blocks:
    """Blocks that train under a policy, without steps of the optimizer.

    budget: GiB, for "auto". held: bytes that a forward leaves allocated, its output among them; needed: bytes of the blocks'
    state and of a micro-batch at its peak.
    """

    def __init__(
        self,
        model: PlannedModel,
        work: Workload,
        policy: str,
        compiled: bool,
        on_gpu: bool,
        budget: float | None = None,
    ):
        config = make_config(work, policy, compiled, on_gpu, budget)
        shape = work.micro_batch, work.seq, model.layers[0].module_args[0].hidden_size
        generator = torch.Generator().manual_seed(0)
        # What a GPU multiplies sets its power, and so its clock: not constants.
        x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        with Allocation(on_gpu) as state:
            layers = list(model.layers[1 : 1 + work.blocks])
            module = PipelineModule(layers, seed_layers=True, config=config, sample_input=x)
            self._engine, *_ = parallel3d.initialize(model=module, config=config)
        self.policies = Counter(map(policy_rule(None, module.policies, module.layer_names), range(work.blocks), layers))
        self._x, self._gradient = (v.to(self._engine.device, torch.bfloat16) for v in (x, gradient))
        self._x.requires_grad_()  # as what another block returns
        self._on_gpu = on_gpu
        self.run(2)
        with Allocation(on_gpu) as forward:
            y = self._forward()
        self.held = forward.held
        self._backward(y)
        del y
        with Allocation(on_gpu) as whole:
            self.run(1)
        self.needed = state.held + whole.peak

    def _forward(self) -> Tensor:
        y: Tensor = self._engine(self._x)
        return y

    def _backward(self, y: Tensor) -> None:
        self._engine.backward((y * self._gradient).sum())
        self._engine.step()
        self._x.grad = None

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
        return sum(profile.layers(Layout(micro_batch=work.micro_batch))[1].inputs)
    selective: Any = None if policy == "none" else policy
    layout = Layout(micro_batch=work.micro_batch, recompute=int(selective is not None), policy=selective)
    return profile.layers(layout)[1].saved_bytes


def measure(model: PlannedModel, work: Workload, how: str, on_gpu: bool) -> list[dict[str, Any]]:
    """Return a row for each policy and each budget of "auto": GiB, held, predicted and needed; milliseconds of each turn."""
    compiled, device = how == "compiled", "cuda" if on_gpu else "cpu"
    make = partial(Blocks, model, work, compiled=compiled, on_gpu=on_gpu)
    all_blocks: dict[tuple[str, float | None], Blocks] = {(p, None): make(p) for p in WORDS}
    needed = {p: blocks.needed for (p, _), blocks in all_blocks.items()}
    for less, more in (("cheap", "none"), ("full", "attention")):
        budget = (needed[less] + needed[more]) / 2 / GIB
        all_blocks["auto", budget] = make("auto", budget=budget)
    times: dict[tuple[str, float | None], list[float]] = {key: [] for key in all_blocks}
    for _ in range(work.repeats):
        for key, blocks in all_blocks.items():
            times[key].append(blocks.run(work.calls) / work.blocks * 1e3)
    return [
        {
            "how": how,
            "policy": p,
            "gib": blocks.held / work.blocks / GIB,
            "predicted_gib": None if p == "auto" else predicted(model, work, p, compiled, device) / GIB,
            "needed_gib": blocks.needed / GIB,
            "budget_gib": budget,
            "policies": dict(blocks.policies),
            "ms": times[p, budget],
        }
        for (p, budget), blocks in all_blocks.items()
    ]


def measure_peaks(models: Sequence[str], args: argparse.Namespace, budget: float) -> int:
    """Train each model under each policy and print its peaks; 0 if all trained. budget: seconds."""
    layouts = [f"{model}:{LAYOUTS[model]}{words}" for model in models for words in WORDS.values()]
    out = args.out.with_name(f"{args.out.stem}_peaks.json")
    words = ["--layouts", *layouts, "--steps", "1", "--budget", str(budget), "--out", str(out)]
    words += ["--cpu"] if args.cpu else []
    status = plan_accuracy.main([*words, *(["--commit", args.commit] if args.commit else [])])
    rows = json.loads(out.read_text(encoding="utf-8"))["evaluation"]["rows"]
    worst = max((abs(error) for row in rows for error in peak_errors(row)), default=0.0)
    limit = f"{'limit' if worst <= PEAK else 'MORE THAN'} {PEAK:.0%}"
    print(f"Peaks of {len(rows)} of {len(layouts)} trainings are {worst:.1%} off at most ({limit}).")
    return status


def main() -> int:
    """Measure, write, print; 0 if all trainings have ended well."""
    begin, args = time.monotonic(), parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    work = Workload(args.model, args.seq, args.micro_batch, args.blocks, args.calls, args.repeats)
    model = load_model(work.model, work.seq)
    run = describe_run(args, gpus, work, "recomputation.py") | {"policies": []}
    print(f"{run['hardware']['name']}, commit {run['commit']}", flush=True)
    for how in split_names(args.how):
        run["policies"] += measure(model, work, how, bool(gpus))
        gc.collect()
        torch.cuda.empty_cache()
        args.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        table = policy_table(run["policies"])
        print(
            "",
            as_text(table),
            "",
            *verdicts(run["policies"]),
            f"{time.monotonic() - begin:.0f} s",
            sep="\n",
            flush=True,
        )
    if run["policies"]:
        print("", as_markdown(table), "", sep="\n", flush=True)
        parallel3d.comm.destroy()
    models = split_names(args.peaks)
    left = args.budget - EVALUATION - (time.monotonic() - begin)
    return measure_peaks(models, args, left) if models else 0


if __name__ == "__main__":
    sys.exit(main())
