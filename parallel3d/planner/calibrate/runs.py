"""What the models say of a run that was recorded: for comparison, and for calibration component by component."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from parallel3d.config.layout import Layout
from parallel3d.costs.work import Work
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord, kind_name
from parallel3d.planner.calibrate.calibration import Calibration, PredictedMemory, PredictedRun, calibrate
from parallel3d.planner.calibrate.corrected import corrected
from parallel3d.planner.calibrate.measure import default_path
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.outlook import Outlook
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.predict.timing import Integers, compute_seconds, exchange_seconds
from parallel3d.planner.search.comparison import Comparison, compare
from parallel3d.planner.search.found import Found, prediction_of
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.plan import profile_of
from parallel3d.planner.search.presets import preset_of
from parallel3d.planner.search.result import Prediction, StageMemory
from parallel3d.schedule.builders import from_lists, placement_of
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.specs import layer_name

_WORK = {
    Op.FORWARD: ("forward",),
    Op.BACKWARD_INPUT: ("input_gradient",),
    Op.BACKWARD_WEIGHT: ("weight_gradient",),
    Op.BACKWARD: ("backward",),
}
_ENDS = {Op.SEND_ACTIVATION: 1, Op.SEND_GRADIENT: -1}
_LINKS = (*_ENDS, Op.REDUCE_GRADS, Op.REDUCE_REPLICAS, Op.GATHER_PARAMS)


class RunPredictor:
    """Predicts recorded runs of one model, as if they had run on the first GPUs of a cluster.

    Raises ConfigError for a record of another model, or of more ranks than the cluster has.
    """

    def __init__(self, model: PlannedModel, cluster: Cluster):
        self._model, self._cluster = model, cluster
        self._networks: dict[str, Network] = {}
        self._profiles: dict[tuple[str, bool], ModelProfile] = {}

    def predict(self, record: RunRecord, calibration: Calibration) -> tuple[Prediction, Mapping[str, float]]:
        """The run's step, and the seconds of its instructions by kind_name."""
        predictor, outlook = self._outlook(record, calibration)
        found = Found(outlook, predictor.memory(outlook))
        samples = record.micro_batch * record.micro_batches * record.replicas
        seconds = calibration.instruction_seconds(self.parts(record, calibration))
        return prediction_of(predictor, found, samples), seconds

    def parts(self, record: RunRecord, calibration: Calibration) -> PredictedRun:
        """As calibrate() asks for it: uncorrected parts, of the step along the path that is the longest when corrected."""
        _, outlook = self._outlook(record, calibration)
        plain, uncorrected = self._outlook(record, Calibration())
        components = Components(plain, uncorrected)
        kinds = dict.fromkeys(i._replace(micro_batch=0) for rank in outlook.program.instructions for i in rank)
        cost, host = outlook.cost.cost(), outlook.cost.host()
        slower = calibration.factors["host"].value
        instructions = {
            kind_name(i): parts
            for i in kinds
            if (parts := {"host": host(i) / slower} if host and host(i) > cost(i) else components.of(i))
        }
        longer = outlook.makespan / max(outlook.timeline.makespan, 1e-12)
        step = defaultdict(float, {"optimizer": uncorrected.optimizer})
        path = outlook.critical_path
        if path.host > 0:
            step["host"] += longer * path.host / slower
        for i, seconds in path.instructions:
            share = longer * seconds / cost(i) if cost(i) > 0 else 0.0
            for name, part in components.of(i._replace(micro_batch=0)).items():
                step[name] += share * part
        return PredictedRun(instructions, step, _memory(record, plain.memory(uncorrected)), outlook.bubble)

    def _outlook(self, record: RunRecord, calibration: Calibration) -> tuple[Predictor, Outlook]:
        model, layout = self._model_of(record), self._layout(record)
        network = self._networks.setdefault(
            calibration.model_dump_json(), Network(corrected(self._cluster, calibration))
        )
        key = json.dumps(record.config, sort_keys=True, default=str), model is self._model
        if key not in self._profiles:
            self._profiles[key] = profile_of(model, self._cluster, record.config)
        predictor = Predictor(model, self._profiles[key], network, calibration)
        placement = placement_of(layout.placement, layout.stages, layout.chunks)
        compute = None if record.program is None else from_lists(record.program, placement)
        return predictor, predictor.predict(layout, exactly=True, whole=True, bounds=record.bounds, compute=compute)

    def _model_of(self, record: RunRecord) -> PlannedModel:
        """As it is, or of half blocks if those ran."""
        names = [layer_name(layer) for layer in self._model.layers]
        if tuple(names) == record.model.layers:
            return self._model
        if tuple(map(layer_name, self._model.halves or ())) == record.model.layers:
            return self._model.in_halves()
        raise ConfigError(
            f"the run's model has {len(record.model.layers)} layers ({', '.join(dict.fromkeys(record.model.layers))}), but "
            f"{self._model.name} {len(names)} ({', '.join(dict.fromkeys(names))}); give the run's model by --model"
        )

    def _layout(self, record: RunRecord) -> Layout:
        layout = Layout(**{name: getattr(record, name) for name in Layout.model_fields})
        if layout.world_size > len(self._cluster.gpus):
            raise ConfigError(
                f"the run {record.layout} had {layout.world_size} ranks, but {self._cluster.name} has "
                f"{len(self._cluster.gpus)} GPUs; give the run's cluster by --cluster"
            )
        return layout


def cluster_of(record: RunRecord) -> Cluster:
    """Of what this host was measured to be, where that has been done for enough such devices; else of the device's preset.

    Raises ConfigError for a device that there is no preset of.
    """
    wanted, count = "cpu", len(record.ranks)
    if record.backend != "gloo":
        preset = preset_of(record.device)
        if preset is None:
            raise ConfigError(f"there is no preset of {record.device!r}; measure it by p3d plan --measure")
        wanted = preset.name
    if default_path().exists():
        measured = load_cluster(default_path())
        if len(measured.gpus) >= count and {gpu.device.name for gpu in measured.gpus} == {wanted}:
            return measured
    return load_cluster(f"{count}x{wanted}")


def compare_run(record: RunRecord, model: PlannedModel, earlier: Sequence[RunRecord] = ()) -> Comparison:
    """What was predicted of a run beside what it measured.

    earlier: records; those of this model, on this kind of device and ranks, correct the prediction. Raises ConfigError as
    cluster_of.
    """
    predictor = RunPredictor(model, cluster_of(record))
    alike = [
        run
        for run in earlier
        if (run.model, run.device, run.backend) == (record.model, record.device, record.backend)
        and len(run.ranks) <= len(record.ranks)
    ]
    calibration = calibrate(alike, predictor.parts) if alike else Calibration()
    return compare(record, *predictor.predict(record, calibration))


class Components:
    """Uncorrected seconds of instructions by component of the calibration."""

    def __init__(self, predictor: Predictor, outlook: Outlook):
        self._outlook, self._links = outlook, outlook.links
        self._layers = predictor.layers(outlook.layout)
        layout = outlook.layout
        self._placement = placement_of(layout.placement, layout.stages, layout.chunks)
        self._cost = outlook.cost.cost()

    def of(self, i: Instruction) -> dict[str, float]:
        """Of an instruction of any micro-batch; nothing for one that takes no time."""
        if i.op in _WORK:
            return self._compute(i)
        seconds = self._cost(i)
        if i.op not in _LINKS or not seconds > 0:
            return {}
        return {self._links.kind(self._members(i)): seconds}

    def _compute(self, i: Instruction) -> dict[str, float]:
        device = max(
            self._links.devices(self._placement[i.chunk]), key=lambda d: compute_seconds(Work(1e15, 1e14, 1e12), d)
        )
        parts: defaultdict[str, float] = defaultdict(float)
        for layer in self._layers[self._outlook.bounds[i.chunk] : self._outlook.bounds[i.chunk + 1]]:
            for work in (getattr(layer, name) for name in _WORK[i.op]):
                parts["gemm"] += compute_seconds(Work(gemm_flops=work.gemm_flops), device)
                parts["attention"] += compute_seconds(Work(attention_flops=work.attention_flops), device)
                # What products read and write goes over the memory too.
                beside = Work(moved=work.moved, operands=work.operands, weights=work.weights)
                parts["element_wise"] += compute_seconds(beside, device)
                parts["kernels"] += compute_seconds(Work(kernels=work.kernels), device)
                for exchange in work.exchanges:
                    members = self._links.slice_groups(self._placement[i.chunk])
                    waited = exchange_seconds(exchange, device, self._links.over_slices, self._links.overlap)
                    parts[self._links.kind(members)] += waited
        slower, added = (float(seconds[i.chunk]) for seconds in self._outlook.reducing)
        if added > 0 and i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            parts[self._links.kind(self._links.replica_groups(self._placement[i.chunk]))] += slower
            parts["element_wise"] += added
        return parts

    def _members(self, i: Instruction) -> Integers:
        """[groups, GPUs] that a transfer or a collective over replicas or stages goes between."""
        stage = self._placement[i.chunk]
        if i.op in _ENDS:
            return self._links.pairs(stage, self._placement[i.chunk + _ENDS[i.op]])
        return self._links.replica_groups(stage)


def _memory(record: RunRecord, stages: Sequence[StageMemory]) -> list[PredictedMemory]:
    """Of each rank."""
    found = []
    for rank in record.ranks:
        memory = stages[rank.stage]
        workspace = memory.parts.get("workspace", 0)
        slack = memory.reserved - memory.allocated - memory.outside
        found.append(PredictedMemory(memory.allocated - workspace, workspace, slack, memory.outside))
    return found
