"""Gathers of fp8 linears' weights in fp8 (ZeRO-3): which weights, and their scales."""

from __future__ import annotations

import dis
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise
from types import CodeType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.split_backward import has_hooks
from parallel3d.comm.collectives import Group, all_gather_object, all_reduce_max
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.engine.fp8 import Named, chosen_linears
from parallel3d.kernels.fp8 import E4M3, Scaled, largest_of, round_into, scale_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.zero.external import WatchedParameters
from parallel3d.zero.fp8_weights import Fp8Weights, let_gather_in_fp8
from parallel3d.zero.weights import weights_of


def mark_gathers(model: PipelineModule, config: Config) -> None:
    """Let ZeRO-3 gather the weights of fp8 linears in fp8, before buckets are made; not those that others may read.

    These are parameters that a module holds beside the linear, linears with hooks, and those whose weights the forward of a
    module around them reads, as nn.MultiheadAttention does. Row-wise scales of a weight and its transpose differ, and shards on
    the host are copied to the device as they are: there weights are gathered in their own dtype.
    """
    for p in model.layers.parameters():  # of an engine before
        let_gather_in_fp8(p, False)
    zero, fp8 = config.zero_optimization, config.fp8
    on_host = zero.offload_param.device not in ("none", None)
    if not fp8.enabled or fp8.recipe != "tensorwise" or zero.stage < 3 or on_host:
        return
    modules = list(model.layers.modules())
    readers = Counter(p for m in modules for p in tree_leaves(list(vars(m).values())) if isinstance(p, nn.Parameter))
    read = {linear for m in modules for linear in _read_by_forward(m)}
    for _, linear in chosen_linears(model, fp8):
        weight = linear.get_parameter("weight")
        if readers[weight] == 1 and linear not in read and not has_hooks(linear):
            let_gather_in_fp8(weight, True)


def _read_by_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside one whose forward has `<name>.weight`, with their names."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is not None and (names := _names_before_weight(code)):
        yield from (inner for path, inner in module.named_modules() if path.rpartition(".")[2] in names)


@cache
def _names_before_weight(code: CodeType) -> set[str]:
    return {before.argval for before, load in pairwise(dis.get_instructions(code)) if load.argval == "weight"}


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
