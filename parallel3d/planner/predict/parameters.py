"""Parameters that each stage of a split model holds: as PipelineModule would register them, without building it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.ties import TieIndex
from parallel3d.specs import Layer
from parallel3d.zero.buckets import by_owners


def stage_parameters(
    specs: Sequence[Layer], layers: Sequence[LayerProfile], bounds: Sequence[int], placement: Sequence[int]
) -> list[list[ParameterInfo]]:
    """Return each stage's trainable parameters, as in PipelineModule.parameter_infos. placement: each chunk's stage."""
    chunk_of = np.repeat(np.arange(len(placement)), np.diff(bounds)).tolist()
    ties = TieIndex(specs, chunk_of.__getitem__)
    builders: list[set[int]] = [set() for _ in range(max(placement) + 1)]
    for k, builder in enumerate(ties.builder):
        builders[placement[chunk_of[k]]].add(builder)
    return [_in_order(ties, layers, sorted(own)) for own in builders]


def _in_order(ties: TieIndex, layers: Sequence[LayerProfile], builders: Sequence[int]) -> list[ParameterInfo]:
    """Order parameters by the layers that build them; in each layer, those that are tied by attribute come first."""
    found: dict[tuple[int, str], ParameterInfo] = {}
    for builder in builders:
        tied, parameters = ties.attributes(builder), layers[builder].parameters
        if not tied and parameters:
            owners = ties.owners(builder, parameters[0][0])
            for name, parameter in parameters:
                found[builder, name] = ParameterInfo(f"layers.{builder}.{name}", parameter, owners)
            continue
        for name, parameter in sorted(parameters, key=lambda item: not _is_of(item[0], tied)):
            origin, source = ties.origin(builder, name)
            if (origin, source) not in found:
                info = ParameterInfo(f"layers.{origin}.{source}", parameter, ties.owners(builder, name))
                found[origin, source] = info
    return list(found.values())


def _is_of(name: str, attributes: Sequence[str]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in attributes)


def merged_parameters(stage: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Return one parameter, without memory, in place of all that have the same owners: enough for a rough prediction."""
    merged = []
    for owners, infos in by_owners(stage).items():
        numel, dtype = sum(info.parameter.numel() for info in infos), infos[0].parameter.dtype
        merged.append(ParameterInfo("", nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")), owners))
    return merged
