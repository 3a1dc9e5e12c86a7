"""What a predicted layout sends in a step: for its placement, and link by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from parallel3d.costs.work import Collective
from parallel3d.planner.network.placement import Traffic
from parallel3d.planner.predict.outlook import Outlook
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.search.result import LinkLoad
from parallel3d.schedule.builders import placement_of

_SEEN = 0.25  # of what goes between replicas, about as much is not behind compute


def _placement(outlook: Outlook) -> tuple[int, ...]:
    layout = outlook.layout
    return placement_of(layout.placement, layout.stages, layout.chunks)


def _of_slices(predictor: Predictor, outlook: Outlook, stage: int) -> Counter[Collective]:
    """Collectives over each slice group of a stage in a step, with how often."""
    layers, placement = predictor.layers(outlook.layout), _placement(outlook)
    counted: Counter[Collective] = Counter()
    for chunk, (first, end) in enumerate(zip(outlook.bounds, outlook.bounds[1:], strict=False)):
        if placement[chunk] == stage:
            for layer in layers[first:end]:
                for work in (layer.forward, layer.input_gradient, layer.weight_gradient):
                    counted.update(work.collectives)
    return Counter({c: number * outlook.layout.micro_batches for c, number in counted.items()})


def _over_replicas(outlook: Outlook, stage: int) -> Iterator[tuple[Collective, float]]:
    """Collectives over the replicas of each slice of a stage, with how often."""
    for chunk, at in enumerate(_placement(outlook)):
        if at == stage:
            yield from outlook.reductions[chunk]


def _messages(predictor: Predictor, outlook: Outlook) -> Iterator[tuple[int, int, float]]:
    """(source, destination, bytes) of each pair of chunks that lie on two stages, of one micro-batch and one rank."""
    layers, placement = predictor.layers(outlook.layout), _placement(outlook)
    for chunk, end in enumerate(outlook.bounds[1:-1]):
        a, b = placement[chunk], placement[chunk + 1]
        if a != b:
            yield a, b, layers[end - 1].output_bytes
            yield b, a, layers[end - 1].gradient_bytes


def traffic_of(predictor: Predictor, outlook: Outlook) -> Traffic:
    """What the placement of ranks is chosen by; of stages that differ the busiest."""
    layout = outlook.layout
    stages = range(layout.stages)
    model = max(
        (_of_slices(predictor, outlook, s) for s in stages), key=lambda c: sum(k.nbytes * n for k, n in c.items())
    )
    data = max((list(_over_replicas(outlook, s)) for s in stages), key=lambda d: sum(c.nbytes * n for c, n in d))
    sizes = Counter(nbytes for *_, nbytes in _messages(predictor, outlook))
    links = max(1, layout.stages - 1)
    works = [
        w for layer in predictor.layers(layout) for w in (layer.forward, layer.input_gradient, layer.weight_gradient)
    ]
    return Traffic(
        model=tuple((collective, float(number)) for collective, number in model.items()),
        data=tuple((collective, _SEEN * number) for collective, number in data),
        # While the pipeline fills and drains its messages are waited for, in between they go behind compute.
        pipe=tuple((nbytes, number / links) for nbytes, number in sizes.items()),
        loops=layout.placement == "loop" and layout.chunks > 1,
        flops=sum(work.flops for work in works) * layout.micro_batches,
    )


def link_loads(predictor: Predictor, outlook: Outlook) -> tuple[LinkLoad, ...]:
    """What the links carry in a step, the slowest first."""
    network, links = predictor.network, outlook.links
    carried = {axis: np.zeros(len(network.fabric.bandwidth)) for axis in ("pipe", "data", "model")}
    times = outlook.layout.micro_batches
    for a, b, nbytes in _messages(predictor, outlook):
        carried["pipe"] += times * network.link_bytes("send", links.pairs(a, b), nbytes)
    for stage in range(outlook.layout.stages):
        for collective, number in _over_replicas(outlook, stage):
            moved = network.link_bytes(collective.kind, links.replica_groups(stage), collective.nbytes)
            carried["data"] += number * moved
        for collective, number in _of_slices(predictor, outlook, stage).items():
            moved = network.link_bytes(collective.kind, links.slice_groups(stage), collective.nbytes)
            carried["model"] += number * moved
    return network.loads({axis: nbytes for axis, nbytes in carried.items() if nbytes.any()})
