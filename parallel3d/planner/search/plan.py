"""Plan of a model on a cluster: search, improvement of the best layouts, what they send, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from parallel3d.config import SELECTIVE, Config, load
from parallel3d.config.layout import Layout, PartialLayout, configuration, given_section
from parallel3d.costs.forked import ForkedCalls
from parallel3d.costs.layer_costs import LayerCost
from parallel3d.costs.work import Collective
from parallel3d.errors import ConfigError, ScheduleError
from parallel3d.planner import rare_collections
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.network.placement import Traffic, place
from parallel3d.planner.predict.costs import Reductions, StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.reasons import trade_off, what_would_fit, why_not
from parallel3d.planner.search.result import LinkLoad, PlanResult, Prediction, RankPlace, TimelineSpan
from parallel3d.planner.search.search import MOST_NEAR, BranchAndBound, evaluate, listed
from parallel3d.planner.search.space import POLICIES, Space, enumerate_space
from parallel3d.schedule.auto import Measured, make_plan
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.memory import bytes_in_flight
from parallel3d.schedule.timing import Span
from parallel3d.schedule.zero_bubble import DEFAULT_MAX_IN_FLIGHT
from parallel3d.specs import Layer, layer_name

# Candidates within this ratio of the shortest step, at most MOST_NEAR, are placed and split with more care.
_NEAR = 1.02
_MIXED = 3  # candidates that get policies by layer
_MOST_SAMPLES, _MOST_LAYERS = 10**8, 1_100  # the time of a plan grows by the square of the layers
_MOST_SEARCHED = 32  # chunks of all stages that are split with more care
# (chunks, placement) that "auto" may have -> the named schedule of split backwards.
_NAMED = {(1, "loop"): "zb-h1", (2, "v"): "zbv", (2, "loop"): "zb-looped", (4, "loop"): "zb-looped"}
# Chunks of all stages x micro-batches: planning a longer pipeline takes longer than the rest of the plan.
_QUICK = 160


@dataclass(frozen=True)
class Question:
    """Model and cluster to plan for.

    - fixed: what the user has decided of the layout; measured: see Predictor.
    - every_auto: whether schedule "auto" is planned for all listed layouts, also those with long pipelines.
    - process: another process to trace layers in, if there is one.
    """

    model: PlannedModel
    cluster: Cluster
    global_batch: int
    num_best: int = 5
    fixed: PartialLayout | None = None
    calibration: Calibration = field(default_factory=Calibration)
    measured: Sequence[LayerCost] | None = None
    every_auto: bool = False
    process: ForkedCalls | None = None


class Planner:
    """Answers one question. Raises ConfigError if it has no answer.

    like: planner of the same model on the same kind of device, whose configuration differs in zero_optimization alone: its
    traces are used again.
    """

    def __init__(self, question: Question, like: Planner | None = None):
        self.question, model, cluster = question, question.model, question.cluster
        config = load(configuration(Layout(zero=3), model.config))  # with all keys that may count
        self.space = self._space(config)
        known = None if like is None else like.profile.with_zero(config)
        self.profile: ModelProfile = known or profile_of(model, cluster, config)
        if question.process is not None and known is None:
            self._trace_in(question.process)
        self.network = Network(question.calibration.correct_cluster(cluster))
        self.predictor = Predictor(model, self.profile, self.network, question.calibration, question.measured)

    def _trace_in(self, process: ForkedCalls) -> None:
        space = self.space
        if space.halves.any():
            self.profile.of_layers(self._halves())
        columns = np.unique(np.stack([space.tensor_ranks, space.sequence_parallel]), axis=1).tolist()
        slicings = [(ranks, bool(parallel)) for ranks, parallel in zip(*columns, strict=True)]
        asked = {POLICIES[policy] for policy in np.unique(space.policy).tolist()}
        policies = [policy for policy in SELECTIVE if asked & {policy, "auto"}]
        # First those that bounds of all layouts need.
        partly = [(slicing, policy, 1) for slicing in slicings for policy in policies]
        self.profile.trace_in(process, [*((slicing, None, 1) for slicing in slicings), *partly])

    def _space(self, config: Config) -> Space:
        question, fixed = self.question, self.question.fixed
        count, batch = len(question.cluster.gpus), question.global_batch
        if not 1 <= batch <= _MOST_SAMPLES:
            raise ConfigError(f"--global-batch is {batch}; give the samples of a step, 1 to {_MOST_SAMPLES}")
        tensor_ranks = possible_tensor_ranks(max(Counter(gpu.host for gpu in question.cluster.gpus).values()))
        layers, halves = len(question.model.layers), len(self._halves())
        if layers > _MOST_LAYERS:
            raise ConfigError(f"{question.model.name} has {layers} layers; plan for a model of {_MOST_LAYERS} or fewer")
        offloads = config.zero_optimization.offload_param.device not in ("none", None)
        space = enumerate_space(count, batch, layers, halves, tensor_ranks, fixed, offloads)
        if len(space):
            return space
        if fixed is not None and len(enumerate_space(count, batch, layers, halves, tensor_ranks)):
            raise ConfigError(
                f"no layout of {count} GPUs with a global batch of {batch} is {fixed.text!r}; leave some of it open"
            )
        raise ConfigError(
            f"no layout of {count} GPUs makes up a global batch of {batch} samples with {layers} layers: "
            f"replicas x micro-batches x samples must be {batch}; give a multiple of a divisor of {count}"
        )

    def _halves(self) -> Sequence[Layer]:
        """Return the half blocks that may be layers; none if they aren't known, or the configuration chooses layers.

        Raises ConfigError if they aren't known but the user wants them.
        """
        model, fixed = self.question.model, self.question.fixed
        if fixed is not None and fixed.units == "half":
            return model.in_halves().layers
        pipeline, compiled = (given_section(model.config, section) for section in ("pipeline", "compile"))
        chooses = pipeline.get("checkpointable_layers") is not None or compiled.get("layers") is not None
        return [] if chooses or model.halves is None else model.halves

    @rare_collections()
    def answer(self) -> PlanResult:
        """Search the space, improve the best layouts, and return the result."""
        search = BranchAndBound(self.predictor, self.space, self.question.num_best)
        found = search.run()
        near = [c for c in found[:MOST_NEAR] if c.rank[1] <= _NEAR * found[0].rank[1]]
        improved = sorted((improve(self.predictor, candidate) for candidate in near), key=attrgetter("rank"))
        improved = [*map(self._with_policies, improved[:_MIXED]), *improved[_MIXED:], *found[len(near) :]]
        return self._result(search, listed(self._with_autos(improved, search), self.question.num_best))

    def _with_policies(self, step: StepPrediction) -> StepPrediction:
        """Give each layer of a layout that recomputes all of them a policy of its own, if that makes the step shorter."""
        layout, fixed = step.layout, self.question.fixed
        if layout.recompute != 1 or layout.is_by_layer or (fixed is not None and "recompute" in fixed.given):
            return step
        other = layout.model_copy(update={"policy": "auto"})
        other_step = evaluate(self.predictor, other, step.split.links.ranks.ravel().tolist(), step.split.bounds)
        return min(step, other_step, key=attrgetter("rank"))

    def _with_autos(self, found: list[StepPrediction], search: BranchAndBound) -> list[StepPrediction]:
        """Add schedule "auto" on the best candidate's chunks if that is quick; if asked for, on all chunks, and it alone."""
        found = sorted(found, key=lambda c: c.rank)
        question = self.question
        schedule = None if question.fixed is None else question.fixed.decided("schedule")
        if schedule not in (None, "auto"):
            return found
        if schedule == "auto":
            chosen = found[: max(MOST_NEAR, question.num_best)]
        elif question.every_auto:
            chosen = listed(found, question.num_best)
        else:
            chosen = [c for c in found[:1] if is_quick(c.layout)]
        autos = {c.layout: with_auto(self.predictor, c.layout, c.split.links.ranks.ravel().tolist()) for c in chosen}
        if schedule == "auto" or question.every_auto:
            for step in chosen:
                self._weigh(step, search, autos)
        fitting = [auto for auto in autos.values() if auto is not None and auto.fits]
        return sorted(fitting if schedule == "auto" else found + fitting, key=lambda c: c.rank)

    def _weigh(self, step: StepPrediction, search: BranchAndBound, autos: dict[Layout, StepPrediction | None]) -> None:
        """Predict "auto" with other recomputation, chunks and units of layers than a candidate's, where that is quick.

        A schedule made for the memory may hold fewer micro-batches than a named one, and then needs less recomputation than the
        candidates that fit; or it has room for more chunks. Layouts come in the order of their lower bounds, as long as these
        are below the shortest that fits. autos: by layout as named, to which this adds.
        """
        space, bounds, layout = self.space, search.bounds.seconds, step.layout
        own = {
            name: getattr(layout, name)
            for name in ("stages", "tensor_ranks", "sequence_parallel", "micro_batch", "zero")
        }
        rows = np.all([getattr(space, name) == value for name, value in own.items()], axis=0)
        order = np.flatnonzero(rows & np.isfinite(bounds))
        for k in order[np.argsort(bounds[order], kind="stable")]:
            best = min((auto.seconds for auto in autos.values() if auto is not None and auto.fits), default=np.inf)
            if bounds[k] >= best:
                break
            other = space.layout(k)
            if other not in autos and is_quick(other):
                autos[other] = with_auto(self.predictor, other, step.split.links.ranks.ravel().tolist())

    def _result(self, search: BranchAndBound, best: Sequence[StepPrediction]) -> PlanResult:
        question, predictor = self.question, self.predictor
        shown = [prediction_of(predictor, c) for c in best]
        winner = best[0] if best else None
        live = winner.limits.live if winner and winner.limits else None
        remedy, lacking = (None, 0) if best else what_would_fit(search)
        return PlanResult(
            model=question.model.name,
            cluster=question.cluster.name,
            num_devices=len(question.cluster.gpus),
            global_batch=question.global_batch,
            seq=question.model.seq,
            best=tuple(shown),
            rejected=why_not(search, shown),
            trade_off=trade_off([*best, *search.fitting]),
            timeline=tuple(map(_recorded, winner.timeline.spans)) if winner else (),
            links=link_loads(predictor, winner) if winner else (),
            map=rank_map(self.network.cluster, winner) if winner else (),
            config=configuration(winner.layout, question.model.config, winner.split.bounds, live) if winner else {},
            layers=tuple(map(layer_name, question.model.layers)),
            halves=tuple(map(layer_name, self._halves())),
            remedy=remedy,
            lacking=lacking,
            considered=len(self.space),
            simulated=len(search.candidates),
            reserve=question.cluster.reserve,
            on_gpus=not on_cpus(question.cluster),
        )


def possible_tensor_ranks(gpus: int) -> list[int]:
    """Return the possible tensor-parallel ranks on hosts of this many GPUs: powers of two, and what fills a host evenly."""
    return [n for n in range(1, gpus + 1) if n & (n - 1) == 0 or gpus % n == 0]


def profile_of(model: PlannedModel, cluster: Cluster, config: Config) -> ModelProfile:
    """Return the profile of the model on the cluster's kind of device, under a configuration."""
    inputs, labels = model.sample(1)
    return ModelProfile(model.layers, inputs, labels, model.loss_fn, config, "cpu" if on_cpus(cluster) else "cuda")


def on_cpus(cluster: Cluster) -> bool:
    """Whether the cluster's devices are processes on CPUs."""
    return all(gpu.device.name == "cpu" for gpu in cluster.gpus)


def _recorded(span: Span) -> TimelineSpan:
    op, chunk, micro_batch, bucket, _ = span.instruction
    return TimelineSpan(span.rank, op.value, chunk, micro_batch, span.start, span.end, bucket)


def rank_map(cluster: Cluster, step: StepPrediction) -> tuple[RankPlace, ...]:
    """Return the device of each rank."""
    ranks = step.split.links.ranks
    gpus = zip(np.ndindex(*ranks.shape), (cluster.gpus[place] for place in ranks.ravel()), strict=True)
    return tuple(
        RankPlace(rank=rank, host=gpu.host, gpu=gpu.index, pipe=pipe, data=data, model=model)
        for rank, ((pipe, data, model), gpu) in enumerate(gpus)
    )


def improve(predictor: Predictor, step: StepPrediction) -> StepPrediction:
    """Put a layout's ranks where `place` does, and split its layers with more care, if that makes the step shorter."""
    layout = step.layout
    places = place(predictor.network, layout.shape, traffic_of(predictor, step))
    found = [step]
    if places != tuple(range(layout.world_size)):
        found.append(evaluate(predictor, layout, places))
    if layout.chunks > 1 and layout.stages * layout.chunks <= _MOST_SEARCHED:
        links = min(found, key=attrgetter("rank")).split.links
        bounds = predictor.split_carefully(layout, links)
        found.append(evaluate(predictor, layout, links.ranks.ravel().tolist(), bounds))
    return min(found, key=attrgetter("rank"))


def prediction_of(predictor: Predictor, step: StepPrediction) -> Prediction:
    """Return a prediction as results list it."""
    layout, seconds = step.layout, step.seconds
    gpus, samples = predictor.network.cluster.gpus, layout.micro_batch * layout.micro_batches * layout.replicas
    low, high = predictor.calibration.interval(seconds)
    peak, parts = sum(gpus[place].device.peak_flops for place in step.split.links.ranks.ravel()), step.breakdown()
    # A backward is twice a forward, whatever attention recomputes.
    flops = 3 * samples * sum(layer.forward.flops for layer in predictor.profile(layout.units).layers())
    return Prediction(
        **dict(layout),
        layout=layout.text,
        seconds=seconds,
        low=low,
        high=high,
        tokens_per_second=samples * predictor.model.seq / seconds,
        mfu=flops / seconds / peak,
        bubble=parts["bubble"] / seconds,
        exposed_communication=step.exposed,
        breakdown=parts,
        bounds=step.split.bounds,
        memory=step.memory,
    )


def is_quick(layout: Layout) -> bool:
    """Whether "auto" is planned for the layout's chunks in some tenths of a second."""
    return layout.stages * layout.chunks * layout.micro_batches <= _QUICK


def with_auto(predictor: Predictor, layout: Layout, places: Sequence[int] | None = None) -> StepPrediction | None:
    """Predict schedule "auto" on the chunks of a layout. places: see Predictor.predict.

    Return None for a single stage, for a placement of chunks that "auto" doesn't have, or if no micro-batch fits.
    """
    named = _NAMED.get((layout.chunks, layout.placement))
    if layout.stages == 1 or named is None:
        return None
    start = evaluate(predictor, layout.model_copy(update={"schedule": named}), places)
    try:
        program = _auto_program(predictor, start)
    except ScheduleError:
        return None
    auto = layout.model_copy(update={"schedule": "auto"})
    return predictor.predict(auto, places, start.split.bounds, program)


def _auto_program(predictor: Predictor, step: StepPrediction) -> Program:
    """Plan by the times and bytes of a prediction of the same chunks. Raises ScheduleError if no micro-batch fits."""
    layout, micro_batches, placement = step.layout, step.layout.micro_batches, step.program.placement
    chunks = predictor.memory_model(layout.units).chunk_bytes(placement, step.split.bounds, layout)
    held = tuple(max(1.0, c.saved + c.received + c.loaded) for c in chunks)
    deferred = tuple(max(1.0, c.deferred) for c in chunks)
    room = []
    for stage, memory in enumerate(step.memory):
        own = {c: chunks[c] for c, s in enumerate(placement) if s == stage}
        activations = max(bytes_in_flight(step.program.instructions[stage], own))
        # Bytes of the device that activations may take.
        others = memory.reserved - memory.allocated + memory.phases["backward"] - activations
        room.append(float(memory.capacity - others - max(c.output for c in own.values())))
    cost = step.cost.cost()
    sends = {i for rank in step.program.instructions for i in rank if i.op is Op.SEND_ACTIVATION}
    transfer = max(map(cost, sends), default=0.0)
    measured = Measured.of(placement, cost, held, deferred, DEFAULT_MAX_IN_FLIGHT, room, transfer)
    return make_plan(placement, micro_batches, measured).program(micro_batches)


_SEEN = 0.25  # share of the time of collectives between replicas that compute doesn't hide, about


def _collectives(predictor: Predictor, step: StepPrediction) -> dict[str, list[Reductions]]:
    """Return each stage's collectives by axis: "model" over tensor-parallel groups, "data" over replicas.

    Each comes with how often it runs in a step.
    """
    layout, layers = step.layout, predictor.layers(step.layout)
    model = [Counter[Collective]() for _ in range(layout.stages)]
    data: list[Reductions] = [()] * layout.stages
    for chunk, stage in enumerate(step.program.placement):
        data[stage] += step.split.reductions[chunk]
        for layer in layers[step.split.bounds[chunk] : step.split.bounds[chunk + 1]]:
            for work in (layer.forward, layer.input_gradient, layer.weight_gradient):
                model[stage].update(work.collectives)
    repeated = [tuple((c, float(number * layout.micro_batches)) for c, number in own.items()) for own in model]
    return {"data": data, "model": repeated}


def _messages(predictor: Predictor, step: StepPrediction) -> Iterator[tuple[int, int, float]]:
    """Yield (source, destination, bytes) of each message between stages, for one micro-batch and one rank."""
    layers, placement = predictor.layers(step.layout), step.program.placement
    for chunk, end in enumerate(step.split.bounds[1:-1]):
        a, b = placement[chunk], placement[chunk + 1]
        if a != b:
            yield a, b, layers[end - 1].output_bytes
            yield b, a, layers[end - 1].gradient_bytes


def traffic_of(predictor: Predictor, step: StepPrediction) -> Traffic:
    """Return what the placement of ranks is chosen by. If stages differ, the busiest one counts."""
    layout = step.layout
    busiest = {
        axis: max(stages, key=lambda own: sum(collective.nbytes * number for collective, number in own))
        for axis, stages in _collectives(predictor, step).items()
    }
    sizes = Counter(nbytes for *_, nbytes in _messages(predictor, step))
    layers = predictor.layers(layout)
    flops = sum(x.flops for layer in layers for x in (layer.forward, layer.input_gradient, layer.weight_gradient))
    return Traffic(
        model=busiest["model"],
        data=tuple((collective, _SEEN * number) for collective, number in busiest["data"]),
        # Messages are waited for while the pipeline fills and drains; in between, compute hides them.
        pipe=tuple((nbytes, number / max(1, layout.stages - 1)) for nbytes, number in sizes.items()),
        loops=layout.placement == "loop" and layout.chunks > 1,
        flops=flops * layout.micro_batches,
    )


def link_loads(predictor: Predictor, step: StepPrediction) -> tuple[LinkLoad, ...]:
    """Return what the links carry in a step, the slowest first."""
    network, links = predictor.network, step.split.links
    carried = {axis: np.zeros(len(network.fabric.bandwidth)) for axis in ("pipe", "data", "model")}
    for a, b, nbytes in _messages(predictor, step):
        carried["pipe"] += step.layout.micro_batches * network.link_bytes("send", links.stage_groups(a, b), nbytes)
    groups_of = {"data": links.replica_groups, "model": links.tensor_groups}
    for axis, stages in _collectives(predictor, step).items():
        for stage, collectives in enumerate(stages):
            groups = groups_of[axis](stage)
            for collective, number in collectives:
                carried[axis] += number * network.link_bytes(collective.kind, groups, collective.nbytes)
    return network.loads({axis: nbytes for axis, nbytes in carried.items() if nbytes.any()})
