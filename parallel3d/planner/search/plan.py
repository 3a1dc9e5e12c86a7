"""From a model and a cluster to a plan: searched, placed, and put into words."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from parallel3d.config import load
from parallel3d.config.layout import PartialLayout, configuration
from parallel3d.costs.profilers import LayerSeconds
from parallel3d.errors import ConfigError
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.predict.links import Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.predict.step_prediction import StepPrediction
from parallel3d.planner.predict.traffic import link_loads
from parallel3d.planner.search.auto_schedule import is_quick, with_auto
from parallel3d.planner.search.candidate import Candidate, finalize, prediction_of
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.reasons import trade_off, what_would_fit, why_not
from parallel3d.planner.search.result import PlanResult, RankPlace, TimelineSpan
from parallel3d.planner.search.search import BranchAndBound
from parallel3d.planner.search.space import Space, enumerate_space
from parallel3d.specs import Layer, layer_name

_NEAR = 1.02  # of the shortest rough prediction: may be the shortest exactly
_MOST_NEAR = 4  # of these that are predicted exactly, however few are listed
_OF_A_SHAPE = 2  # of the ranks along each axis


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    fixed: what of the layout the user has decided already; its axes where they are above 1. measured: see Predictor.
    every_auto: whether schedule "auto" is planned for all that are listed, however long that takes.
    """

    model: PlannedModel
    cluster: Cluster
    global_batch: int
    num_best: int = 5
    fixed: PartialLayout | None = None
    calibration: Calibration = field(default_factory=Calibration)
    measured: Sequence[LayerSeconds] | None = None
    every_auto: bool = False


class Planner:
    """Answers one question. Raises ConfigError if it has no answer."""

    def __init__(self, question: Question):
        self.question, model, cluster = question, question.model, question.cluster
        self.space = self._space()
        profile = profile_of(model, cluster, configuration(self.space.layout(0), model.config))
        self.network = Network(question.calibration.correct_cluster(cluster))
        self.predictor = Predictor(model, profile, self.network, question.calibration, question.measured)

    def _space(self) -> Space:
        question, fixed = self.question, self.question.fixed
        count, batch = len(question.cluster.gpus), question.global_batch
        if batch < 1:
            raise ConfigError(f"--global-batch is {batch}; give the samples of a step, 1 or more")
        slices = possible_slices(max(Counter(gpu.host for gpu in question.cluster.gpus).values()))
        layers, halves = len(question.model.layers), len(self._halves())
        space = enumerate_space(count, batch, layers, halves, slices, fixed)
        if len(space):
            return space
        if fixed is not None and len(enumerate_space(count, batch, layers, halves, slices)):
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
        pipeline, compiled = (model.config.get(section) or {} for section in ("pipeline", "compile"))
        chooses = pipeline.get("checkpointable_layers") is not None or compiled.get("layers") is not None
        return [] if chooses or model.halves is None else model.halves

    def answer(self) -> PlanResult:
        """Search the space, predict the best layouts exactly, and return the result."""
        with rare_collections():
            search = BranchAndBound(self.predictor, self.space)
            finalists = self._finalists(search)
            best = self._with_autos(finalists)
            return self._result(search, best)

    def _finalists(self, search: BranchAndBound) -> list[Candidate]:
        """Predict the candidates to list exactly, and return those that fit, the best first.

        These are the best of each shape, two of a shape that are nearly the best of all. A candidate that fits by its rough
        prediction may not fit exactly.
        """
        candidates = search.run()
        finalists: list[Candidate] = []
        of_shape: Counter[Shape] = Counter()
        for candidate in candidates:
            is_near = candidate.rank[1] <= _NEAR * candidates[0].rank[1]
            if len(finalists) >= max(self.question.num_best, _MOST_NEAR if is_near else 0):
                break
            if of_shape[candidate.shape] < (_OF_A_SHAPE if is_near else 1):
                final = finalize(self.predictor, candidate)
                search.candidates[final.layout] = final
                if final.fits:
                    finalists.append(final)
                    of_shape[final.shape] += 1
        return sorted(finalists, key=lambda c: c.rank)

    def _with_autos(self, best: list[Candidate]) -> list[Candidate]:
        """Add schedule "auto" on the winner's chunks if that is quick; if it is asked for, on all chunks, and it alone."""
        question = self.question
        schedule = None if question.fixed is None else question.fixed.decided("schedule")
        if schedule not in (None, "auto"):
            return best
        every = schedule == "auto" or question.every_auto
        chosen = best if every else [c for c in best[:1] if is_quick(c.layout)]
        autos = [auto for c in chosen if (auto := with_auto(self.predictor, c)) is not None and auto.fits]
        return sorted(autos if schedule == "auto" else best + autos, key=lambda c: c.rank)

    def _result(self, search: BranchAndBound, best: Sequence[Candidate]) -> PlanResult:
        question, predictor = self.question, self.predictor
        shown = [prediction_of(predictor, c, question.global_batch) for c in best[: question.num_best]]
        winner = best[0].step if best else None
        return PlanResult(
            model=question.model.name,
            cluster=question.cluster.name,
            num_devices=len(question.cluster.gpus),
            global_batch=question.global_batch,
            seq=question.model.seq,
            best=tuple(shown),
            rejected=why_not(search, shown),
            trade_off=trade_off([c for c in (*best, *search.candidates.values()) if c.fits]),
            timeline=timeline_of(winner) if winner else (),
            links=link_loads(predictor, winner) if winner else (),
            map=rank_map(self.network.cluster, winner) if winner else (),
            config=configuration(winner.layout, question.model.config, winner.bounds) if winner else {},
            layers=tuple(map(layer_name, question.model.layers)),
            halves=tuple(map(layer_name, self._halves())),
            remedy=None if best else what_would_fit(search),
            considered=len(self.space),
            simulated=len(search.candidates),
        )


def possible_slices(gpus: int) -> list[int]:
    """Over how many GPUs of a host with so many a layer may be sliced: powers of two, and what fills the host evenly."""
    return [n for n in range(1, gpus + 1) if n & (n - 1) == 0 or gpus % n == 0]


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely inside, and only what is new: programs are a million objects, none of them in a cycle."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def profile_of(model: PlannedModel, cluster: Cluster, config: Mapping[str, Any]) -> ModelProfile:
    """Of the model on a cluster's kind of device, under a configuration."""
    on_cpu = all(gpu.device.name == "cpu" for gpu in cluster.gpus)
    inputs, labels = model.sample(1)
    return ModelProfile(model.layers, inputs, labels, model.loss_fn, load(config), "cpu" if on_cpu else "cuda")


def timeline_of(step: StepPrediction) -> tuple[TimelineSpan, ...]:
    """Of the micro-batches that were timed."""
    return tuple(
        TimelineSpan(
            stage=span.rank,
            op=span.instruction.op.value,
            chunk=span.instruction.chunk,
            micro_batch=span.instruction.micro_batch,
            start=span.start,
            end=span.end,
            bucket=span.instruction.bucket,
        )
        for span in step.timeline.spans
    )


def rank_map(cluster: Cluster, step: StepPrediction) -> tuple[RankPlace, ...]:
    """Where each rank runs."""
    ranks = step.links.ranks
    places = []
    for rank, (pipe, data, model) in enumerate(np.ndindex(*ranks.shape)):
        gpu = cluster.gpus[ranks[pipe, data, model]]
        places.append(RankPlace(rank=rank, host=gpu.host, gpu=gpu.index, pipe=pipe, data=data, model=model))
    return tuple(places)
