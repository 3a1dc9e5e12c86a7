"""Time that monitors take on the training thread, as a share of the median step.

python tools/bench/monitors.py --steps 300 --layers 12 --hidden 768

A decoder is trained with each monitor in turn whose package is installed (tensorboard, csv_monitor, wandb offline, mlflow's
file store, the folder of `run_record`), with all of them, and with none; values are due every tenth step, and nothing is
printed. What counts: the calls of the step monitor at a step's begin and end, and of the monitors' collecting and writing, on
the host's clock.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

import parallel3d
from parallel3d.models import CausalLMLoss, DecoderConfig, decoder
from parallel3d.monitor.steps import StepMonitor
from parallel3d.monitor.writers import MonitorMaster
from parallel3d.pipe import PipelineModule

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
WARM_UP = 20


class Spent:
    """Seconds spent in methods since the last step."""

    def __init__(self, *methods: tuple[type, str]):
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def sections(folder: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each monitor that can be used here."""
    found = {
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
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if step >= WARM_UP:
            steps.append(time.perf_counter() - begin)
            own.append(spent.seconds)
    engine.destroy()
    return {"step_s": median(steps), "monitors_mean_s": sum(own) / len(own), "monitors_median_s": median(own)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"steps": 300, "layers": 12, "hidden": 768, "context": 1024, "batch": 8, "vocabulary": 32000}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    spent = Spent((StepMonitor, "begin"), (StepMonitor, "finish"), (MonitorMaster, "collect"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WANDB_DIR"] = folder
        known = sections(folder)
        cases = {"none": {}, **{name: {name: section} for name, section in known.items()}, "all": known}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(json.dumps({"device": device, "torch": torch.__version__, "arguments": vars(args)}))
        for name, monitors in cases.items():
            found = train(args, spent, monitors)
            share = found["monitors_mean_s"] / found["step_s"]
            numbers = {key: round(value, 7) for key, value in {**found, "share": share}.items()}
            print(json.dumps({"monitors": name, **numbers}), flush=True)


if __name__ == "__main__":
    main()
