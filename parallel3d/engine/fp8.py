"""Linears that run in fp8: their choice, and gathers of their weights in fp8 (ZeRO-3) with scales that all ranks agree on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group, all_gather_object, all_reduce_max
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.config.section import LayerNames
from parallel3d.errors import ConfigError
from parallel3d.kernels.fp8 import E4M3, MULTIPLE, Scaled, largest_of, round_into, scale_of
from parallel3d.logs import logger
from parallel3d.pipe.blocks import blocks_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.single_stage import SingleStageModule
from parallel3d.tensor_parallel.fp8 import attach_fp8, fits_fp8, is_linear, patterns_of
from parallel3d.zero.external import WatchedParameters
from parallel3d.zero.fp8_weights import Fp8Weights, can_gather_in_fp8, mark_weights
from parallel3d.zero.weights import weights_of

# Compute capability of Ada; that of Hopper is 9.0.
_LEAST_CAPABILITY = (8, 9)
# A linear and its name.
Named = tuple[str, nn.Module]


def check_device(device: torch.device) -> None:
    """Raise ConfigError for a GPU that has no tensor cores for fp8. The CPU emulates them."""
    if device.type == "cuda" and (own := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        raise ConfigError(
            f"fp8.enabled: {torch.cuda.get_device_name(device)} has compute capability {own[0]}.{own[1]}, but fp8 needs 8.9 "
            "(Ada, Hopper) or more; set it to false"
        )


def linears_of(model: PipelineModule) -> list[Named]:
    """Return the linears in the blocks of this rank's layers.

    Blocks are all layers of a pipeline but its first and last, which are embedding and head; in another module those of
    blocks_of, or, where it finds none, the module itself.
    """
    if isinstance(model, SingleStageModule):
        whole = model.layers["0"]
        inside = {m for block in blocks_of(whole) or [whole] for m in block.modules()}
        return [(name, m) for name, m in whole.named_modules() if m in inside and is_linear(m)]
    return linears_between(model.calls.with_modules(), len(model.layer_names))


def linears_between(layers: Iterable[tuple[int, nn.Module]], num_layers: int) -> list[Named]:
    """Return the linears in the layers, given with their indices, but the first and the last of num_layers."""
    inner = {k: module for k, module in layers if 0 < k < num_layers - 1}
    named = ((f"layers.{k}.{name}".rstrip("."), m) for k, top in inner.items() for name, m in top.named_modules())
    return [(name, m) for name, m in named if is_linear(m)]


def use_fp8(linears: Sequence[Named], fp8: Fp8, sink: GradientSink, control: Group) -> None:
    """Let those linears compute in fp8 whose sizes allow it on all ranks and that fp8.filter does not exclude.

    sink: gets the weight gradients of plain linears. control: the world. Raises ConfigError, on all ranks, for a filter that
    matches no linear, and if none is left. Collective.
    """
    stays, fits, chosen = _choose(linears, fp8.config.filter)
    found = all_gather_object(([p for p in stays if stays[p]], sorted(chosen), len(linears)), control)
    names = {name for _, own, _ in found for name in own}
    if unused := [pattern for pattern in stays if not any(pattern in used for used, *_ in found)]:
        raise ConfigError(f"fp8.filter has {unused[0]!r}, which is in the name of no linear of a block; drop it")
    if not names:
        raise ConfigError(
            f"fp8 finds no linear to run in: those of the {sum(n for *_, n in found)} in blocks that fp8.filter leaves have "
            f"sizes that aren't multiples of {MULTIPLE} on some tensor-parallel rank; set fp8.enabled to false"
        )
    for name, linear in linears:
        if name in chosen:
            attach_fp8(linear, fp8, sink)
    if control.index == 0:
        left = {name for name, _ in linears} - fits
        unfit = f"{len(left)} of rank 0 stay out, as {MULTIPLE} does not divide their sizes"
        logger.info("fp8: %d linears of the model; %s", len(names), unfit)


def _choose(linears: Sequence[Named], choice: LayerNames) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """Return the names that each pattern of fp8.filter excludes, the names of linears of fitting sizes, and the chosen ones."""
    stays = {pattern: {name for name, _ in linears if re.search(pattern, name)} for pattern in patterns_of(choice)}
    fits = {name for name, linear in linears if fits_fp8(linear)}
    return stays, fits, fits.difference(*stays.values())


def mark_gathers(model: PipelineModule, config: Config) -> None:
    """Mark the weights of fp8 linears that ZeRO-3 may gather in fp8, before buckets are made; see mark_weights."""
    chosen: list[nn.Module] = []
    if can_gather_in_fp8(config):
        linears = linears_of(model)
        *_, names = _choose(linears, config.fp8.filter)
        chosen = [linear for name, linear in linears if name in names]
    mark_weights(model.layers, chosen)


def gather_in_fp8(fp8: Fp8, linears: Sequence[Named], groups: ProcessGroups) -> None:
    """Gather the marked weights of linears in fp8 while `fp8` keeps casts. Collective over all ranks."""
    layers = {m.get_parameter("weight"): (name, fp8.layers[m]) for name, m in linears if m in fp8.layers}
    found = dict.fromkeys(filter(None, map(weights_of, layers)))
    weights = [w for w in found if isinstance(w, Fp8Weights) and all(p in layers for p in w.parameters)]
    names = [layers[p][0] for each in weights for p in each.parameters]
    everyone = all_gather_object(names, groups.control)
    # Units of tensor-parallel ranks may differ in size, so that one rank's are too small to be sharded.
    if not weights or any(everyone[rank] != names for rank in groups.model.ranks):
        return
    for each in weights:
        for p in each.parameters:
            layers[p][1].gather_by(partial(_cast_of, each, p))
    for _, linear in linears:
        if not isinstance(linear._parameters, WatchedParameters):  # by BlockUnits
            vars(linear)["_parameters"] = WatchedParameters(linear._parameters)
    own = [layers[p][1] for each in weights for p in each.parameters]
    shared = dict.fromkeys(layer.group for layer in own if layer.group is not None)
    places = ([k for k, layer in enumerate(own) if layer.group == group] for group in shared)
    device = weights[0].shard.device
    sliced = [(group, torch.tensor(at, device=device)) for group, at in zip(shared, places, strict=True)]
    fp8.call_on_keep(partial(_agree_on_scales, weights, sliced))


def _cast_of(weights: Fp8Weights, parameter: nn.Parameter) -> Scaled | None:
    found = weights.cast_of(parameter)
    return None if found is None else Scaled(*found)


@torch.no_grad()
def _agree_on_scales(weights: Sequence[Fp8Weights], sliced: Sequence[tuple[Group, Tensor]], keeps: bool) -> None:
    """Agree on scales of the weights as they are now, if `keeps`: they are gathered in fp8 from now on, or no longer.

    sliced: tensor-parallel groups, each with the numbers of the parameters that are sharded over it.
    """
    if not keeps:
        for each in weights:
            each.use_scales(None, round_into)
        return
    amax = largest_of([piece for each in weights for piece in each.pieces])
    all_reduce_max(amax, weights[0].partition).wait()
    for group, places in sliced:
        own = amax[places]
        all_reduce_max(own, group).wait()
        amax[places] = own
    scales = scale_of(amax, E4M3).split([len(each.pieces) for each in weights])
    for each, own in zip(weights, scales, strict=True):
        each.use_scales(own, round_into)
