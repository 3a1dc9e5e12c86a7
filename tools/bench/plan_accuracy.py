"""Trains layouts, predicts each of them, and puts predicted beside measured: one JSON file, one table.

python tools/bench/plan_accuracy.py --out plan_accuracy.json                  # 14 layouts of two models on 4 GPUs
python tools/bench/plan_accuracy.py --cpu --layouts tiny:pp2,m4 tiny:dp2,zero1,m2
python tools/bench/plan_accuracy.py --again plan_accuracy.json                # predict the recorded runs anew, without GPUs

A layout's configuration is the planner's, its bounds too. Every layout is a training of a few steps of its own
(planned_run.py), whose run record goes into the file with what all ranks held at most; the file is written after each. Steps
are also predicted with what the other layouts' records teach the planner, this one's left out. accuracy.py says what
predictions must keep. Exits with 1 when a layout has no record.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Last, so that a package that PYTHONPATH names goes before this checkout's.
sys.path.append(str(Path(__file__).parents[2]))

from accuracy import accuracy_table, unmeasured, verdicts
from host import cuda_version, find_commit, find_gpus
from planned_run import model_of
from results import as_text
from run import SHORTEST, describe_run, environment, error_lines, find_result, run_process

from parallel3d.config import load
from parallel3d.config.layout import PartialLayout, configuration, parse_layout
from parallel3d.costs.devices import preset_of
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord, read_run_record
from parallel3d.planner.calibrate.calibration import Calibration, PredictedRun, calibrate
from parallel3d.planner.calibrate.runs import RunPredictor
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.plan import profile_of

WORKER = str(Path(__file__).with_name("planned_run.py"))
# Of one model all take the same samples a step, so that their steps are what a planner chooses by. Micro-batches are large
# enough that the device, not the host, is what eager layers wait for.
LAYOUTS = (
    "7b:pp4,1f1b,m8",
    "7b:pp4,zb-h1,m8",
    "7b:pp4,zbv,m8",
    "7b:pp4,1f1b,m8,ckpt1",
    "7b:pp2,dp2,zero1,1f1b,m4",
    "7b:pp2,tp2,sp,zb-h1,m8",
    "7b:dp4,zero2,m2",
    "7b:tp4,m4,mb2",
    "1b:pp4,interleaved,m8,mb4",
    "1b:dp4,m2,mb4",
    "1b:dp4,zero1,m2,mb4,ckpt1",
    "1b:pp2,dp2,zero2,zb-h1,m4,mb4",
    "1b:dp2,tp2,sp,zero1,m4,mb4",
    "1b:pp2,tp2,1f1b,m8,mb4",
)


@dataclass(frozen=True)
class Task:
    """A layout of a model, and the configuration that it trains with."""

    model: str
    layout: PartialLayout
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the layout in the words of --layouts."""
        return f"{self.model}:{self.layout.text}"


@dataclass(frozen=True)
class Training:
    """Settings of all runs: steps before the timed ones, timed steps, JSON merged into the configuration."""

    warmup: int
    steps: int
    config: Mapping[str, Any]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. words: its arguments, by default those of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="MODEL:LAYOUT", help="in the order they run")
    parser.add_argument("--cluster", help="as p3d plan takes it; default: the preset of this host's GPUs")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON that every layout's configuration has")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a layout may take")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds all may take; the rest is skipped")
    parser.add_argument("--again", type=Path, metavar="FILE", help="train nothing; predict the runs of this file anew")
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("plan_accuracy.json"))
    args = parser.parse_args(words)
    if args.steps < 1 or args.warmup < 2:
        parser.error("--steps is at least 1, --warmup 2, which no run record counts")
    return args


def decided(words: str) -> PartialLayout:
    """Read a layout that says its micro-batches. Raises ConfigError for one of half blocks too."""
    layout = parse_layout(words)
    if "micro_batches" not in layout.given:
        raise ConfigError(f"layout {words!r} doesn't say its micro-batches; add such as m8")
    if layout.units is not None:
        raise ConfigError(f"layout {words!r}: the models that are trained have whole blocks; leave half out")
    return layout


def tasks_of(names: Sequence[str], cluster: Cluster, models: Mapping[str, PlannedModel]) -> list[Task]:
    """Every layout with the planner's bounds. Raises ConfigError."""
    network, predictors = Network(cluster), {}
    tasks = []
    for name in names:
        size, _, words = name.partition(":")
        model, written = models[size], decided(words)
        layout = written.complete()
        if layout.world_size > len(cluster.gpus):
            raise ConfigError(f"{name} needs {layout.world_size} GPUs; {cluster.name} has {len(cluster.gpus)}")
        if size not in predictors:
            profile = profile_of(model, cluster, load(configuration(layout, model.config)))
            predictors[size] = Predictor(model, profile, network)
        bounds = predictors[size].predict(layout).split.bounds
        tasks.append(Task(size, written, configuration(layout, model.config, bounds)))
    return tasks


def train(task: Task, training: Training, gpus: Sequence[Mapping[str, str]], timeout: float) -> dict[str, Any]:
    """The entry of a layout: its record and what its warm-up held, or its last error lines."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config, record = Path(directory) / "config.json", Path(directory) / "record"
        config.write_text(json.dumps(task.config), encoding="utf-8")
        processes = ["--num_gpus" if gpus else "--num_procs", str(task.layout.world_size)]
        command = [sys.executable, "-m", "parallel3d.launcher", *processes, WORKER, "--model", task.model]
        command += ["--config", str(config), "--record", str(record)]
        command += ["--warmup", str(training.warmup), "--steps", str(training.steps)]
        status, output = run_process(command, environment(gpus), timeout)
        result = find_result(output)
        entry = _entry(task, "ok" if result else "failed" if status == "ok" else status, time.monotonic() - begin)
        if result is None:
            return entry | {"error": error_lines(output)}
        return entry | result | {"record": read_run_record(record).model_dump(mode="json")}


def _entry(task: Task, status: str, wall_s: float = 0.0) -> dict[str, Any]:
    return {"model": task.model, "layout": task.layout.text, "status": status, "wall_s": round(wall_s, 1)}


def show(entry: Mapping[str, Any]) -> None:
    """A line about a layout that has just ended; more if it failed."""
    said = f"{entry['record']['step']['median']:.3f} s/step" if "record" in entry else entry["status"]
    print(f"{entry['model']}:{entry['layout']}: {said}   ({entry['wall_s']:.0f} s)", flush=True)
    for line in entry.get("error", []):
        print(f"    {line[:400]}", flush=True)


def run_all(
    tasks: Sequence[Task],
    run: dict[str, Any],
    training: Training,
    gpus: Sequence[Mapping[str, str]],
    args: argparse.Namespace,
) -> None:
    """Train each for which as much of the budget is left as the longest of its model took; write the file after each."""
    end = time.monotonic() + args.budget
    longest: dict[str, float] = {}
    for task in tasks:
        left, needed = end - time.monotonic(), longest.get(task.model, SHORTEST)
        if left < needed:
            reason = f"of the budget {max(0.0, left):.0f} s were left, and {needed:.0f} s may be needed"
            entry = _entry(task, "skipped") | {"error": [reason]}
        else:
            entry = train(task, training, gpus, min(args.timeout, left))
            longest[task.model] = max(longest.get(task.model, 0.0), entry["wall_s"])
        show(entry)
        run["layouts"].append(entry)
        write(run, args.out)


def write(run: Mapping[str, Any], path: Path) -> None:
    """The file as it stands."""
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def evaluate(layouts: Sequence[Mapping[str, Any]], models: Mapping[str, PlannedModel], cluster: Cluster) -> list[Any]:
    """Rows as accuracy.py has them, of all that have a record."""
    done = [(one["model"], RunRecord.model_validate(one["record"])) for one in layouts if "record" in one]
    oracle = _Oracle([record for _, record in done], [models[name] for name, _ in done], cluster)
    rows = []
    for k, (name, record) in enumerate(done):
        seconds, hosts, peaks = oracle.predict(k, Calibration())
        rest = [j for j, (other, run) in enumerate(done) if (other, run.layout) != (name, record.layout)]
        calibrated = oracle.predict(k, oracle.calibrated(rest))[0] if rest else None
        rows.append(
            {
                "model": name,
                "layout": record.layout,
                "ranks": len(record.ranks),
                "samples": record.micro_batch * record.micro_batches * record.replicas,
                "step_s": record.step.median,
                "predicted_s": seconds,
                "host_s": hosts,
                "calibrated_s": calibrated,
                "peak": [rank.allocated for rank in record.ranks],
                "predicted_peak": peaks,
            }
        )
    return rows


class _Oracle:
    """Predicts recorded runs of several models on one cluster, each part under each calibration once."""

    def __init__(self, records: Sequence[RunRecord], models: Sequence[PlannedModel], cluster: Cluster):
        predictors = {model.name: RunPredictor(model, cluster) for model in models}
        self._records = records
        self._predictors = [predictors[model.name] for model in models]
        self._known: dict[tuple[int, str], PredictedRun] = {}

    def predict(self, k: int, calibration: Calibration) -> tuple[float, float, list[int]]:
        """Predict record k: seconds of a step, the host's part of them, and the peak of each rank."""
        prediction, _ = self._predictors[k].predict(self._records[k], calibration)
        peaks = [prediction.memory[rank.stage].allocated for rank in self._records[k].ranks]
        return prediction.seconds, prediction.breakdown["host"], peaks

    def calibrated(self, places: Sequence[int]) -> Calibration:
        """Calibrate by these records."""
        return calibrate([self._records[k] for k in places], self._parts)

    def _parts(self, record: RunRecord, calibration: Calibration) -> PredictedRun:
        k = next(k for k, known in enumerate(self._records) if known is record)
        key = (k, calibration.model_dump_json())
        if key not in self._known:
            self._known[key] = self._predictors[k].parts(record, calibration)
        return self._known[key]


def cluster_name(gpus: Sequence[Mapping[str, str]], num_ranks: int) -> str:
    """Return the cluster of this host's GPUs, or of CPU processes. Raises ConfigError for a device without a preset."""
    if not gpus:
        return f"{num_ranks}xcpu"
    preset = preset_of(gpus[0]["name"])
    if preset is None:
        raise ConfigError(f"there is no preset of {gpus[0]['name']!r}; give --cluster, which p3d plan --measure makes")
    return f"{len(gpus)}x{preset.name}"


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Train all layouts. The run, with a record of each that has ended well."""
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    words = [name.partition(":")[2] for name in args.layouts]
    name = args.cluster or cluster_name(gpus, max(decided(text).world_size for text in words))
    models = {size: model_of(size, args.config) for size in dict.fromkeys(n.partition(":")[0] for n in args.layouts)}
    tasks = tasks_of(args.layouts, load_cluster(name), models)
    training = Training(args.warmup, args.steps, args.config)
    run = describe_run(args, gpus, training, "plan_accuracy.py") | {"cluster": name, "layouts": []}
    print(f"{run['hardware']['count']} x {run['hardware']['name']}, commit {run['commit']}", flush=True)
    run_all(tasks, run, training, gpus, args)
    return run


def main(words: Sequence[str] | None = None) -> int:
    """Train or read, predict, write, print; 0 if every layout has a record. words: as those of parse_arguments."""
    args = parse_arguments(words)
    try:
        run = start(args) if args.again is None else json.loads(args.again.read_text(encoding="utf-8"))
        names = dict.fromkeys(one["model"] for one in run["layouts"])
        models = {name: model_of(name, run["workload"]["config"]) for name in names}
        rows = evaluate(run["layouts"], models, load_cluster(args.cluster or run["cluster"]))
    except ConfigError as error:
        raise SystemExit(f"plan_accuracy.py: {error}") from None
    run["evaluation"] = {"commit": args.commit or find_commit(), "rows": rows}
    write(run, args.out if args.again is None else args.again)
    print("", as_text(accuracy_table(run)), "", *verdicts(run), *unmeasured(run), sep="\n")
    return 0 if all("record" in one for one in run["layouts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
