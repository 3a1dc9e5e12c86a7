"""Corrections of the planner's models of time and memory, component by component, learned from recorded runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Literal

from pydantic import model_validator

from parallel3d.atomic_write import atomic_write
from parallel3d.costs.devices import Device
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord, StoredModel, read_stored
from parallel3d.planner.calibrate.correction import Factor, Prior, Row, error_deviation, error_factor, fit
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.search.result import StageMemory

# Components of time (compute, optimizer's step, links by kind) -> standard deviation of the factor, which is 1 before anything
# is measured.
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
# Fields of Device that a component's factor divides, and those that it multiplies.
_RATES = {
    **dict.fromkeys(("gemm_flops", "fp8_flops", "fp32_flops"), "gemm"),
    "attention_flops": "attention",
    "memory_bandwidth": "element_wise",
}
_TIMES = {"kernel_seconds": "kernels", "host_seconds": "host"}
# Components that a device computes. A device computes faster after idling, because at the power limit a cooler card is faster.
_COMPUTE = {"gemm", "attention", "element_wise", "kernels"}
_IDLE = Prior(0.0, 0.15, 0.0, 0.6)
# Bytes that no component of the runtime counts exactly: what operators need for themselves, what the allocator holds beyond
# its tensors, and what CUDA and NCCL hold.
MEMORY = {"workspace": 0.5, "slack": 0.5, "outside": 0.5}
# Bounds of every factor.
_RANGE = (0.25, 4.0)
# The least standard deviation of the relative errors of seconds, and of all bytes of a rank, when the factors are right.
_NOISE, _MEMORY_NOISE = 0.01, 0.003
# Seconds that every step takes besides, in shares of the shortest one.
_FIXED = Prior(0.0, 0.02, 0.0, 0.2)
# Groups of components of one kind.
_KINDS = (_COMPUTE, {"host"}, {"nvlink", "pcie"}, {"nic", "network"})
# If |log| of a median ratio is more than this, the factors of the components are expected at the ratio, not at 1.
_FAR = log(1.5)
# Rounds of predicting and fitting, until no factor moves by more.
_ROUNDS, _SETTLED = 8, 1e-3

Parts = Mapping[str, float]


def _priors(deviations: Mapping[str, float], centres: Mapping[str, float] | None = None) -> dict[str, Prior]:
    about = {name: (centres or {}).get(name, 1.0) for name in deviations}
    return {name: Prior(about[name], about[name] * deviations[name], *_RANGE) for name in deviations}


@dataclass(frozen=True)
class PredictedRun:
    """Prediction of a recorded run, everything uncorrected, whatever the calibration at hand.

    - instructions: name by kind_name -> seconds by component, for the instructions that are predicted.
    - step: seconds by component along the path that, corrected by the calibration at hand, determines the step's length:
      their corrected sum is that length without the fixed seconds.
    - memory: memory of each rank, or empty.
    - idle: share of the step in which devices don't compute.
    """

    instructions: Mapping[str, Parts]
    step: Parts
    memory: Sequence[StageMemory] = ()
    idle: float = 0.0


class Calibration(StoredModel):
    """Corrections of the planner's models for one kind of device and backend; without arguments, nothing is corrected.

    - factors: factors of COMPONENTS; memory: factors of MEMORY.
    - fixed: additional seconds of every step.
    - idle: a device computes faster by this share of the share of time that it idles.
    - error: standard deviation of the relative errors that remain in the seconds of steps of layouts that the fit hasn't
      seen; layouts: the number of layouts that it was estimated from.
    """

    format: Literal[1] = 1
    device: str = ""
    backend: str = ""
    factors: dict[str, Factor] = fit((), _priors(COMPONENTS), _NOISE)
    memory: dict[str, Factor] = fit((), _priors(MEMORY), _NOISE)
    fixed: Factor = Factor(value=0.0, low=0.0, high=0.0)
    idle: Factor = Factor(value=0.0, low=0.0, high=0.0)
    error: float = error_deviation(())
    layouts: int = 0

    @model_validator(mode="after")
    def _complete(self) -> Calibration:
        for known, given in ((COMPONENTS, self.factors), (MEMORY, self.memory)):
            if set(known) != set(given):
                raise ValueError(f"factors of {', '.join(known)} are needed, not of {', '.join(given)}")
        return self

    def seconds(self, parts: Parts, idle: float = 0.0) -> float:
        """Return the corrected seconds of an instruction. parts: seconds by component; idle: of the PredictedRun."""
        corrected = sum(self.factors[name].value * seconds for name, seconds in parts.items())
        return corrected - self.idle.value * idle * _computing(parts)

    def step_seconds(self, run: PredictedRun) -> float:
        """Return the corrected seconds of a whole step."""
        return self.seconds(run.step, run.idle) + self.fixed.value

    def interval(self, seconds: float) -> tuple[float, float]:
        """Return the 90% interval of a measured step for which `seconds` are predicted, corrected."""
        factor = error_factor(self.error, self.layouts)
        return seconds / factor, seconds * factor

    def correct_memory(self, memory: StageMemory) -> StageMemory:
        """Return the memory of a stage with corrected peaks, in bytes."""
        factors = {name: factor.value for name, factor in self.memory.items()}
        workspace, slack = _workspace(memory), _slack(memory)
        allocated = memory.allocated - workspace + factors["workspace"] * workspace
        reserved = allocated + (factors["slack"] * slack + factors["outside"] * memory.outside)
        return memory.model_copy(update={"allocated": round(allocated), "reserved": round(reserved)})

    def correct_cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster with each rate and latency corrected by the factor of its component."""
        factors = {name: factor.value for name, factor in self.factors.items()}
        if all(factor == 1.0 for factor in factors.values()):
            return cluster

        def corrected(device: Device) -> Device:
            values = {name: getattr(device, name) / factors[component] for name, component in _RATES.items()}
            values |= {name: getattr(device, name) * factors[component] for name, component in _TIMES.items()}
            return device.model_copy(update=values)

        graph = cluster.graph.copy()
        for _, _, edge in graph.edges(data=True):
            factor = factors[edge["kind"]]
            edge["latency"] *= factor
            for name in {"bandwidth", "message_bandwidth"} & edge.keys():
                edge[name] /= factor
        return replace(cluster.with_devices(corrected), graph=graph)

    def write(self, path: Path) -> None:
        """Write the calibration to a JSON file, atomically. Raises OSError."""
        atomic_write(path, self.model_dump_json(indent=1) + "\n")


def read_calibration(path: str | Path) -> Calibration:
    """Read a file that `Calibration.write` wrote. Raises ConfigError."""
    return read_stored(Calibration, Path(path), "calibration", "p3d plan --calibrate RUNS")


def calibrate(records: Sequence[RunRecord], predict: Callable[[RunRecord, Calibration], PredictedRun]) -> Calibration:
    """Fit the corrections to recorded runs. The result does not depend on the order of the records.

    predict: predicts a run. It is called again with the corrections found, since the critical path may change with them.
    Returns the corrections of the round that fits the steps best; the first round has none. Factors minimize squared relative
    errors, robustly (Huber), with a prior at 1, which keeps a factor that no record depends on at 1. Raises ConfigError
    without records, and for records of several devices or backends.
    """
    if not records:
        raise ConfigError("nothing to calibrate with: give directories of runs that have a run_record.json")
    kinds = sorted({(record.device, record.backend) for record in records})
    if len(kinds) > 1:
        listed = "; ".join(f"{device} with {backend}" for device, backend in kinds)
        raise ConfigError(f"the records are of several kinds of device: {listed}; calibrate each kind by itself")
    ordered = sorted(records, key=lambda record: record.model_dump_json())
    tried = []
    calibration, moved = Calibration(device=kinds[0][0], backend=kinds[0][1]), inf
    for _ in range(_ROUNDS):
        if moved >= _SETTLED:
            runs = [predict(record, calibration) for record in ordered]
        error = mean(abs(_error(*pair, calibration)) for pair in zip(ordered, runs, strict=True))
        tried.append((error, calibration, runs))
        if moved < _SETTLED:
            break
        before, calibration = calibration, _correct_times(calibration, ordered, runs)
        moved = max(abs(after.value - before.factors[name].value) for name, after in calibration.factors.items())
    _, best, runs = min(tried, key=itemgetter(0))
    errors = _errors_unseen(ordered, runs)
    rows = [row for record, run in zip(ordered, runs, strict=True) for row in _memory_rows(record, run)]
    memory = fit(rows, _priors(MEMORY), _MEMORY_NOISE)
    return best.model_copy(update={"memory": memory, "error": error_deviation(errors), "layouts": len(errors)})


def _error(record: RunRecord, run: PredictedRun, calibration: Calibration) -> float:
    """Return log(measured / predicted) of the step."""
    return log(record.step.median / calibration.step_seconds(run))


def _correct_times(calibration: Calibration, records: Sequence[RunRecord], runs: Sequence[PredictedRun]) -> Calibration:
    """Return the calibration with the corrections of time that fit these records best."""
    shortest = min((record.step.median for record in records), default=1.0)
    rows = [row for record, run in zip(records, runs, strict=True) for row in _time_rows(record, run, shortest)]
    found = fit(rows, {**_priors(COMPONENTS, _centres(rows)), "fixed": _FIXED, "idle": _IDLE}, _NOISE)
    fixed = Factor(**{name: number * shortest for name, number in found.pop("fixed")})
    return calibration.model_copy(update={"idle": found.pop("idle"), "fixed": fixed, "factors": found})


def _time_rows(record: RunRecord, run: PredictedRun, shortest: float) -> Iterator[Row]:
    """Yield a row for each instruction, the optimizer and the step.

    Each kind of instruction has weight 1 over all chunks, whose errors are alike; so has the optimizer. The step has weight 2.
    shortest: seconds of the shortest step of all runs.
    """
    names = [name for name in record.instructions if name in run.instructions]
    ops = Counter(name.partition("@")[0] for name in names)
    for name in names:
        parts = _with_idle(run.instructions[name], run.idle)
        yield Row(record.instructions[name].median, parts, 1 / ops[name.partition("@")[0]])
    if "optimizer" in run.step:
        yield Row(record.optimizer.median, {"optimizer": run.step["optimizer"]})
    whole = max(record.step.median, sum(run.step.values()))
    yield Row(record.step.median, {**_with_idle(run.step, run.idle), "fixed": shortest}, 2.0, whole)


def _centres(rows: Sequence[Row]) -> dict[str, float]:
    """Return expected factors of components whose median ratio of measured to predicted time is far from 1.

    Only rows in which a component, or its kind, is measured alone count. A preset may be far off, for example on CPUs that are
    shared by more processes than there are cores.
    """
    centres: dict[str, float] = {}
    for kind in _KINDS:
        alone = [row for row in rows if row.parts.keys() - {"idle"} <= kind]
        predicted = [sum(seconds for name, seconds in row.parts.items() if name != "idle") for row in alone]
        pairs = zip(alone, predicted, strict=True)
        ratios = [row.measured / seconds for row, seconds in pairs if row.measured > 0 and seconds > 0]
        if ratios and abs(log(median(ratios))) > _FAR:
            centre = min(max(median(ratios), _RANGE[0]), _RANGE[1])
            centres |= {name: centre for row in alone for name in row.parts}
    return centres


def _computing(parts: Parts) -> float:
    return sum(seconds for name, seconds in parts.items() if name in _COMPUTE)


def _with_idle(parts: Parts, idle: float) -> dict[str, float]:
    """Return the parts, with one more for Calibration.idle."""
    return {**parts, "idle": -idle * _computing(parts)}


def _workspace(memory: StageMemory) -> int:
    return memory.parts.get("workspace", 0)


def _slack(memory: StageMemory) -> int:
    return memory.reserved - memory.allocated - memory.outside


def _memory_rows(record: RunRecord, run: PredictedRun) -> Iterator[Row]:
    weight = 1 / len(record.ranks)
    for rank, memory in zip(record.ranks, run.memory, strict=False):
        if rank.allocated is None:
            continue
        whole = rank.allocated if rank.reserved is None else rank.reserved
        exact = memory.allocated - _workspace(memory)
        yield Row(rank.allocated - exact, {"workspace": _workspace(memory)}, weight, whole)
        if rank.reserved is not None:
            yield Row(rank.reserved - rank.allocated, {"slack": _slack(memory)}, weight, whole)
        if rank.outside is not None:
            yield Row(rank.outside, {"outside": memory.outside}, weight, whole)


def _errors_unseen(records: Sequence[RunRecord], runs: Sequence[PredictedRun]) -> list[float]:
    """Return the mean error of the steps of each layout of each model, corrected only by the other records."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for k, record in enumerate(records):
        groups[record.model.digest, record.layout].append(k)
    errors = []
    for group in groups.values():
        rest = [k for k in range(len(records)) if k not in group]
        seen = _correct_times(Calibration(), [records[k] for k in rest], [runs[k] for k in rest])
        errors.append(mean(_error(records[k], runs[k], seen) for k in group))
    return errors
