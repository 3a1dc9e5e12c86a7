"""Plan of a model on a cluster: search, improvement of the best layouts, what they send, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter

import numpy as np
import torch

from parallel3d.config import SELECTIVE, Config, SelectivePolicy, load
from parallel3d.config.layout import Layout, PartialLayout, configuration, given_section
from parallel3d.costs.forked import ForkedCalls
from parallel3d.costs.model_traces import Slicing
from parallel3d.costs.operators import step_flops
from parallel3d.costs.profilers import LayerCost
from parallel3d.errors import ConfigError
from parallel3d.optim.optimizers import check_matrices, class_of, empty_optimizer
from parallel3d.planner import rare_collections
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.network.placement import place
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.autos import is_quick, with_auto
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.reasons import trade_off, what_would_fit, why_not
from parallel3d.planner.search.result import PlanResult, Prediction, RankPlace
from parallel3d.planner.search.search import MOST_NEAR, BranchAndBound, evaluate, listed
from parallel3d.planner.search.space import POLICIES, Space, enumerate_space
from parallel3d.planner.search.splits import split_carefully
from parallel3d.planner.search.traffic import link_loads, traffic_of
from parallel3d.specs import Layer, layer_name
from parallel3d.zero.optimizer import WHOLE_TENSOR, check_optimizer

# Candidates within this ratio of the shortest step, at most MOST_NEAR, are placed and split with more care.
_NEAR = 1.02
_MIXED = 3  # candidates that get policies by layer
_MOST_SAMPLES, _MOST_LAYERS = 10**8, 1_100  # the time of a plan grows by the square of the layers
_ON_DEVICE = ("none", None)  # values of `device` with which nothing is offloaded
_MOST_SEARCHED = 32  # chunks of all stages that are split with more care


@dataclass(eq=False)
class Planner:
    """Plans the training of a model on a cluster. Raises ConfigError if no layout is possible.

    - fixed: what the user has decided of the layout; measured: see Predictor.
    - every_auto: whether schedule "auto" is planned for all listed layouts, also those with long pipelines.
    - process: another process to trace layers in, if there is one.
    - like: planner of the same model on the same kind of device, whose configuration differs in zero_optimization alone: its
      traces are used again.
    """

    model: PlannedModel
    cluster: Cluster
    global_batch: int
    num_best: int = 5
    fixed: PartialLayout = field(default_factory=PartialLayout)
    calibration: Calibration = field(default_factory=Calibration)
    measured: Sequence[LayerCost] | None = None
    every_auto: bool = False
    process: ForkedCalls | None = None
    like: Planner | None = None

    def __post_init__(self) -> None:
        model, cluster = self.model, self.cluster
        config = load(configuration(Layout(zero=3), model.config))  # with all keys that may count
        kinds = {gpu.device for gpu in cluster.gpus}
        lacking = sorted(d.name for d in kinds if d.preset not in ("", "cpu") and not d.fp8_flops)
        if config.fp8.enabled and lacking:
            raise ConfigError(
                f"fp8.enabled: {', '.join(lacking)} can't compute in fp8; drop it, or give H100s or later GPUs"
            )
        self.space = self._space(config)
        known = None if self.like is None else self.like.profile.with_zero(config)
        self.profile: ModelProfile = known or profile_of(model, cluster, config)
        if self.process is not None and known is None:
            self._trace_in(self.process)
        # The engine makes the same check.
        if config.optimizer is not None and class_of(config.optimizer.type) is torch.optim.Muon:
            check_matrices(p for layer in self.profile.layers() for _, p in layer.parameters)
        self.network = Network(self.calibration.correct_cluster(cluster))
        self.predictor = Predictor(model, self.profile, self.network, self.calibration, self.measured)

    def _trace_in(self, process: ForkedCalls) -> None:
        space = self.space
        if space.halves.any():
            self.profile.of_layers(self._halves())
        columns = np.unique(np.stack([space.tensor_ranks, space.sequence_parallel]), axis=1).tolist()
        slicings = [(ranks, bool(parallel)) for ranks, parallel in zip(*columns, strict=True)]
        asked = {POLICIES[policy] for policy in np.unique(space.policy).tolist()}
        policies = [policy for policy in SELECTIVE if asked & {policy, "auto"}]
        # First the traces that bounds of all layouts need.
        first: list[tuple[Slicing, SelectivePolicy | None]] = [(slicing, None) for slicing in slicings]
        self.profile.traced.trace_in(process, [(0, *key, 1) for key in [*first, *product(slicings, policies)]])

    def _space(self, config: Config) -> Space:
        fixed, count, batch = self.fixed, len(self.cluster.gpus), self.global_batch
        if not 1 <= batch <= _MOST_SAMPLES:
            raise ConfigError(f"--global-batch is {batch}; give the samples of a step, 1 to {_MOST_SAMPLES}")
        tensor_ranks = possible_tensor_ranks(max(Counter(gpu.host for gpu in self.cluster.gpus).values()))
        layers, halves = len(self.model.layers), len(self._halves())
        if layers > _MOST_LAYERS:
            raise ConfigError(f"{self.model.name} has {layers} layers; plan for a model of {_MOST_LAYERS} or fewer")
        zero, given = config.zero_optimization, config.optimizer
        offloads = zero.offload_param.device not in _ON_DEVICE
        space = enumerate_space(count, batch, layers, halves, tensor_ranks, fixed, offloads)
        optimizer = None if given is None else empty_optimizer(given.type, given.params)
        if isinstance(optimizer, WHOLE_TENSOR):
            whole = space.where((space.zero == 0) & (space.tensor_ranks == 1))
            if offloads or zero.offload_optimizer.device not in _ON_DEVICE or (len(space) and not len(whole)):
                check_optimizer(optimizer, partitioned=True)  # as the engine refuses it
            space = whole
        if len(space):
            return space
        if fixed.given and len(enumerate_space(count, batch, layers, halves, tensor_ranks)):
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
        model = self.model
        if self.fixed.units == "half":
            return model.in_halves().layers
        pipeline, compiled = (given_section(model.config, section) for section in ("pipeline", "compile"))
        chooses = pipeline.get("checkpointable_layers") is not None or compiled.get("layers") is not None
        return [] if chooses or model.halves is None else model.halves

    @rare_collections()
    def answer(self) -> PlanResult:
        """Search the space, improve the best layouts, and return the result."""
        search = BranchAndBound(self.predictor, self.space, self.num_best)
        found = search.run()
        near = [c for c in found[:MOST_NEAR] if c.rank[1] <= _NEAR * found[0].rank[1]]
        improved = sorted((improve(self.predictor, candidate) for candidate in near), key=attrgetter("rank"))
        improved = [*map(self._with_policies, improved[:_MIXED]), *improved[_MIXED:], *found[len(near) :]]
        # With policies by layer several may have the same words: the best one counts.
        distinct = {step.layout.text: step for step in sorted(improved, key=attrgetter("rank"), reverse=True)}
        return self._result(search, listed(self._with_autos(list(distinct.values()), search), self.num_best))

    def _with_policies(self, step: StepPrediction) -> StepPrediction:
        """Give each layer of a layout that recomputes all of them a policy of its own, if that makes the step shorter."""
        layout = step.layout
        if layout.recompute != 1 or layout.is_by_layer or "recompute" in self.fixed.given:
            return step
        other = layout.model_copy(update={"policy": "auto"})
        other_step = evaluate(self.predictor, other, step.split.links.ranks.ravel().tolist(), step.split.bounds)
        return min(step, other_step, key=attrgetter("rank"))

    def _with_autos(self, found: list[StepPrediction], search: BranchAndBound) -> list[StepPrediction]:
        """Add schedule "auto" on the best candidate's chunks if that is quick; if asked for, only "auto", on all chunks."""
        found = sorted(found, key=lambda c: c.rank)
        schedule = self.fixed.decided("schedule")
        if schedule not in (None, "auto"):
            return found
        if schedule == "auto":
            chosen = found[: max(MOST_NEAR, self.num_best)]
        elif self.every_auto:
            chosen = listed(found, self.num_best)
        else:
            chosen = [c for c in found[:1] if is_quick(c.layout)]
        autos = {c.layout: with_auto(self.predictor, c.layout, c.split.links.ranks.ravel().tolist()) for c in chosen}
        if schedule == "auto" or self.every_auto:
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
        names = "stages", "tensor_ranks", "sequence_parallel", "micro_batch", "zero"
        rows = np.all([getattr(space, name) == getattr(layout, name) for name in names], axis=0)
        order = np.flatnonzero(rows & np.isfinite(bounds))
        for k in order[np.argsort(bounds[order], kind="stable")]:
            best = min((auto.seconds for auto in autos.values() if auto is not None and auto.fits), default=np.inf)
            if bounds[k] >= best:
                break
            other = space.layout(k)
            if other not in autos and is_quick(other):
                autos[other] = with_auto(self.predictor, other, step.split.links.ranks.ravel().tolist())

    def _result(self, search: BranchAndBound, best: Sequence[StepPrediction]) -> PlanResult:
        predictor = self.predictor
        shown = [prediction_of(predictor, c) for c in best]
        winner = best[0] if best else None
        live = winner.limits.live if winner and winner.limits else None
        remedy, lacking = (None, 0) if best else what_would_fit(search)
        return PlanResult(
            model=self.model.name,
            cluster=self.cluster.name,
            num_devices=len(self.cluster.gpus),
            global_batch=self.global_batch,
            seq=self.model.seq,
            best=tuple(shown),
            rejected=why_not(search, shown),
            trade_off=trade_off([*best, *search.fitting]),
            timeline=winner.timeline.spans if winner else (),
            links=link_loads(predictor, winner) if winner else (),
            map=rank_map(self.network.cluster, winner) if winner else (),
            config=configuration(winner.layout, self.model.config, winner.split.bounds, live) if winner else {},
            layers=tuple(map(layer_name, self.model.layers)),
            halves=tuple(map(layer_name, self._halves())),
            remedy=remedy,
            lacking=lacking,
            considered=len(self.space),
            simulated=len(search.candidates),
            reserve=self.cluster.reserve,
            on_gpus=not on_cpus(self.cluster),
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
    return all(gpu.device.preset == "cpu" for gpu in cluster.gpus)


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
        bounds = split_carefully(predictor, layout, links)
        found.append(evaluate(predictor, layout, links.ranks.ravel().tolist(), bounds))
    return min(found, key=attrgetter("rank"))


def prediction_of(predictor: Predictor, step: StepPrediction) -> Prediction:
    """Return a prediction as results list it."""
    layout, seconds = step.layout, step.seconds
    gpus, samples = predictor.network.cluster.gpus, layout.micro_batch * layout.micro_batches * layout.replicas
    low, high = predictor.calibration.interval(seconds)
    peak, parts = sum(gpus[place].device.peak_flops for place in step.split.links.ranks.ravel()), step.breakdown()
    layers = predictor.profile(layout.units).layers()
    parameters = [parameter for layer in layers for _, parameter in (*layer.parameters, *layer.frozen)]
    flops = samples * step_flops(sum(layer.forward.flops for layer in layers), parameters)
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
