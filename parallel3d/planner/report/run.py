"""Page of a training, from the files that it has written into its folder so far."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from parallel3d.errors import ConfigError
from parallel3d.failures.verdict import Report, Verdict
from parallel3d.monitor.run_record import (
    FILE_NAME,
    TIMELINE,
    RankRecord,
    RunRecord,
    StepTimeline,
    kind_name,
    read_run_record,
    read_stored,
)
from parallel3d.monitor.writers import METRICS
from parallel3d.planner.report.charts import breakdown_chart, line_chart, memory_chart
from parallel3d.planner.report.drawing import render
from parallel3d.planner.report.page import packed
from parallel3d.planner.report.timeline import columns
from parallel3d.planner.search.result import PlanResult, StageMemory
from parallel3d.schedule.instructions import COMPUTE_OPS, Program
from parallel3d.schedule.timing import Timeline, simulate

PLAN = "plan.json"
_COMPONENTS = ("weights", "gradients", "masters", "optimizer", "gathered", "transient")
_COUNT = "{:,.0f}".format
# Charts of the values in metrics.jsonl: value -> (name, format, colour).
_CHARTS: Mapping[str, Any] = {
    "train_loss": ("loss", "{:.4g}".format, "#2f69b4"),
    "tokens_per_second": ("tokens a second", _COUNT, "#2e8752"),
    "samples_per_second": ("samples a second", "{:,.4g}".format, "#2e8752"),
    "mfu": ("MFU", "{:.1%}".format, "#b8671a"),
    "grad_norm": ("gradient norm", "{:.4g}".format, "#6b4ea3"),
    "lr": ("learning rate", "{:.3g}".format, "#4d9a94"),
    "memory_gib": ("GiB of the fullest rank", "{:.3g}".format, "#8b5e4b"),
}
# Values of the engine that are not drawn.
_UNDRAWN = {"time", "samples", "seconds_per_step", "bubble", "loss_scale"}


@dataclass(frozen=True)
class Failure:
    """Failure that ended a training: what its ranks agreed on, and their reports. time: of its writing, since the epoch."""

    verdict: Verdict
    grid: tuple[str, ...]
    reports: tuple[Report, ...]
    time: float = 0.0


@dataclass(frozen=True)
class TrainingRun:
    """A training's files.

    - starts: the steps of each start of the training, value by name, in their order; config: of the last start.
    - record, timeline: measurements, if some steps were recorded; plan: that of `p3d plan`, if there is one.
    """

    starts: Sequence[Sequence[Mapping[str, float]]] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    timeline: Timeline | None = None
    plan: PlanResult | None = None
    failures: Sequence[Failure] = ()

    def points(self, name: str) -> list[list[tuple[float, float]]]:
        """Return (samples, value) of each start's steps that have this value."""
        return [[(step["samples"], step[name]) for step in steps if name in step] for steps in self.starts]

    def own_names(self) -> list[str]:
        """Return the names of the script's own values, in their order."""
        names = dict.fromkeys(chain.from_iterable(chain.from_iterable(self.starts)))
        return [n for n in names if n not in _CHARTS and n not in _UNDRAWN and not n.startswith("elapsed_time_ms_")]

    def last(self, name: str) -> float | None:
        """Return the last value of this name."""
        values = [value for _, value in chain.from_iterable(self.points(name))]
        return values[-1] if values else None


def read_run(directory: Path, plan: Path | None = None) -> TrainingRun:
    """Read what a training has written into its folder. plan: of `p3d plan`; by default the one in the folder, if any.

    Raises ConfigError if there is nothing, or a file can't be read.
    """
    starts, config, begin = _read_metrics(directory / METRICS)
    record = read_run_record(directory) if (directory / FILE_NAME).exists() else None
    if record is None and not starts:
        raise ConfigError(
            f"'{directory}' has neither {METRICS} nor {FILE_NAME}; train with \"run_record\": "
            f'{{"directory": "{directory}"}} in the configuration'
        )
    config = config or (record.config if record is not None else {})
    plan = plan or (directory if (directory / PLAN).exists() else None)
    timeline = None
    if (directory / TIMELINE).exists():
        remedy = "a training with run_record.directory"
        timeline = read_stored(StepTimeline, directory / TIMELINE, "timeline of a step", remedy).timeline()
    folders = {directory, Path(config.get("failures", {}).get("directory", directory))}
    return TrainingRun(
        starts,
        config,
        record,
        timeline,
        None if plan is None else read_stored(PlanResult, plan / PLAN, "plan", "p3d plan"),
        [f for f in _read_failures(sorted(chain(*(d.glob("failure-*.json") for d in folders)))) if f.time >= begin],
    )


def _read_metrics(file: Path) -> tuple[list[list[dict[str, float]]], dict[str, Any], float]:
    """Return the steps of each start, the configuration of the last one, and the time of the first, in s since the epoch.

    A line that is still being written is left out.
    """
    starts: list[list[dict[str, float]]] = []
    config: dict[str, Any] = {}
    begins: list[float] = []
    try:
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else ():
            if not line.endswith("\n"):
                break
            values = json.loads(line)
            if "config" in values:
                config = values["config"]
                starts.append([])
                begins.append(float(values["time"]))
            else:
                starts[-1].append({name: float(value) for name, value in values.items()})
                _ = starts[-1][-1]["samples"]
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"'{file}' is not a file of a training's steps ({problem}); remove it") from error
    return starts, config, min(begins, default=0.0)


def _read_failures(files: Sequence[Path]) -> list[Failure]:
    """Read the failures, which several ranks have written: each verdict once, the latest first."""
    found: dict[str, Failure] = {}
    for file in files:
        try:
            failure = TypeAdapter(Failure).validate_python(
                {**json.loads(file.read_bytes()), "time": file.stat().st_mtime}
            )
        except (OSError, ValueError, TypeError, ValidationError) as error:
            raise ConfigError(f"'{file}' is not a report of a failure ({type(error).__name__}); remove it") from error
        found.setdefault(failure.verdict.line, failure)
    return sorted(found.values(), key=lambda failure: -failure.time)


def run_page(run: TrainingRun, name: str, refresh: int | None = None) -> str:
    """Return the page of a training. name: of the run; refresh: seconds after which a browser loads it again."""
    record, drawn, planned = run.record, {}, ""
    if run.timeline is not None and run.timeline.spans:
        plan, planned = _planned(run)
        longest = max(run.timeline.makespan, plan.makespan)
        drawn = {"measured": columns(run.timeline, seconds=longest), "planned": columns(plan, seconds=longest)}
    own = {name: (name, "{:.4g}".format, "#5c6b7a") for name in run.own_names()}
    described = {**_CHARTS, **own}
    charts = {
        key: line_chart(words, run.points(key), shown, colour) for key, (words, shown, colour) in described.items()
    }
    if charts["tokens_per_second"] is not None:
        del charts["samples_per_second"]
    layout = str(run.config.get("layout", "" if record is None else record.layout))
    ranks, parts = ((), {}) if record is None else (record.ranks, record.breakdown)
    memory, names = list(map(_memory_of, ranks)), [f"rank {rank.rank} · stage {rank.stage}" for rank in ranks]
    return render(
        "run.html",
        name=name,
        refresh=refresh,
        layout=layout,
        run=run,
        record=record,
        last={key: _shown(run.last(key), shown) for key, (_, shown, _) in _CHARTS.items()},
        bubble=parts.get("bubble", 0.0) / sum(parts.values()) if parts else run.last("bubble"),
        peak=max((stage.reserved for stage in memory), default=None),
        samples=run.last("samples") or 0,
        restarts=max(len(run.starts) - 1, 0),
        charts=[chart for chart in charts.values() if chart is not None],
        breakdown=breakdown_chart(parts, layout) if parts else None,
        memory=memory_chart(memory, names, layout) if any(rank.allocated for rank in ranks) else None,
        num_stages=0 if run.timeline is None else run.timeline.num_ranks,
        planned=planned,
        config=json.dumps(run.config, indent=2),
        data=packed({"details": None, "timelines": drawn}),
    )


def _shown(value: float | None, shown: Any) -> str | None:
    return None if value is None else shown(value) if math.isfinite(value) else str(value)


def _planned(run: TrainingRun) -> tuple[Timeline, str]:
    """Return the planned timeline, and what it is: the plan's, or the measured step's lists with the median times."""
    assert run.timeline is not None
    if run.plan is not None and run.plan.timeline:
        best = run.plan.best[0]
        return Timeline.of(run.plan.timeline, best.stages), f"predicted by p3d plan for {best.layout}"
    spans = [s for s in run.timeline.spans if s.instruction.op in COMPUTE_OPS]
    stages = {s.instruction.chunk: s.rank for s in spans}
    lists = [tuple(s.instruction for s in spans if s.rank == rank) for rank in range(run.timeline.num_ranks)]
    numbers = 1 + max(s.instruction.micro_batch for s in spans)
    program = Program("recorded", tuple(stages[chunk] for chunk in sorted(stages)), numbers, tuple(lists))
    medians = {} if run.record is None else {kind: t.median for kind, t in run.record.instructions.items()}
    planned = simulate(program, lambda i: medians.get(kind_name(i._replace(bucket=None)), 0.0))
    return planned, "the same lists of instructions, each with the median time of its kind, reductions left out"


def _memory_of(rank: RankRecord) -> StageMemory:
    """Return a rank's measured peak by its parts, as a plan has a stage's."""
    parts = {name: rank.parts.get(name, 0) for name in _COMPONENTS}
    phases = {name: rank.parts.get(name, 0) for name in ("backward", "step")}
    held = "update" if phases["step"] > phases["backward"] else "activations"
    parts[held] = rank.parts.get(held, 0)
    allocated = rank.allocated or max(phases.values())
    parts["workspace"] = max(allocated - sum(parts.values()), 0)
    reserved = (rank.reserved or allocated) + (rank.outside or 0)
    sizes: dict[str, int] = {"allocated": allocated, "reserved": reserved, "capacity": rank.capacity or 0}
    return StageMemory(stage=rank.stage, parts=parts, phases=phases, **sizes)
