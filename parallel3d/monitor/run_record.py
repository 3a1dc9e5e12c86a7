"""Run record: a file with the layout, model and versions of a training and its measured times and bytes.

Predictions are compared with it, and models of time and memory are fitted to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from parallel3d.atomic_write import atomic_write
from parallel3d.comm.topology import ProcessTopology, pipelines_of
from parallel3d.config import without_removed
from parallel3d.config.files import explain
from parallel3d.config.layout import Layout
from parallel3d.errors import ConfigError
from parallel3d.monitor.records import PARTS, StepRecord, break_down, instruction_times, mean_of
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.timing import Span, Timeline

FILE_NAME, TIMELINE = "run_record.json", "step_timeline.json"
Stored = TypeVar("Stored", bound=BaseModel)


class StoredModel(BaseModel):
    """Immutable model of a JSON file, or of a part of one. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Timing(StoredModel):
    """Statistics of `count` times, in seconds. spread: between the quartiles, 0 for a single time."""

    median: float
    spread: float
    count: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        """Summarize at least one time."""
        first, _, last = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (0.0, 0.0, 0.0)
        return Timing(median=median(seconds), spread=last - first, count=len(seconds))


class ModelFingerprint(StoredModel):
    """Composition of a model, whatever the layout: each layer's class, and the number of parameters first used there."""

    layers: tuple[str, ...]
    parameters: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Hash that is the same for the same layers and counts."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class RankRecord(StoredModel):
    """Measurements of one rank.

    - host: number of its host, in the order of the hosts' first ranks.
    - capacity: bytes of its device, None on the CPU.
    - allocated: the most bytes in tensors at once; on the CPU those of model state, activations and operations in the batch
      whose memory was profiled, None if none was.
    - reserved: the most bytes that the CUDA allocator held.
    - outside: bytes of the device outside of the allocator: CUDA's context, NCCL's buffers and other processes.
    - parts: measured bytes by component and phase, as in engine.reports.memory_report.
    """

    rank: int
    stage: int
    host: int = 0
    device: str
    capacity: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    outside: int | None = None
    parts: dict[str, int]


class RunRecord(Layout):
    """Measurements of one training.

    - layout: in words, as parse_layout reads them; bounds: as in Prediction.
    - schedule: as configured, "written" for lists of instructions; program: the compute instructions of each stage, if the
      schedule is planned.
    - seq: tokens of a sample, if the inputs show it; config: all values in force.
    - instructions: by `kind_name`. "F@0" (forward on chunk 0) and other compute; "SA@0", "SG@1": from when a tensor is
      computed until a rank that waits for it has it; "RED@0#1": a bucket's reduction, from when its last rank is ready.
    - step: from when the last rank begins until all have ended, of steps that were not recorded if there are any.
    - optimizer: from the reduced gradients on; breakdown: seconds of a recorded step by part; bubble: share of a pipeline's
      time without compute; each the mean over ranks.
    """

    format: Literal[1] = 1
    layout: str
    bounds: tuple[int, ...]
    seq: int | None
    program: tuple[tuple[str, ...], ...] | None
    model: ModelFingerprint
    backend: str
    versions: dict[str, str]
    config: Annotated[dict[str, Any], AfterValidator(lambda config: without_removed(config))]
    instructions: dict[str, Timing]
    step: Timing
    optimizer: Timing
    breakdown: dict[str, float]
    bubble: float
    ranks: tuple[RankRecord, ...]

    @property
    def device(self) -> str:
        """Name of the ranks' device, or of all kinds of devices."""
        return ", ".join(sorted({rank.device for rank in self.ranks}))

    def write(self, directory: Path) -> Path:
        """Write the file atomically into this directory, which is created if needed, and return its path. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(directory / FILE_NAME, self.model_dump_json(indent=1) + "\n")
        return directory / FILE_NAME


class StepTimeline(StoredModel):
    """Measured instructions of one step, on the ranks of the first pipeline: (stage, "F3@2", start, end), in seconds."""

    spans: tuple[tuple[int, str, float, float], ...]

    @staticmethod
    def of(records: Sequence[StepRecord], topology: ProcessTopology) -> StepTimeline:
        """Take a step's instructions from the records of all ranks."""
        spans = [span for rank in pipelines_of(topology)[0] for span in records[rank].spans]
        first = min((span.start for span in spans), default=0.0)
        return StepTimeline(spans=tuple((s.rank, str(s.instruction), s.start - first, s.end - first) for s in spans))

    def timeline(self) -> Timeline:
        """Return the timeline as a schedule's Timeline. Raises ScheduleError for a name that is not an instruction."""
        spans = [Span(stage, Instruction.parse(text), start, end) for stage, text, start, end in self.spans]
        return Timeline.of(spans, 1 + max((span.rank for span in spans), default=0))


def kind_name(instruction: Instruction) -> str:
    """Return the short name of an instruction, without its micro-batch: "F@0", "RED@3#1"."""
    bucket = "" if instruction.bucket is None else f"#{instruction.bucket}"
    return f"{instruction.op.value}@{instruction.chunk}{bucket}"


def measure_times(
    steps: Sequence[Sequence[StepRecord]], others: Sequence[Sequence[StepRecord]], topology: ProcessTopology
) -> dict[str, Any]:
    """Return the fields of a RunRecord that follow from steps: instructions, step, optimizer, breakdown and bubble.

    - steps: recorded steps of one program, at least one, each with the records of all ranks of `topology`.
    - others: steps of the program without records of instructions; only begin and end are known.
    """
    pipelines, ops = pipelines_of(topology), list(Op)
    samples = instruction_times(steps, topology)
    kinds = sorted(samples, key=lambda i: (ops.index(i.op), i.chunk, i.bucket or 0))
    parts = [mean_of(break_down(records, pipelines)) for records in steps]
    bubbles = [
        mean(Timeline.of([s for r in ranks for s in records[r].spans], len(ranks)).bubble for ranks in pipelines)
        for records in steps
    ]
    return {
        "instructions": {kind_name(i): Timing.of(samples[i]) for i in kinds if i.op is not Op.GATHER_PARAMS},
        # A step lasts from when the last rank begins until all have ended.
        "step": Timing.of([max(r.end for r in ranks) - max(r.begin for r in ranks) for ranks in others or steps]),
        "optimizer": Timing.of([step.step for step in parts]),
        "breakdown": {name: median(getattr(step, name) for step in parts) for name in PARTS},
        "bubble": median(bubbles),
    }


def fingerprint(names: Sequence[str], counts: Iterable[Mapping[str, int]]) -> ModelFingerprint:
    """Return the fingerprint of a model.

    - names: of all layers.
    - counts: of each rank, "layers.<index>.<name>" (or another name, in a model of one layer) -> elements of the full tensor.
    """
    parameters = [0] * len(names)
    for name, numel in {name: numel for rank in counts for name, numel in rank.items()}.items():
        parameters[int(name.split(".")[1]) if len(names) > 1 else 0] += numel
    return ModelFingerprint(layers=tuple(names), parameters=tuple(parameters))


def read_run_record(path: str | Path) -> RunRecord:
    """Read the record of a file, or of the file in a directory. Raises ConfigError if it is missing or holds no record."""
    file = Path(path) / FILE_NAME if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ConfigError(
            f'there is no run record \'{file}\'; train with "run_record": {{"directory": "{file.parent}"}} in the '
            "configuration, or call engine.reports.write_run_record"
        )
    return read_stored(RunRecord, file, "run record", "engine.reports.write_run_record")


def read_stored(model: type[Stored], file: Path, what: str, remedy: str) -> Stored:
    """Read a model from a JSON file.

    what: name of such files in errors; remedy: what writes them. Raises ConfigError if it can't be read, or holds no model.
    """
    try:
        return model.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{what} '{file}' can't be read: {error}; make one by {remedy}") from error
    except ValidationError as error:
        raise ConfigError(
            f"'{file}' is not a {what} of this version: {explain(error)}; make it again by {remedy}"
        ) from error


def find_run_records(paths: Iterable[str | Path]) -> list[tuple[Path, RunRecord]]:
    """Read these files, and all record files in these directories at any depth: (file, record), by path, each once.

    Raises ConfigError as read_run_record does, and for a directory without any.
    """
    files: set[Path] = set()
    for path in map(Path, paths):
        found = sorted(path.rglob(FILE_NAME)) if path.is_dir() else [path]
        if not found:
            raise ConfigError(
                f"there is no {FILE_NAME} in '{path}'; give directories with the records of training runs"
            )
        files.update(found)
    return [(file, read_run_record(file)) for file in sorted(files)]
