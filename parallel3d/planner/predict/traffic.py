"""What a predicted layout sends in a step: for the placement of its ranks, and link by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.planner.network.placement import Traffic
from parallel3d.planner.predict.costs import Reductions
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.step_prediction import StepPrediction
from parallel3d.planner.search.result import LinkLoad

_SEEN = 0.25  # share of the time of collectives between replicas that compute doesn't hide, about


def _over_slices(predictor: Predictor, step: StepPrediction, stage: int) -> Reductions:
    """Return the collectives over each tensor-parallel group of a stage, with how often they run in a step."""
    layers, counted = predictor.layers(step.layout), Counter[Collective]()
    for chunk, at in enumerate(step.program.placement):
        for layer in layers[step.bounds[chunk] : step.bounds[chunk + 1]] if at == stage else ():
            for work in (layer.forward, layer.input_gradient, layer.weight_gradient):
                counted.update(work.collectives)
    return tuple((collective, float(number * step.layout.micro_batches)) for collective, number in counted.items())


def _over_replicas(step: StepPrediction, stage: int) -> Reductions:
    """Return the collectives over the replicas of each slice of a stage, with how often they run."""
    return tuple(
        each for chunk, at in enumerate(step.program.placement) if at == stage for each in step.reductions[chunk]
    )


def _messages(predictor: Predictor, step: StepPrediction) -> Iterator[tuple[int, int, float]]:
    """Yield (source, destination, bytes) of each message between stages, for one micro-batch and one rank."""
    layers, placement = predictor.layers(step.layout), step.program.placement
    for chunk, end in enumerate(step.bounds[1:-1]):
        a, b = placement[chunk], placement[chunk + 1]
        if a != b:
            yield a, b, layers[end - 1].output_bytes
            yield b, a, layers[end - 1].gradient_bytes


def _volume(collectives: Reductions) -> float:
    return sum(collective.nbytes * number for collective, number in collectives)


def traffic_of(predictor: Predictor, step: StepPrediction) -> Traffic:
    """Return what the placement of ranks is chosen by. If stages differ, the busiest one counts."""
    layout, stages = step.layout, range(step.layout.stages)
    model = max((_over_slices(predictor, step, stage) for stage in stages), key=_volume)
    data = max((_over_replicas(step, stage) for stage in stages), key=_volume)
    sizes = Counter(nbytes for *_, nbytes in _messages(predictor, step))
    flops = sum(
        layer.forward.flops + layer.input_gradient.flops + layer.weight_gradient.flops
        for layer in predictor.layers(layout)
    )
    return Traffic(
        model=model,
        data=tuple((collective, _SEEN * number) for collective, number in data),
        # Messages are waited for while the pipeline fills and drains; in between, compute hides them.
        pipe=tuple((nbytes, number / max(1, layout.stages - 1)) for nbytes, number in sizes.items()),
        loops=layout.placement == "loop" and layout.chunks > 1,
        flops=flops * layout.micro_batches,
    )


def link_loads(predictor: Predictor, step: StepPrediction) -> tuple[LinkLoad, ...]:
    """Return what the links carry in a step, the slowest first."""
    network, links = predictor.network, step.links
    carried = {axis: np.zeros(len(network.fabric.bandwidth)) for axis in ("pipe", "data", "model")}
    for a, b, nbytes in _messages(predictor, step):
        carried["pipe"] += step.layout.micro_batches * network.link_bytes("send", links.stage_groups(a, b), nbytes)
    for stage in range(step.layout.stages):
        for axis, groups, collectives in (
            ("data", links.replica_groups(stage), _over_replicas(step, stage)),
            ("model", links.slice_groups(stage), _over_slices(predictor, step, stage)),
        ):
            for collective, number in collectives:
                carried[axis] += number * network.link_bytes(collective.kind, groups, collective.nbytes)
    return network.loads({axis: nbytes for axis, nbytes in carried.items() if nbytes.any()})
