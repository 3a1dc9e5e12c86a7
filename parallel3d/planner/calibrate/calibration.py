"""What runs teach the planner: by how much the models of time and memory are off, component by component, and how surely."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from parallel3d.atomic_write import write_whole
from parallel3d.errors import ConfigError, nearest
from parallel3d.monitor.run_record import RunRecord
from parallel3d.planner.calibrate.correction import Bounds, Correction, Errors, Row, error_of, fit

# Of the time of compute and of the optimizer's step, and of links by kind.
# Before anything is measured a factor is 1, with this standard deviation.
COMPONENTS = {
    "gemm": 0.2,
    "attention": 0.3,
    "element_wise": 0.3,
    "kernels": 0.5,
    "host": 0.5,
    "optimizer": 0.3,
    "nvlink": 0.5,
    "pcie": 0.5,
    "nic": 0.5,
    "network": 0.5,
}
# Of the time of compute, by what a device loses that idles: at its power limit, the cooler card is the faster one.
_COMPUTE = {"gemm", "attention", "element_wise", "kernels"}
_IDLE, _IDLE_RANGE = 0.15, (0.0, 0.6)
# Bytes that no component of the runtime counts exactly: see PredictedMemory.
MEMORY = {"workspace": 0.5, "slack": 0.5, "outside": 0.5}
# No factor leaves this.
_RANGE = (0.25, 4.0)
# The least that is left of a time, or of all bytes of a rank, when the factors are right.
_NOISE, _MEMORY_NOISE = 0.01, 0.003
# Seconds that every step takes besides, in shares of the shortest one.
_FIXED, _FIXED_RANGE = 0.02, (0.0, 0.2)
# Components of one kind, and from how many logs on they are expected elsewhere than at 1.
_KINDS = (_COMPUTE, {"host"}, {"nvlink", "pcie"}, {"nic", "network"})
_FAR = log(1.5)
# Rounds of predicting and fitting, until no factor moves by more.
_ROUNDS, _SETTLED = 8, 1e-3

Parts = Mapping[str, float]


class Factor(BaseModel):
    """By what a component is to be multiplied; in nine cases of ten it lies between low and high."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = 1.0
    low: float = 1.0
    high: float = 1.0


def _unknown(deviations: Mapping[str, float]) -> dict[str, Factor]:
    return {name: _factor(prior, bounds) for name, (prior, bounds) in _priors(deviations).items()}


def _priors(
    deviations: Mapping[str, float], centres: Mapping[str, float] | None = None
) -> dict[str, tuple[Correction, Bounds]]:
    about = {name: (centres or {}).get(name, 1.0) for name in deviations}
    return {name: (Correction(about[name], about[name] * deviations[name]), _RANGE) for name in deviations}


def _factor(found: Correction, bounds: Bounds, unit: float = 1.0) -> Factor:
    low, high = max(bounds[0], found.interval[0]), min(bounds[1], found.interval[1])
    return Factor(value=found.value * unit, low=low * unit, high=high * unit)


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes at the peak of one rank, uncorrected. held: state, activations, messages, buffers, which are exact; workspace:
    what operations need for themselves; slack: what the allocator holds besides; outside: CUDA's context and NCCL's."""

    held: float
    workspace: float = 0.0
    slack: float = 0.0
    outside: float = 0.0


@dataclass(frozen=True)
class PredictedRun:
    """What the models say of a recorded run: everything uncorrected, whatever the calibration at hand.

    instructions: as kind_name has them -> seconds by component, of those that it predicts; step: seconds by component along
    the path that, corrected by the calibration at hand, determines the step's length: their sum, corrected, is that length
    but for the fixed seconds; memory: of each rank, or nothing; idle: share of the time in which its devices don't compute.
    """

    instructions: Mapping[str, Parts]
    step: Parts
    memory: Sequence[PredictedMemory] = ()
    idle: float = 0.0


class Calibration(BaseModel):
    """Corrections of the planner's models for one kind of device and backend; without arguments, none.

    factors: of COMPONENTS; memory: of MEMORY; fixed: seconds that every step takes besides; idle: by which share of what it
    idles a device computes faster. error: standard deviation of
    the relative errors that remain in the seconds of steps of layouts that the fit hasn't seen; layouts: how many tell it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    device: str = ""
    backend: str = ""
    factors: dict[str, Factor] = _unknown(COMPONENTS)
    memory: dict[str, Factor] = _unknown(MEMORY)
    fixed: Factor = Factor(value=0.0, low=0.0, high=0.0)
    idle: Factor = Factor(value=0.0, low=0.0, high=0.0)
    error: float = error_of(()).deviation
    layouts: int = 0

    @model_validator(mode="after")
    def _complete(self) -> Calibration:
        for known, given in ((COMPONENTS, self.factors), (MEMORY, self.memory)):
            if set(known) != set(given):
                raise ValueError(f"factors of {', '.join(known)} are needed, not of {', '.join(given)}")
        return self

    def seconds(self, parts: Parts, idle: float = 0.0) -> float:
        """These seconds by component, corrected: of an instruction. idle: of PredictedRun. Raises ConfigError for an unknown
        component.
        """
        corrected = sum(self.factors[name].value * seconds for name, seconds in _checked(parts).items())
        return corrected - self.idle.value * idle * _computed(parts)

    def instruction_seconds(self, run: PredictedRun) -> dict[str, float]:
        """Of each instruction of a run."""
        return {name: self.seconds(parts, run.idle) for name, parts in run.instructions.items()}

    def step_seconds(self, parts: Parts, idle: float = 0.0) -> float:
        """Of a whole step."""
        return self.seconds(parts, idle) + self.fixed.value

    def interval(self, seconds: float) -> tuple[float, float]:
        """Where, in nine cases of ten, a step is measured for which `seconds` are predicted (corrected)."""
        factor = Errors(self.error, self.layouts).factor
        return seconds / factor, seconds * factor

    def allocated(self, memory: PredictedMemory) -> float:
        """The most bytes in tensors, corrected, as torch.cuda.max_memory_allocated counts."""
        return memory.held + self.memory["workspace"].value * memory.workspace

    def reserved(self, memory: PredictedMemory) -> float:
        """The most bytes of the device, corrected."""
        besides = self.memory["slack"].value * memory.slack + self.memory["outside"].value * memory.outside
        return self.allocated(memory) + besides

    def write(self, path: Path) -> None:
        """As JSON, whole or not at all. Raises OSError."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def read_calibration(path: str | Path) -> Calibration:
    """What `Calibration.write` wrote. Raises ConfigError."""
    try:
        return Calibration.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"calibration '{path}' can't be read: {error}; make one by p3d plan --calibrate RUNS"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"'{path}' is no calibration of this version: {'.'.join(map(str, first['loc']))}: {first['msg']}; make it anew by "
            "p3d plan --calibrate RUNS"
        ) from error


def calibrate(records: Sequence[RunRecord], predict: Callable[[RunRecord, Calibration], PredictedRun]) -> Calibration:
    """What these runs teach: the same for the same records in any order.

    predict: as PredictedRun says; called anew with the corrections found, since other parts may then be what a step waits
    for. Of all that is tried, no correction at all included, what fits the steps best is returned. Factors are least squares
    of relative errors, robust (Huber) and drawn towards 1: what the records don't tell stays there. Raises ConfigError for
    no records, for those of several devices or backends, and for unknown components.
    """
    if not records:
        raise ConfigError("nothing to calibrate with: give directories of runs that have a run_record.json")
    kinds = sorted({(record.device, record.backend) for record in records})
    if len(kinds) > 1:
        listed = "; ".join(f"{device} with {backend}" for device, backend in kinds)
        raise ConfigError(f"the records are of several kinds of device: {listed}; calibrate each kind by itself")
    ordered = sorted(records, key=lambda record: record.model_dump_json())
    start = Calibration(device=kinds[0][0], backend=kinds[0][1])
    best, runs = _settle(ordered, predict, start)
    found = error_of(_errors_unseen(ordered, runs))
    memory = fit([row for pair in _pairs(ordered, runs) for row in _memory_rows(*pair)], _priors(MEMORY), _MEMORY_NOISE)
    return best.model_copy(
        update={
            "memory": {name: _factor(memory[name], _RANGE) for name in MEMORY},
            "error": found.deviation,
            "layouts": found.count,
        }
    )


def _pairs(records: Sequence[RunRecord], runs: Sequence[PredictedRun]) -> Iterator[tuple[RunRecord, PredictedRun]]:
    return zip(records, runs, strict=True)


def _settle(
    records: Sequence[RunRecord], predict: Callable[[RunRecord, Calibration], PredictedRun], start: Calibration
) -> tuple[Calibration, list[PredictedRun]]:
    """Predict and fit in turns, from `start` on: what fits the steps best, and the runs as it predicts them."""
    tried: list[tuple[float, Calibration, list[PredictedRun]]] = []
    calibration, settled = start, False
    for _ in range(_ROUNDS):
        if not settled:
            runs = [predict(record, calibration) for record in records]
        misfit = mean(abs(_error(*pair, calibration)) for pair in _pairs(records, runs))
        tried.append((misfit, calibration, runs))
        if settled:
            break
        before, calibration = calibration, _corrected(calibration, records, runs)
        moved = (abs(after.value - before.factors[name].value) for name, after in calibration.factors.items())
        settled = max(moved) < _SETTLED
    _, best, runs = min(tried, key=lambda one: one[0])
    return best, runs


def _error(record: RunRecord, run: PredictedRun, calibration: Calibration) -> float:
    """log(measured / predicted) of the step."""
    return log(record.step.median / calibration.step_seconds(run.step, run.idle))


def _corrected(calibration: Calibration, records: Sequence[RunRecord], runs: Sequence[PredictedRun]) -> Calibration:
    """The calibration with what these records say of time."""
    shortest = min((record.step.median for record in records), default=1.0)
    rows = [row for pair in _pairs(records, runs) for row in _time_rows(*pair, shortest)]
    priors = _priors(COMPONENTS, _centres(rows))
    priors |= {"fixed": (Correction(0.0, _FIXED), _FIXED_RANGE), "idle": (Correction(0.0, _IDLE), _IDLE_RANGE)}
    found = fit(rows, priors, _NOISE)
    return calibration.model_copy(
        update={
            "factors": {name: _factor(found[name], _RANGE) for name in COMPONENTS},
            "fixed": _factor(found["fixed"], _FIXED_RANGE, shortest),
            "idle": _factor(found["idle"], _IDLE_RANGE),
        }
    )


def _time_rows(record: RunRecord, run: PredictedRun, shortest: float) -> list[Row]:
    """Each kind of instruction weighs 1, over all chunks, which are off alike, and so does the optimizer; the step, which all
    is about, 2.

    shortest: step of all runs.
    """
    names = [name for name in record.instructions if name in run.instructions]
    kinds = Counter(_kind(name) for name in names)
    rows = [
        Row(record.instructions[name].median, _cooled(run.instructions[name], run.idle), 1 / kinds[_kind(name)])
        for name in names
    ]
    if "optimizer" in run.step:
        rows.append(Row(record.optimizer.median, {"optimizer": run.step["optimizer"]}))
    whole = max(record.step.median, sum(_checked(run.step).values()))
    return [*rows, Row(record.step.median, {**_cooled(run.step, run.idle), "fixed": shortest}, 2.0, whole)]


def _centres(rows: Sequence[Row]) -> dict[str, float]:
    """Where components are expected of whose kind alone something was measured that is far off, in the median.

    A preset may be of another machine altogether, as of CPUs that more processes share than there are.
    """
    centres: dict[str, float] = {}
    for kind in _KINDS:
        known = [(row.measured, {name: row.parts[name] for name in row.parts if name != "idle"}) for row in rows]
        alone = [(seconds, sum(parts.values()), parts) for seconds, parts in known if set(parts) <= kind]
        ratios = [measured / predicted for measured, predicted, _ in alone if measured > 0 and predicted > 0]
        if ratios and abs(log(median(ratios))) > _FAR:
            centre = min(max(median(ratios), _RANGE[0]), _RANGE[1])
            centres.update({name: centre for *_, parts in alone for name in parts})
    return centres


def _computed(parts: Parts) -> float:
    return sum(seconds for name, seconds in parts.items() if name in _COMPUTE)


def _cooled(parts: Parts, idle: float) -> dict[str, float]:
    """With what Calibration.idle takes off."""
    taken = idle * _computed(_checked(parts))
    return {**parts, "idle": -taken} if taken else dict(parts)


def _kind(name: str) -> str:
    return name.partition("@")[0]


def _memory_rows(record: RunRecord, run: PredictedRun) -> list[Row]:
    rows: list[Row] = []
    for rank, memory in zip(record.ranks, run.memory, strict=False):
        weight = 1 / len(record.ranks)
        if rank.allocated is None:
            continue
        whole = rank.reserved if rank.reserved is not None else rank.allocated
        rows.append(Row(rank.allocated - memory.held, {"workspace": memory.workspace}, weight, whole))
        if rank.reserved is not None:
            rows.append(Row(rank.reserved - rank.allocated, {"slack": memory.slack}, weight, whole))
        if rank.outside is not None:
            rows.append(Row(rank.outside, {"outside": memory.outside}, weight, whole))
    return rows


def _errors_unseen(records: Sequence[RunRecord], runs: Sequence[PredictedRun]) -> list[float]:
    """Of each layout of each model, the mean error of its steps by what the other records say alone."""
    groups: dict[tuple[str, str], list[int]] = {}
    for k, record in enumerate(records):
        groups.setdefault((record.model.digest, record.layout), []).append(k)
    errors = []
    for group in groups.values():
        rest = [k for k in range(len(records)) if k not in group]
        seen = _corrected(Calibration(), [records[k] for k in rest], [runs[k] for k in rest])
        errors.append(mean(_error(records[k], runs[k], seen) for k in group))
    return errors


def _checked(parts: Parts) -> Parts:
    for name in parts:
        if name not in COMPONENTS:
            raise ConfigError(
                f"unknown component {name!r} of predicted seconds.{nearest(name, COMPONENTS)} Known are {', '.join(COMPONENTS)}"
            )
    return parts
