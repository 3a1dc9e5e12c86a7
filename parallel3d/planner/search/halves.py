"""Pipelines whose stages may end between a block's attention and its feed-forward, where that could make a step shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from parallel3d.config.layout import Layout
from parallel3d.costs.profilers import LayerSeconds
from parallel3d.planner.predict.costs import pace
from parallel3d.planner.predict.predict import Predictor
from parallel3d.planner.predict.timing import Floats, layer_times
from parallel3d.planner.search.found import Found
from parallel3d.planner.search.search import Bounds, Search
from parallel3d.planner.search.space import VARIANTS, Space
from parallel3d.planner.search.trials import Trials
from parallel3d.specs import layer_name

# Of the shortest step: so much has to be possible, for that layers are other ones.
_WORTH = 0.998
# That are looked at nearer, of those whose whole blocks weren't predicted, and of those of more chunks than there are layers.
_MOST_UNPREDICTED, _MOST_NEW = 48, 12
_LARGE = 4096  # GPUs: on more a prediction takes so long that only predicted blocks, and new layouts, are looked at


def predictor_of_halves(whole: Predictor, measured: Sequence[LayerSeconds] | None = None) -> Predictor:
    """For the half blocks of a model whose blocks another one predicts. measured: seconds of the blocks, see Predictor."""
    model = whole.model.in_halves()
    profile = whole.profile.of_layers(model.layers)
    if measured is None:
        return Predictor(model, profile, whole.network, whole.calibration, shared=whole)
    expected = layer_times(profile.layers(), whole.network.cluster.gpus[0].device, lambda collective: 0.0)
    each = (expected.compute * whole.expected.factors_of(measured)[:, _block_of_each(whole)]).T.tolist()
    halves = [LayerSeconds(*seconds) for seconds in each]
    return Predictor(model, profile, whole.network, whole.calibration, measured=halves, shared=whole)


def _block_of_each(whole: Predictor) -> list[int]:
    """Of each half block, and of what isn't one, its place among the whole model's layers."""
    return [k for k, spec in enumerate(whole.model.layers) for _ in range(1 + (layer_name(spec) == "Block"))]


def find_halves(search: Search, space: Space, whole: Predictor, halves: Predictor, best: float) -> list[Found]:
    """Layouts of half blocks that are roughly shorter than the best of whole ones, the shortest first.

    search: of whole blocks, that has run; space: of half blocks; best: seconds. Looked at are those that could be shorter if
    their stages took equally long: all whose whole blocks were predicted, and the likeliest of others.
    """
    limit = _WORTH * best
    trials = Trials(halves, space)
    for bounds, most in _bounds(search, space, whole):
        order = np.flatnonzero(bounds < limit)
        order = order[np.argsort(bounds[order], kind="stable")][:most]
        trials.until_certain(list(zip(bounds[order].tolist(), order.tolist(), strict=True)), limit)
    found = sorted(trials.found, key=lambda f: f.outlook.seconds)
    return [f for f in found if f.fits and f.outlook.seconds < limit]


def _bounds(search: Search, space: Space, whole: Predictor) -> Iterator[tuple[Floats, int]]:
    """(seconds, how many to look at nearer) of each layout of half blocks, infinite for those that aren't meant.

    First those whose whole blocks were predicted, then those of which only bounds were found, then those that whole blocks are
    too few for.
    """
    chunks = np.array([variant.chunks for variant in VARIANTS])[space.variant] * space.stages
    known = chunks <= len(whole.model.layers)
    evenly = {_key(layout): least.evenly for layout, least in search.trials.bounds.items()}
    found = {_key(f.layout): f for f in search.found}
    refused = {_key(r.layout) for r in search.refused}
    predicted, unpredicted = np.full(len(space), np.inf), np.full(len(space), np.inf)
    meant = known & (space.recompute != 1)
    for k, blocks in zip(np.flatnonzero(meant).tolist(), _keys_of_blocks(space.where(meant)), strict=True):
        if blocks in found:
            predicted[k] = _evenly(found[blocks])
        elif blocks not in refused:
            unpredicted[k] = evenly.get((*blocks[:-1], min(1, blocks[-1])), np.inf)
    yield predicted, len(space)
    if len(whole.network.cluster.gpus) <= _LARGE:
        yield unpredicted, _MOST_UNPREDICTED
    # Of these little is known: those that share the optimizer's state and reduce once are the likeliest.
    new = ~known & (space.zero == np.minimum(space.replicas - 1, 1))
    if new.any():
        bounds = np.full(len(space), np.inf)
        bounds[new] = Bounds(whole, space.where(new)).seconds()
        yield bounds, _MOST_NEW


# All that tells a layout of whole blocks from others; how many are recomputed together comes last.
_Key = tuple[int, ...]


def _key(layout: Layout) -> _Key:
    """Of one of which nothing is left open."""
    variant = VARIANTS.index((layout.schedule, layout.chunks, layout.placement))
    shape = layout.stages, layout.replicas, layout.slices, int(layout.sequence_parallel)
    return (*shape, layout.micro_batch, layout.zero, variant, layout.recompute)


def _keys_of_blocks(space: Space) -> list[_Key]:
    """Of the same layouts of whole blocks, of which half as many are recomputed together: in less time than with layouts."""
    shape = space.stages, space.replicas, space.slices, space.sequence_parallel
    columns = (*shape, space.micro_batch, space.zero, space.variant, space.recompute // 2)
    return list(map(tuple, np.stack(columns, axis=1).tolist()))


def _evenly(found: Found) -> float:
    """Seconds, if all stages computed as long as the mean one."""
    if not found.fits:
        return np.inf
    outlook = found.outlook
    times, placement = outlook.cost.times, outlook.program.placement
    mean = float(times.total.sum()) / found.layout.stages
    return outlook.seconds - outlook.layout.micro_batches * (pace(times, placement) - mean)
