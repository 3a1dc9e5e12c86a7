"""Traffic of a predicted step, by which ranks are placed on devices, and the load of each link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.planner.network.placement import Traffic
from parallel3d.planner.predict.costs import Reductions, StepPrediction
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.result import LinkLoad

_SEEN = 0.25  # approximate share of the time of collectives between replicas that compute doesn't hide


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
    """Return the traffic by which the placement of ranks is chosen. If stages differ, the busiest one counts."""
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
