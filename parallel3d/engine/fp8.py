"""Choice of the linears that run in fp8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group, all_gather_object
from parallel3d.config import Fp8Config
from parallel3d.config.section import LayerNames
from parallel3d.errors import ConfigError
from parallel3d.kernels.fp8 import MULTIPLE
from parallel3d.logs import logger
from parallel3d.pipe.blocks import blocks_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.single_stage import SingleStageModule
from parallel3d.tensor_parallel.fp8 import attach_fp8, fits_fp8, is_linear, patterns_of

# Ada's; Hopper's is 9.0.
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
    """Let the linears compute in fp8 whose sizes allow it on all ranks, and which fp8.filter leaves.

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
        logger.info("fp8: %d linears of the model, and %d of rank 0 too odd in size", len(names), len(left))


def chosen_linears(model: PipelineModule, config: Fp8Config) -> list[Named]:
    """Return the linears of this rank's layers that use_fp8 will choose. Raises ConfigError for a filter that is no pattern."""
    linears = linears_of(model)
    *_, chosen = _choose(linears, config.filter)
    return [(name, linear) for name, linear in linears if name in chosen]


def _choose(linears: Sequence[Named], choice: LayerNames) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """Return the names that each pattern of fp8.filter leaves out, those of linears of fitting sizes, and the chosen ones."""
    stays = {pattern: {name for name, _ in linears if re.search(pattern, name)} for pattern in patterns_of(choice)}
    fits = {name for name, linear in linears if fits_fp8(linear)}
    return stays, fits, fits.difference(*stays.values())
