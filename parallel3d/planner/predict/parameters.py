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
    found: dict[str, ParameterInfo] = {}
    for builder in builders:
        tied = tuple(attribute + "." for attribute in ties.attributes(builder))
        for name, parameter in sorted(layers[builder].parameters, key=lambda item: not f"{item[0]}.".startswith(tied)):
            origin, source = ties.origin(builder, name)
            path = f"layers.{origin}.{source}"
            found.setdefault(path, ParameterInfo(path, parameter, ties.owners(builder, name)))
    return list(found.values())


def merged_parameters(stage: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    """Return one parameter, without memory, in place of all that have the same owners: enough for a rough prediction."""
    merged = []
    for owners, infos in by_owners(stage).items():
        numel, dtype = sum(info.parameter.numel() for info in infos), infos[0].parameter.dtype
        merged.append(ParameterInfo("", nn.Parameter(torch.empty(numel, dtype=dtype, device="meta")), owners))
    return merged
