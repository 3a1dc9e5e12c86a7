"""From a model and a cluster to a plan: searched, placed, and put into words."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel3d.config import load
from parallel3d.config.layout import Layout, PartialLayout, configuration
from parallel3d.costs.profilers import LayerSeconds
from parallel3d.errors import ConfigError
from parallel3d.planner.calibrate.calibration import Calibration
from parallel3d.planner.cluster.cluster import Cluster
from parallel3d.planner.network.links import Network
from parallel3d.planner.network.placement import place
from parallel3d.planner.predict.links import Shape
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.predict.step_prediction import StepPrediction
from parallel3d.planner.predict.traffic import link_loads, traffic_of
from parallel3d.planner.search.auto_schedule import is_quick, with_auto
from parallel3d.planner.search.found import Found, find, prediction_of
from parallel3d.planner.search.halves import find_halves, predictor_of_halves
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.reasons import trade_off, what_would_fit, why_not
from parallel3d.planner.search.result import PlanResult, RankPlace, TimelineSpan
from parallel3d.planner.search.search import Search
from parallel3d.planner.search.space import VARIANTS, Space, Variant, enumerate_space
from parallel3d.schedule.builders import WHOLE_BACKWARDS
from parallel3d.specs import Layer, layer_name

# Predicted within this share of the shortest: split, timed and placed with more care, for the last word.
_FINALISTS, _MOST_FINALISTS = 1.02, 4
_MOST_SEARCHED = 32  # chunks of all stages that are split with more care
_OF_HALVES = 4  # predicted with more care
_OF_A_SHAPE = 2  # of the ranks along each axis, listed


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
    """Answers one question. Raises ConfigError where it can't have an answer."""

    def __init__(self, question: Question):
        self.question, model, cluster = question, question.model, question.cluster
        self.space = self._space()
        self.profile = profile_of(model, cluster, configuration(self.space.layout(0), model.config))
        self.network = Network(question.calibration.correct_cluster(cluster))
        self.predictor = Predictor(model, self.profile, self.network, question.calibration, measured=question.measured)

    def _space(self) -> Space:
        question = self.question
        count, layers = len(question.cluster.gpus), len(question.model.layers)
        if question.global_batch < 1:
            raise ConfigError(f"--global-batch is {question.global_batch}; give the samples of a step, 1 or more")
        hosts = Counter(gpu.host for gpu in question.cluster.gpus)
        slices = possible_slices(max(hosts.values()))
        space = enumerate_space(count, question.global_batch, layers, slices, len(self._halves()), question.fixed)
        if not len(space):
            raise ConfigError(
                f"no layout of {count} GPUs makes up a global batch of {question.global_batch} samples with {layers} layers: "
                f"replicas x micro-batches x samples must be {question.global_batch}; give a multiple of a divisor of {count}"
            )
        if question.fixed is None:
            return space
        kept = space.where(_agree(space, question.fixed))
        if not len(kept):
            raise ConfigError(
                f"no layout of {count} GPUs with a global batch of {question.global_batch} is {question.fixed.text!r}; "
                "leave some of it open"
            )
        return kept

    def _halves(self) -> Sequence[Layer]:
        """Half blocks that may be layers; none where they aren't known, or the configuration chooses layers as they are given.

        Raises ConfigError where the user wants them.
        """
        model, fixed = self.question.model, self.question.fixed
        if fixed is not None and fixed.units == "half":
            return model.in_halves().layers
        pipeline, compiled = (model.config.get(section) or {} for section in ("pipeline", "compile"))
        chooses = pipeline.get("checkpointable_layers") is not None or compiled.get("layers") is not None
        return [] if chooses or model.halves is None else model.halves

    @cached_property
    def of_halves(self) -> Predictor:
        """Predicts layouts of half blocks."""
        return predictor_of_halves(self.predictor, self.question.measured)

    def predictor_of(self, layout: Layout) -> Predictor:
        """By what the layout's layers are."""
        return self.of_halves if layout.units == "half" else self.predictor

    def answer(self) -> PlanResult:
        """See PlanResult."""
        with rare_collections():
            return self._search()

    def _search(self) -> PlanResult:
        in_halves = self.space.halves > 0
        chosen = in_halves if in_halves.all() else ~in_halves
        search = Search(self.predictor_of(self.space.where(chosen).layout(0)), self.space.where(chosen))
        best = self._with_autos(self._finish(search))
        return self._answer(search, best, remedy=None if best else what_would_fit(search))

    def _finish(self, search: Search) -> list[Found]:
        """So many as are listed: of those that are nearly the best any, and with more care; of others the best of each shape.

        What fitted roughly may not fit exactly: none may be left.
        """
        found = search.run()
        best = found[0].outlook.seconds if found else 0.0
        finished: list[Found] = []
        times: Counter[Shape] = Counter()
        for candidate in found:
            nearly = candidate.outlook.seconds <= _FINALISTS * best
            if times[candidate.shape] >= (_OF_A_SHAPE if nearly else 1):
                continue
            if len(finished) >= self.question.num_best and not (nearly and len(finished) < _MOST_FINALISTS):
                break
            exact = self._exact(candidate.outlook) if nearly else self._whole(candidate.outlook)
            if exact.fits:
                finished.append(exact)
                times[candidate.shape] += 1
            else:
                search.found[search.found.index(candidate)] = exact
        return self._settled(finished + self._shorter_in_halves(finished, search), search)

    def _shorter_in_halves(self, finished: Sequence[Found], search: Search) -> list[Found]:
        """Of the pipelines of half blocks those that are shorter than all of whole ones; these have been searched."""
        in_halves = self.space.halves > 0
        if in_halves.all() or not in_halves.any() or not finished:
            return []
        best = min(f.outlook.seconds for f in finished)
        found = find_halves(search, self.space.where(in_halves), self.predictor, self.of_halves, best)
        exact = [self._exact(f.outlook) for f in found[:_OF_HALVES]]
        return [f for f in exact if f.fits and f.outlook.seconds < best]

    def _with_autos(self, best: list[Found]) -> list[Found]:
        """With what schedule "auto" would find on the winner's chunks; where that is asked for, on all chunks, and alone."""
        question = self.question
        decided = None if question.fixed is None else question.fixed.decided("schedule")
        asked = decided == "auto"
        if decided is not None and not asked:
            return best
        autos = []
        for found in best if asked or question.every_auto else best[:1]:
            if asked or question.every_auto or is_quick(found.layout):
                places = found.outlook.links.ranks.ravel().tolist()
                auto = with_auto(self.predictor_of(found.layout), found.layout, places)
                autos += [auto] if auto is not None and auto.fits else []
        return sorted(autos if asked else best + autos, key=lambda f: f.outlook.seconds)

    def _settled(self, finished: list[Found], search: Search) -> list[Found]:
        """The same, the shortest first, which stays it when it is predicted as it will be told."""
        told: list[Found] = []
        while finished:
            finished.sort(key=lambda f: f.outlook.seconds)
            if any(finished[0] is known for known in told):
                break
            told.append(self._told(finished.pop(0)))
            (finished if told[-1].fits else search.found).append(told[-1])
        return finished

    def _whole(self, outlook: StepPrediction) -> Found:
        """As it was predicted, with the memory of every stage."""
        return Found(outlook, self.predictor_of(outlook.layout).memory(outlook, every=True))

    def _exact(self, outlook: StepPrediction) -> Found:
        """Predicted exactly, in the cluster's order or where `place` puts it, whichever is the shorter."""
        layout, predictor = outlook.layout, self.predictor_of(outlook.layout)
        shape = (layout.stages, layout.replicas, layout.slices)
        plain = find(predictor, layout, exactly=True)
        places = place(self.network, shape, traffic_of(predictor, plain.outlook))
        if places == tuple(range(layout.world_size)):
            return plain
        other = find(predictor, layout, places, exactly=True)
        return min(other, plain, key=lambda f: (not f.fits, f.outlook.seconds))

    def _told(self, found: Found) -> Found:
        """The winner, timed with more micro-batches, and split with more care if that makes it shorter."""
        layout, links = found.outlook.layout, found.outlook.links
        predictor = self.predictor_of(layout)
        places = links.ranks.ravel().tolist()
        splits = [found.outlook.bounds]
        if layout.chunks > 1 and layout.stages * layout.chunks <= _MOST_SEARCHED:
            splits.append(predictor.split_carefully(layout, links))
        told = [
            find(predictor, layout, places, exactly=True, whole=True, bounds=bounds) for bounds in dict.fromkeys(splits)
        ]
        return min(told, key=lambda f: (not f.fits, f.outlook.seconds))

    def _answer(self, search: Search, best: Sequence[Found], remedy: str | None = None) -> PlanResult:
        question = self.question
        shown = [prediction_of(self.predictor_of(f.layout), f, question.global_batch) for f in best]
        winner = best[0].outlook if best else None
        return PlanResult(
            model=question.model.name,
            cluster=question.cluster.name,
            num_devices=len(question.cluster.gpus),
            global_batch=question.global_batch,
            seq=question.model.seq,
            best=tuple(shown[: question.num_best]),
            rejected=why_not(search, shown[: question.num_best], shown[0] if shown else None),
            trade_off=trade_off([f for f in (*best, *search.found) if f.fits]),
            timeline=timeline_of(winner) if winner else (),
            links=link_loads(self.predictor_of(winner.layout), winner) if winner else (),
            map=rank_map(self.network.cluster, winner) if winner else (),
            config=configuration(winner.layout, question.model.config, winner.bounds) if winner else {},
            layers=tuple(map(layer_name, question.model.layers)),
            halves=tuple(map(layer_name, self._halves())),
            remedy=remedy,
            considered=len(self.space),
            simulated=len(search.found),
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


def timeline_of(outlook: StepPrediction) -> tuple[TimelineSpan, ...]:
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
        for span in outlook.timeline.spans
    )


def rank_map(cluster: Cluster, outlook: StepPrediction) -> tuple[RankPlace, ...]:
    """Where each rank runs."""
    ranks = outlook.links.ranks
    places = []
    for rank, (pipe, data, model) in enumerate(np.ndindex(*ranks.shape)):
        gpu = cluster.gpus[ranks[pipe, data, model]]
        places.append(RankPlace(rank=rank, host=gpu.host, gpu=gpu.index, pipe=pipe, data=data, model=model))
    return tuple(places)


def _may_be(variant: Variant, schedule: str | None) -> bool:
    """ "auto" begins with a schedule that splits backwards."""
    return schedule in (None, variant.schedule) or (schedule == "auto" and variant.schedule not in WHOLE_BACKWARDS)


def _agree(space: Space, fixed: PartialLayout) -> npt.NDArray[np.bool_]:
    """Which layouts are what the user has decided."""
    kept = np.ones(len(space), dtype=bool)
    for name in fixed.given - {"schedule", "chunks", "placement"}:
        column = space.halves if name == "units" else getattr(space, name)
        kept &= column == (1 if name == "units" else getattr(fixed, name))
    chunks, schedule = fixed.decided("chunks"), fixed.decided("schedule")
    variants = [k for k, v in enumerate(VARIANTS) if _may_be(v, schedule) and chunks in (None, v.chunks)]
    return kept & np.isin(space.variant, variants)
