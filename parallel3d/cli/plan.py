"""`p3d plan`: the best layouts of a model on a cluster, before the first GPU hour."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parallel3d.config import load
from parallel3d.config.layout import parse_layout
from parallel3d.costs.layer_costs import Sample
from parallel3d.costs.profilers import LayerSeconds, measure_layers
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import find_run_records
from parallel3d.optim.precision import make_precision
from parallel3d.planner.calibrate.calibration import Calibration, calibrate, read_calibration
from parallel3d.planner.calibrate.measure import default_path, measure_cluster
from parallel3d.planner.calibrate.runs import RunPredictor
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.report import write_report
from parallel3d.planner.search.comparison import compare, print_comparison
from parallel3d.planner.search.model import MODELS, PlannedModel, load_model
from parallel3d.planner.search.plan import Planner, Question, rare_collections
from parallel3d.planner.search.result import PlanResult, Prediction

_GIB = 2**30
_CALIBRATION = "calibration.json"
_HALVES = (
    "half: stages may end between attention and feed-forward. config.json counts half blocks: build the layers with "
    'units="half", as models.decoder and models.from_hf take it'
)


def add_command(commands: Any) -> None:
    """Adds `plan` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "plan",
        help="find the best layout of a model on a cluster",
        description="Rank the layouts in which a model can be trained on a cluster, by the step time predicted from the very "
        "program that would run; no GPU is needed. Writes a configuration to run, where each rank goes, and a report.",
    )
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `p3d plan`."""
    known = ", ".join(MODELS)
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"a Hugging Face directory or its config.json; script.py:FUNCTION as p3d check takes it; or one of {known}",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help='a YAML file, or hosts and GPUs such as "8xH100" and "128x8xH100" (default: what --measure has found)',
    )
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples of a step, over all ranks")
    parser.add_argument(
        "--seq", type=int, metavar="N", help="tokens of a sample (default: the most that the model takes)"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration that every layout has: precision, optimizer, ..."
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="layouts to list (default: 5)")
    parser.add_argument(
        "--auto",
        action="store_true",
        help='plan schedule "auto" for all layouts that are listed, however long that takes; for the best one it is planned '
        "anyway where the pipeline is short",
    )
    parser.add_argument("--explain", metavar="LAYOUT", help='compare one layout, such as "pp4,dp2", with the winner')
    parser.add_argument("--out", default="plan", metavar="DIR", help="directory of what is written (default: plan)")
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure this host's GPUs and links first, keep them in FILE and plan for them, with the model's layers measured "
        "on one; without --model, only measure",
    )
    parser.add_argument(
        "--calibrate", nargs="+", default=[], metavar="RUN", help="correct the predictions by what these runs measured"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="RUN",
        help="print predicted beside measured for these runs, and end",
    )
    parser.add_argument("--calibration", metavar="FILE", help="corrections that an earlier --calibrate has written")


def run(options: argparse.Namespace) -> int:
    """Carry it out; 1 where nothing fits."""
    with rare_collections():
        return _plan(options)


def _plan(options: argparse.Namespace) -> int:
    console = _console()
    cluster = _cluster(options, console)
    if options.model is None:
        if options.measure is None:
            raise ConfigError(
                f"give --model: a Hugging Face directory, script.py:FUNCTION or one of {', '.join(MODELS)}"
            )
        return 0
    if cluster is None:
        raise ConfigError('give --cluster, such as "8xH100" or a YAML file, or --measure for this host')
    model = load_model(options.model, options.seq, options.config)
    out = Path(options.out)
    calibration = _calibration(options, model, cluster, out)
    if options.compare:
        _compare(options, model, cluster, calibration, console)
        return 0
    if options.global_batch is None or options.top < 1:
        raise ConfigError(f"--global-batch is {options.global_batch}, --top {options.top}; give numbers of 1 or more")
    fixed = None if options.explain is None else parse_layout(options.explain)
    measured = None if options.measure is None else _measured_layers(model, cluster)
    question = Question(model, cluster, options.global_batch, options.top, None, calibration, measured, options.auto)
    result = Planner(question).answer()
    show(result, console)
    if fixed is not None:
        explained = Planner(Question(model, cluster, options.global_batch, 1, fixed, calibration, measured)).answer()
        explain(result, explained, console)
    written = [*write_report(result, out)]
    if result.best:
        written.append(_write(out / "config.json", result.config))
        written.append(_write(out / "ranks.json", [place.model_dump() for place in result.map]))
    console.print("written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    return 0 if result.best else 1


def _console() -> Console:
    """As wide as the terminal, or as a table needs."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _cluster(options: argparse.Namespace, console: Console) -> Cluster | None:
    if options.measure is not None:
        if options.cluster is not None:
            raise ConfigError("--measure plans for this host and --cluster for another; give one of them")
        path = measure_cluster(options.measure or None)
        console.print(f"measured: {path}", highlight=False, soft_wrap=True)
        return load_cluster(path)
    if options.cluster is not None:
        return load_cluster(options.cluster)
    return load_cluster(default_path()) if default_path().exists() else None


def _calibration(options: argparse.Namespace, model: PlannedModel, cluster: Cluster, out: Path) -> Calibration:
    if options.calibration is not None and options.calibrate:
        raise ConfigError("--calibrate makes the corrections that --calibration reads; give one of them")
    if options.calibration is not None:
        return read_calibration(options.calibration)
    if not options.calibrate:
        return Calibration()
    predictor = RunPredictor(model, cluster)
    found = calibrate([record for _, record in find_run_records(options.calibrate)], predictor.parts)
    out.mkdir(parents=True, exist_ok=True)
    found.write(out / _CALIBRATION)
    return found


def _measured_layers(model: PlannedModel, cluster: Cluster) -> list[LayerSeconds]:
    """On this host, which the cluster is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load({**model.config, "train_micro_batch_size_per_gpu": 1})
    sample = Sample(*model.sample(1), model.loss_fn, make_precision(config))
    return measure_layers(model.layers, sample, config, device)


def _compare(
    options: argparse.Namespace, model: PlannedModel, cluster: Cluster, calibration: Calibration, console: Console
) -> None:
    predictor = RunPredictor(model, cluster)
    for path, record in find_run_records(options.compare):
        console.print(str(path), highlight=False, soft_wrap=True)
        print_comparison(compare(record, *predictor.predict(record, calibration)))


def _write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def show(result: PlanResult, console: Console) -> None:
    """Print the ranking; where nothing fits, what would."""
    title = (
        f"{result.model} on {result.cluster}: {result.global_batch} x {result.seq} tokens a step; {result.considered:,} "
        f"layouts, {result.simulated:,} simulated"
    )
    if not result.best:
        console.print(f"{title}\n{result.remedy}", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table(title=escape(title), title_justify="left", box=None)
    for column in ("layout", "s/step", "9 of 10 in", "tokens/s", "MFU", "bubble", "links", "GiB"):
        table.add_column(column, no_wrap=True, justify="left" if column == "layout" else "right")
    for prediction in result.best:
        table.add_row(*_row(prediction))
    console.print(table)
    if result.best[0].units == "half":
        console.print(_HALVES, highlight=False, markup=False, soft_wrap=True)


def _row(prediction: Prediction) -> list[str]:
    return [
        prediction.layout,
        f"{prediction.seconds:.3f}",
        f"{prediction.low:.2f}-{prediction.high:.2f}",
        f"{prediction.tokens_per_second:,.0f}",
        f"{prediction.mfu:.1%}",
        f"{prediction.bubble:.1%}",
        f"{prediction.exposed_communication * 1e3:.1f} ms",
        f"{prediction.peak / _GIB:.1f}",
    ]


def explain(result: PlanResult, explained: PlanResult, console: Console) -> None:
    """Print where a layout's time and memory differ from the winner's."""
    if not explained.best:
        console.print(f"{explained.remedy}", highlight=False, markup=False, soft_wrap=True)
        return
    if not result.best:
        return
    winner, other = result.best[0], explained.best[0]
    table = Table(title=escape(f"{other.layout} beside {winner.layout}"), title_justify="left", box=None)
    for column in ("", "this", "winner", "difference"):
        table.add_column(column, no_wrap=True, justify="left" if not column else "right")
    lines = [("step", other.seconds, winner.seconds)]
    lines += [(name, other.breakdown[name], winner.breakdown[name]) for name in other.breakdown]
    for name, mine, its in lines:
        table.add_row(name, f"{mine * 1e3:,.1f} ms", f"{its * 1e3:,.1f} ms", f"{(mine - its) * 1e3:+,.1f} ms")
    peaks = other.peak / _GIB, winner.peak / _GIB
    table.add_row("peak memory", *(f"{peak:.1f} GiB" for peak in peaks), f"{peaks[0] - peaks[1]:+.1f} GiB")
    console.print(table)
