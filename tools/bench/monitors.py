"""Time that monitors take on the training thread, as a share of the median step: one JSON file, one table.

python tools/bench/monitors.py --out monitors.json
python tools/bench/monitors.py --layers 2 --hidden 128 --context 128 --steps 100 --out monitors.json   # on the CPU

A decoder is trained with none, with the step's line (in a file, every tenth step), with each monitor in turn whose package is
installed (tensorboard, csv_monitor, wandb offline, mlflow's file store, the folder of `run_record`), and with all at once;
monitors get values of speed and memory every tenth step. What counts: the calls of the step monitor at a step's begin and end,
and of the monitors' collecting and writing, on the host's clock, once the device is idle.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import ours  # noqa: F401 (first: it finds this checkout's package)
import torch
from host import cuda_version, find_gpus
from results import as_text
from run import describe_run

import parallel3d
from parallel3d.models import CausalLMLoss, DecoderConfig, decoder
from parallel3d.monitor.steps import StepMonitor
from parallel3d.monitor.writers import MonitorMaster
from parallel3d.pipe import PipelineModule

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
WARM_UP = 20


class Spent:
    """Seconds spent in methods since they were last set to 0."""

    def __init__(self, *methods: tuple[type, str]):
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wait()
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def sections(folder: str) -> dict[str, Any]:
    """Return the configuration of the line and of each monitor that can be used here."""
    found: dict[str, Any] = {
        "steps_per_print": 10,
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "tensorboard"},
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "wandb": {"enabled": True},
        "mlflow": {"enabled": True, "tracking_uri": Path(folder, "mlruns").as_uri()},
        "run_record": {"directory": str(Path(folder, "run")), "after_steps": 10**6},
    }
    return {name: section for name, section in found.items() if name not in PACKAGES or find_spec(PACKAGES[name])}


def train(args: argparse.Namespace, spent: Spent, monitors: dict[str, Any]) -> dict[str, float]:
    """Train with these monitors: the median step and the mean and median time of monitors in a step, in seconds."""
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": torch.cuda.is_available()},
        "steps_per_print": None,
        **monitors,
    }
    shape = {"hidden_size": args.hidden, "ffn_size": 4 * args.hidden, "num_layers": args.layers}
    sizes = DecoderConfig(vocab_size=args.vocabulary, num_heads=args.hidden // 64, **shape)
    model = PipelineModule(decoder(sizes), num_stages=1, loss_fn=CausalLMLoss(shift=True), config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    ids = torch.randint(args.vocabulary, (args.batch, args.context))

    def batches() -> Iterator[Any]:
        while True:
            yield ids, ids

    data, steps, own = batches(), [], []
    for step in range(WARM_UP + args.steps):
        spent.seconds, begin = 0.0, time.perf_counter()
        engine.train_batch(data)
        wait()
        if step >= WARM_UP:
            steps.append(time.perf_counter() - begin)
            own.append(spent.seconds)
    engine.destroy()
    mean = sum(own) / len(own)
    return {"step_s": median(steps), "mean_s": mean, "median_s": median(own), "share": mean / median(steps)}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 300, "layers": 12, "hidden": 768, "context": 1024, "batch": 8, "vocabulary": 32000}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("monitors.json"))
    parser.add_argument("--commit", help="of a copy without git")
    args = parser.parse_args()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    spent = Spent((StepMonitor, "begin"), (StepMonitor, "finish"), (MonitorMaster, "collect"))
    workload = argparse.Namespace(**{name: getattr(args, name) for name in defaults})
    result = describe_run(args, find_gpus() if cuda_version() else [], workload, "monitors.py") | {"monitors": {}}
    table = [["monitor", "median step, ms", "monitors, ms a step", "median", "share"]]
    # A library's own process may still write there at its end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Path(folder, "lines").open("w") as lines:
        os.environ["WANDB_DIR"] = folder
        known = sections(folder)
        for name, used in {"none": {}, **{name: {name: known[name]} for name in known}, "all": known}.items():
            with redirect_stdout(lines):
                found = train(args, spent, used)
            result["monitors"][name] = {key: round(value, 7) for key, value in found.items()}
            *times, share = found.values()
            table.append([name, *(f"{1e3 * seconds:.3f}" for seconds in times), f"{share:.2%}"])
            print(f"{name}: {share:.2%}", flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("", as_text(table), sep="\n")


if __name__ == "__main__":
    main()
