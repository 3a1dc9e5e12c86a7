"""Predictions of recorded runs, their comparison with what was measured, and their parts for the calibration."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from rich.table import Column, Table

from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.costs.devices import compute_seconds, preset_devices, preset_of, typical_seconds
from parallel3d.costs.work import Work
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord, kind_name
from parallel3d.planner.calibrate.calibration import Calibration, PredictedRun, calibrate
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import default_path, load_cluster, measured_name
from parallel3d.planner.formats import duration, memory
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.predict.timing import exchange_seconds
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.plan import prediction_of, profile_of
from parallel3d.planner.search.result import Prediction
from parallel3d.schedule.builders import from_lists, placement_of
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.specs import layer_name

# With more instructions or ranks than this, the table shows only the worst, and the mean error of all.
_MOST_LINES = 16
# Name of a part of the step in Prediction.breakdown -> names in RunRecord.breakdown.
_PARTS = {
    "forward": ("forward",),
    "backward": ("backward",),
    "exposed communication": ("communication", "reduce"),
    "optimizer": ("step",),
}

_share = "{:.1%}".format


class _Line(NamedTuple):
    """One predicted and measured number. shown: formats it, as `_share` does shares of the time."""

    what: str
    shown: Callable[[float], str]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; the difference if these are shares."""
        difference = self.predicted - self.measured
        if self.shown is _share or not difference:
            return difference
        return difference / self.measured if self.measured else float("inf")


def compare(record: RunRecord, prediction: Prediction, instructions: Mapping[str, float]) -> Table:
    """Return a table of what was predicted and measured of a run: step, medians of instructions, peak memory of each rank.

    Errors are in percent; those of shares are in percentage points. Values that one side lacks are left out. instructions:
    predicted seconds, by kind_name.
    """
    columns = [Column(name, justify="right" if name else "left") for name in ("", "predicted", "measured", "error")]
    table = Table(*columns, title=f"{record.layout} on {record.device}", title_justify="left")
    known = {name: timing.median for name, timing in record.instructions.items() if name in instructions}
    medians = [_Line(name, duration, instructions[name], median) for name, median in known.items()]
    for lines in (_step(record, prediction), medians, list(_peaks(record, prediction))):
        worst = sorted(lines, key=lambda line: -abs(line.error))[:_MOST_LINES]
        for line in (line for line in lines if line in worst):
            error = f"{line.error * 100:+.1f} " + ("pp" if line.shown is _share else "%")
            table.add_row(line.what, line.shown(line.predicted), line.shown(line.measured), error)
        if len(lines) > _MOST_LINES:
            mean = sum(abs(line.error) for line in lines) / len(lines)
            table.add_row(f"... {len(lines)}, mean error", "", "", f"{mean:.1%}")
        table.add_section()
    return table


def _step(record: RunRecord, prediction: Prediction) -> list[_Line]:
    """Return the seconds of the step and of its parts, and the bubble."""
    parts = [
        _Line(name, duration, prediction.breakdown[name], sum(record.breakdown.get(part, 0.0) for part in measured))
        for name, measured in _PARTS.items()
        if name in prediction.breakdown
    ]
    step = _Line("step", duration, prediction.seconds, record.step.median)
    return [step, *parts, _Line("bubble", _share, prediction.bubble, record.bubble)]


def _peaks(record: RunRecord, prediction: Prediction) -> Iterator[_Line]:
    """Yield the peak memory of each rank."""
    stages = {stage.stage: stage for stage in prediction.memory}
    for rank in record.ranks:
        if rank.stage not in stages:
            continue
        stage = stages[rank.stage]
        if rank.allocated is not None:
            yield _Line(f"rank {rank.rank} allocated", memory, stage.allocated, rank.allocated)
        if rank.reserved is not None and rank.outside is not None:
            yield _Line(f"rank {rank.rank} reserved", memory, stage.reserved, rank.reserved + rank.outside)


_WORK = {
    Op.FORWARD: "forward",
    Op.BACKWARD_INPUT: "input_gradient",
    Op.BACKWARD_WEIGHT: "weight_gradient",
    Op.BACKWARD: "backward",
}
# The fields of Work that each component of compute takes its time for. GEMMs' operands and results go over the memory too.
_COMPONENT_WORK = {
    "gemm": ["gemm_flops", "fp32_gemm_flops", "fp8_flops"],
    "attention": ["attention_flops", "fp32_attention_flops"],
    "element_wise": ["moved", "operands", "weights"],
    "kernels": ["kernels"],
}
_ENDS = {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}
_COLLECTIVES = (Op.REDUCE_GRADS, Op.REDUCE_REPLICAS, Op.GATHER_PARAMS)


class RunPredictor:
    """Predicts recorded runs of one model, as if they had run on the first GPUs of a cluster.

    Raises ConfigError for a record of another model, or of more ranks than the cluster has.
    """

    def __init__(self, model: PlannedModel, cluster: Cluster):
        self._model, self._cluster = model, cluster
        self._profiles: dict[
            tuple[str, bool], ModelProfile
        ] = {}  # by the configuration, and whether of the model as it is
        # Keys: a record's id and the corrections. The stored records keep the ids valid.
        self._predicted: dict[tuple[int, str], tuple[RunRecord, Predictor, StepPrediction]] = {}

    def predict(self, record: RunRecord, calibration: Calibration) -> tuple[Prediction, Mapping[str, float]]:
        """Return the prediction of the run's step, and the seconds of its instructions, named by kind_name."""
        predictor, predicted = self._predict_step(record, calibration)
        run = self.parts(record, calibration)
        seconds = {name: calibration.seconds(parts, run.idle) for name, parts in run.instructions.items()}
        return prediction_of(predictor, predicted), seconds

    def parts(self, record: RunRecord, calibration: Calibration) -> PredictedRun:
        """Return the uncorrected parts of the run, and of its step along the path that is the longest when corrected."""
        _, predicted = self._predict_step(record, calibration)
        plain, uncorrected = self._predict_step(record, Calibration())
        components = cache(partial(_components, plain, uncorrected))
        kinds = dict.fromkeys(i._replace(micro_batch=0) for rank in predicted.program.instructions for i in rank)
        cost, host = predicted.cost.cost(), predicted.cost.host()
        slower = calibration.factors["host"].value
        instructions = {
            kind_name(i): parts
            for i in kinds
            if (parts := {"host": host(i) / slower} if host and host(i) > cost(i) else components(i))
        }
        longer = predicted.makespan / max(predicted.timeline.makespan, 1e-12)
        step = defaultdict(float, {"optimizer": uncorrected.optimizer})
        path = predicted.critical_path
        if path.host > 0:
            step["host"] += longer * path.host / slower
        for i, seconds in path.instructions:
            share = longer * seconds / cost(i) if cost(i) > 0 else 0.0
            for name, part in components(i._replace(micro_batch=0)).items():
                step[name] += share * part
        peaks = [uncorrected.memory[rank.stage] for rank in record.ranks]
        return PredictedRun(instructions, step, peaks, predicted.bubble)

    def _predict_step(self, record: RunRecord, calibration: Calibration) -> tuple[Predictor, StepPrediction]:
        model, layout = self._model_of(record), Layout(**{name: getattr(record, name) for name in Layout.model_fields})
        check_kind(record.device, record.backend, self._cluster)
        if layout.world_size > len(self._cluster.gpus):
            raise ConfigError(
                f"the run {record.layout} had {layout.world_size} ranks, but {self._cluster.name} has "
                f"{len(self._cluster.gpus)} GPUs; give the run's cluster by --cluster"
            )
        corrections = calibration.model_dump_json(exclude={"device", "backend"})
        if (id(record), corrections) in self._predicted:
            return self._predicted[id(record), corrections][1:]
        key = json.dumps(record.config, sort_keys=True, default=str), model is self._model
        if key not in self._profiles:
            self._profiles[key] = profile_of(model, self._cluster, load(record.config))
        network = Network(calibration.correct_cluster(self._cluster))
        predictor = Predictor(model, self._profiles[key], network, calibration)
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        compute = None if record.program is None else from_lists(record.program, placement)
        predicted = predictor.predict(layout, bounds=record.bounds, compute=compute)
        self._predicted[id(record), corrections] = record, predictor, predicted
        return predictor, predicted

    def _model_of(self, record: RunRecord) -> PlannedModel:
        """Return the model as it is, or in half blocks if those ran."""
        names = [layer_name(layer) for layer in self._model.layers]
        if tuple(names) == record.model.layers:
            return self._model
        if tuple(map(layer_name, self._model.halves or ())) == record.model.layers:
            return self._model.in_halves()
        raise ConfigError(
            f"the run's model has {len(record.model.layers)} layers ({', '.join(dict.fromkeys(record.model.layers))}), but "
            f"{self._model.name} {len(names)} ({', '.join(dict.fromkeys(names))}); give the run's model by --model"
        )


def check_kind(device: str, backend: str, cluster: Cluster) -> None:
    """Raise ConfigError for what was measured on another kind of device than the cluster's, as far as both are known."""
    known = preset_devices().device("cpu") if backend == "gloo" else preset_of(device)
    presets = {gpu.device.preset for gpu in cluster.gpus}
    if known is not None and "" not in presets and known.name not in presets:
        raise ConfigError(
            f"measured on {device} with {backend}, but {cluster.name} has {', '.join(sorted(presets))}; give a cluster of "
            f"{known.name} by --cluster, or what was measured on the cluster's kind of device"
        )


def cluster_of(record: RunRecord) -> Cluster:
    """Return the cluster that a run had: this host as it was measured, if it has enough of such devices, else by its preset.

    Raises ConfigError for a device that there is no preset of.
    """
    device, count = "cpu" if record.backend == "gloo" else record.device, len(record.ranks)
    if default_path().exists():
        measured = load_cluster(default_path())
        if len(measured.gpus) >= count and {gpu.device.name for gpu in measured.gpus} == {measured_name(device)}:
            return measured
    preset = preset_devices().device("cpu") if record.backend == "gloo" else preset_of(device)
    if preset is None:
        raise ConfigError(f"there is no preset of {device!r}; measure it by p3d plan --measure")
    return load_cluster(f"{count}x{preset.name}")


def compare_run(record: RunRecord, model: PlannedModel, earlier: Sequence[RunRecord] = ()) -> Table:
    """Compare the prediction of a run with what it measured, see `compare`.

    earlier: records; those of this model, on this kind of device and no more ranks, correct the prediction. Raises
    ConfigError as cluster_of.
    """
    predictor = RunPredictor(model, cluster_of(record))
    kind, most = (record.model, record.device, record.backend), len(record.ranks)
    alike = [run for run in earlier if (run.model, run.device, run.backend) == kind and len(run.ranks) <= most]
    calibration = calibrate(alike, predictor.parts) if alike else Calibration()
    return compare(record, *predictor.predict(record, calibration))


def _components(predictor: Predictor, predicted: StepPrediction, i: Instruction) -> dict[str, float]:
    """Return the uncorrected seconds of an instruction by component; empty for one that takes no time."""
    links, placement = predicted.split.links, predicted.program.placement
    stage = placement[i.chunk]
    if i.op in _WORK:
        return _compute_components(predictor, predicted, i)
    if i.op in _ENDS:
        members = links.stage_groups(stage, placement[i.chunk + _ENDS[i.op]])
    elif i.op in _COLLECTIVES:
        members = links.replica_groups(stage)
    else:
        return {}
    seconds = predicted.cost.cost()(i)
    return {links.kind(members): seconds} if seconds > 0 else {}


def _compute_components(predictor: Predictor, predicted: StepPrediction, i: Instruction) -> dict[str, float]:
    links, bounds = predicted.split.links, predicted.split.bounds
    stage = predicted.program.placement[i.chunk]
    device = max(links.devices[stage], key=typical_seconds)
    layers = predictor.layers(predicted.layout)[bounds[i.chunk] : bounds[i.chunk + 1]]
    work: Work = sum((getattr(layer, _WORK[i.op]) for layer in layers), Work())
    parts: defaultdict[str, float] = defaultdict(float)
    for name, fields in _COMPONENT_WORK.items():
        parts[name] = compute_seconds(Work(**{field: getattr(work, field) for field in fields}), device)
    for exchange in work.exchanges:
        waited = exchange_seconds(exchange, device, links.over_tensor_ranks, links.overlap)
        parts[links.kind(links.tensor_groups(stage))] += waited
    slower, added = (float(seconds[i.chunk]) for seconds in predicted.split.reducing)
    if added > 0 and i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
        parts[links.kind(links.replica_groups(stage))] += slower
        parts["element_wise"] += added
    return parts
