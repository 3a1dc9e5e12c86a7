"""`p3d plan`: find the best layouts of a model on a cluster, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.atomic_write import atomic_write
from parallel3d.config.layout import PartialLayout, given_section, parse_layout
from parallel3d.costs.forked import ForkedCalls
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import find_run_records
from parallel3d.planner.calibrate.calibration import Calibration, calibrate, read_calibration
from parallel3d.planner.calibrate.runs import RunPredictor, check_kind, compare
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import default_path, load_cluster
from parallel3d.planner.formats import duration, memory
from parallel3d.planner.report import differences, write_report
from parallel3d.planner.report.drawing import prepare
from parallel3d.planner.report.scripts import SCRIPTS, commands, launch_scripts
from parallel3d.planner.search.model import load_model
from parallel3d.planner.search.plan import Planner
from parallel3d.planner.search.presets import PRESETS
from parallel3d.planner.search.result import FULL, PlanResult, Prediction, fullness_of

_GIB = 2**30
# Ways to offload that are tried in turn if nothing fits, the fastest first. The user's own keys override these.
_CPU, _NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/local_nvme"}
_OFFLOADS: Mapping[str, Mapping[str, Any]] = {
    "optimizer state in host memory": {"offload_optimizer": _CPU},
    "weights in host memory": {"offload_param": _CPU},
    "optimizer state and weights in host memory": {"offload_optimizer": _CPU, "offload_param": _CPU},
    "optimizer state on NVMe, weights in host memory": {"offload_optimizer": _NVME, "offload_param": _CPU},
    "optimizer state and weights on NVMe": {"offload_optimizer": _NVME, "offload_param": _NVME},
}


def run(options: argparse.Namespace, process: ForkedCalls | None) -> int:
    """Plan, or only measure or compare; return 1 if nothing fits. process: another process in which layers are traced."""
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    cluster = _cluster(options)
    if options.model is None and options.measure is not None:
        return 0
    if options.model is None:
        raise ConfigError(f"give --model: a Hugging Face directory, script.py:FUNCTION or one of {', '.join(PRESETS)}")
    if cluster is None:
        raise ConfigError('give --cluster, such as "8xH100" or a YAML file, or --measure for this host')
    _check_output(options)
    model = load_model(options.model, options.seq, options.config)
    predictor = RunPredictor(model, cluster)
    if options.global_batch is None and not options.compare:
        raise ConfigError("give --global-batch N, the samples of a step over all ranks")
    calibration = _calibration(options, cluster, predictor)
    if options.compare:
        for path, record in find_run_records(options.compare):
            print(path)
            console.print(compare(record, *predictor.predict(record, calibration)), highlight=False)
        return 0
    fixed = None if options.explain is None else parse_layout(options.explain)
    measured = None
    if options.measure is not None:
        from parallel3d.planner.calibrate.measure_worker import measure_model  # it imports all that trains

        measured = measure_model(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    all_open = PartialLayout()
    planner = Planner(
        model, cluster, options.global_batch, options.top, all_open, calibration, measured, options.auto, process
    )
    if process is not None:
        prepare()
    if fixed is not None:
        replace(planner, fixed=fixed, like=planner)  # raises now if there is no such layout
    result = planner.answer()
    show(result, console)
    if result.lacking:
        planner, result = _offload(planner, result, console)
    if result.best:
        _show_offload(result.best[0], cluster)
    if fixed is not None:
        explained = replace(planner, num_best=1, fixed=fixed, every_auto=False, like=planner)
        explain(result, explained.answer(), console)
    print("written: " + ", ".join(map(str, _write(result, options.out))))
    for command in commands(result, options.out):
        print(f"run: {command}")
    return 0 if result.best else 1


def _offload(planner: Planner, result: PlanResult, console: Console) -> tuple[Planner, PlanResult]:
    """Plan with more and more offload until a layout fits, and print how much memory each of the faster ways lacks.

    result: the plan without offload, which is returned if nothing fits with offload either.
    """
    model, tried = planner.model, [planner.model.config]
    for name, sections in _OFFLOADS.items():
        zero = {**sections, **given_section(model.config, "zero_optimization")}
        config = {**model.config, "zero_optimization": zero}
        if config in tried:
            continue
        tried.append(config)
        # Without ZeRO-3 weights aren't offloaded, and that is planned already.
        fixed = parse_layout("zero3") if "offload_param" in sections else planner.fixed
        try:
            other = replace(planner, model=replace(model, config=config), fixed=fixed, like=planner)
        except ConfigError as error:  # such as of an optimizer whose state can't be offloaded
            print(f"With {name}: {error}")
            return planner, result
        if (found := other.answer()).best:
            print(f"With {name}:")
            show(found, console)
            return other, found
        print(f"With {name}: nothing fits, a rank lacks {found.lacking / _GIB:.1f} GiB or more")
    return planner, result


def _show_offload(prediction: Prediction, cluster: Cluster) -> None:
    """Print what a layout keeps in host memory and on disk, on the rank that keeps most."""
    most = max(prediction.memory, key=lambda stage: stage.host + stage.disk)
    if most.host:
        print(f"host memory: {most.host / _GIB:.1f} GiB a rank, of {most.host_capacity / _GIB:.1f} (host_memory)")
    if most.disk:
        rate = min(gpu.device.disk_bandwidth for gpu in cluster.gpus) / 1e9
        print(
            f"disk: {most.disk / _GIB:.1f} GiB a rank, at {rate:.1f} GB/s each way (disk_bandwidth, assumed); set nvme_path"
        )


def _check_output(options: argparse.Namespace) -> None:
    """Make the directory of the output. Raises ConfigError if nothing can be written there, or a file would be lost."""
    directory: Path = options.out
    if options.compare and not options.calibrate:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"--out is {directory}, where nothing can be written ({error.strerror}); give another directory"
        ) from error
    if not options.compare:
        _check_replaced(directory)


def _check_replaced(directory: Path) -> None:
    """Raise ConfigError if the output would replace a file that no earlier plan wrote, such as a model's config.json."""

    def read(name: str) -> Any:
        with suppress(OSError, ValueError, RecursionError):
            return json.loads((directory / name).read_bytes())

    plan, config = read("plan.json"), directory / "config.json"
    names = [config.name] if config.exists() else []
    if not isinstance(plan, dict) or not {"config", "best"} <= plan.keys():
        written = "plan.json", "plan.html", config.name, "ranks.json", *SCRIPTS
        names = [name for name in written if (directory / name).exists()]
    elif plan["config"] == read(config.name):
        return
    if names:
        raise ConfigError(
            f"{directory / names[0]} is not what an earlier p3d plan wrote, and would be replaced; give --out another directory"
        )


def _write(result: PlanResult, directory: Path) -> list[Path]:
    """Write the report and, where a layout fits, its configuration and places; an earlier plan's are replaced or removed."""
    contents = {"config.json": result.config, "ranks.json": [place.model_dump() for place in result.map]}
    texts = {name: json.dumps(content, indent=2) + "\n" for name, content in contents.items()}
    scripts = launch_scripts(result, directory.resolve())
    try:
        written = [*write_report(result, directory)]
        for name in (*texts, *SCRIPTS):
            (directory / name).unlink(missing_ok=True)
        for name, text in (texts | scripts).items() if result.best else ():
            atomic_write(directory / name, text)
            (directory / name).chmod(0o755 if name in scripts else 0o644)
            written.append(directory / name)
    except OSError as error:
        raise ConfigError(
            f"{directory} can't be written to ({error.strerror}); give --out another directory"
        ) from error
    return written


def _cluster(options: argparse.Namespace) -> Cluster | None:
    """Return the cluster asked for, else this host as it was measured, less what is reserved; None if it never was."""
    if not 0.0 <= options.reserve < 1.0:
        raise ConfigError(
            f"--reserve is {options.reserve:.0%}; give a share of each device's memory, 0% to less than 100%"
        )
    if options.cluster is not None:
        if options.measure is not None:
            raise ConfigError("--measure plans for this host and --cluster for another; give one of them")
        source = options.cluster
    elif options.measure is not None:
        from parallel3d.planner.calibrate.measure import measure_cluster  # it imports all that trains

        source = measure_cluster(options.measure or None)
        print(f"measured: {source}")
    elif default_path().exists():
        source = default_path()
    else:
        return None
    return load_cluster(source).with_reserve(options.reserve)


def _calibration(options: argparse.Namespace, cluster: Cluster, predictor: RunPredictor) -> Calibration:
    """Read the corrections, or fit them to runs and write them; none if neither is asked for."""
    if options.calibration is not None and options.calibrate:
        raise ConfigError("--calibrate makes the corrections that --calibration reads; give one of them")
    if options.calibration is not None:
        found = read_calibration(options.calibration)
        check_kind(found.device, found.backend, cluster)
        return found
    if not options.calibrate:
        return Calibration()
    found = calibrate([record for _, record in find_run_records(options.calibrate)], predictor.parts)
    found.write(options.out / "calibration.json")
    return found


def _table(title: str, *columns: str) -> Table:
    """Return a table with numbers in all columns but the first."""
    sides = [Column(name, no_wrap=True, justify="right" if k else "left") for k, name in enumerate(columns)]
    return Table(*sides, title=escape(title), title_justify="left", box=None)


def show(result: PlanResult, console: Console) -> None:
    """Print the ranking, or, if no layout fits, the smallest change with which one would."""
    title = (
        f"{result.model} on {result.cluster}: {result.global_batch} x {result.seq} tokens a step; {result.considered:,} "
        f"layouts, {result.simulated:,} simulated"
    )
    if not result.best:
        console.print(f"{title}\n{result.remedy}", highlight=False, markup=False, soft_wrap=True)
        return
    table = _table(title, "layout", "s/step", "90% interval", "tokens/s", "MFU", "bubble", "links", "memory")
    for p in result.best:
        few, many = (".2f", ".3f") if p.low >= 1 else (".3g", ".4g")  # short steps by their first digits
        seconds, interval, tokens = (
            f"{p.seconds:{many}}",
            f"{p.low:{few}}-{p.high:{few}}",
            f"{p.tokens_per_second:,.0f}",
        )
        links, peak = duration(p.exposed_communication), memory(p.peak)
        table.add_row(p.layout, seconds, interval, tokens, f"{p.mfu:.1%}", f"{p.bubble:.1%}", links, peak)
    console.print(table)
    for line in remarks(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def remarks(result: PlanResult) -> Iterator[str]:
    """Yield what the ranking leaves uncertain: intervals that overlap, and memory that is nearly full."""
    winner, *others = result.best
    if alike := sum(other.low <= winner.high for other in others):
        yield f"the 90% intervals of the first and {alike} of {len(others)} others overlap: measure those that matter to you"
    for p in result.best:
        if (share := fullness_of(p.memory) * (1.0 - result.reserve)) > FULL:
            yield f"{p.layout} takes {share:.0%} of a rank's memory: it fails if it needs a little more than predicted"
    if winner.units == "half":
        yield "half: config.json counts attention and feed-forward as layers; models.from_hf(..., config=config) builds them so"
    if isinstance(winner.policy, tuple):
        counts = ", ".join(f"{number} {policy}" for policy, number in Counter(winner.policy).items())
        yield f"ckpt-auto: config.json gives each layer a policy of recomputation: {counts}"


def explain(result: PlanResult, explained: PlanResult, console: Console) -> None:
    """Print where a layout's time and memory differ from the winner's."""
    if not explained.best:
        console.print(f"{explained.remedy}", highlight=False, markup=False, soft_wrap=True)
    if not explained.best or not result.best:
        return
    winner, other = result.best[0], explained.best[0]
    table = _table(f"{other.layout} compared with {winner.layout}", "", "this", "winner", "difference")
    for row in differences(other, winner):
        table.add_row(*row)
    console.print(table)
