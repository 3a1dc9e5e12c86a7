"""What each stage of a split model holds of parameters: as PipelineModule would register them, without building it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.ties import TieIndex
from parallel3d.specs import Layer


def stage_parameters(
    specs: Sequence[Layer], layers: Sequence[LayerProfile], bounds: Sequence[int], placement: Sequence[int]
) -> list[list[ParameterInfo]]:
    """Of each stage its trainable parameters, as PipelineModule.parameter_infos has them. placement: each chunk's stage."""
    chunk_of = np.repeat(np.arange(len(placement)), np.diff(bounds)).tolist()
    ties = TieIndex(specs, chunk_of.__getitem__)
    builders: list[set[int]] = [set() for _ in range(max(placement) + 1)]
    for k, builder in enumerate(ties.builder):
        builders[placement[chunk_of[k]]].add(builder)
    return [_in_order(ties, layers, sorted(own)) for own in builders]


def _in_order(ties: TieIndex, layers: Sequence[LayerProfile], builders: Sequence[int]) -> list[ParameterInfo]:
    """Of modules in the order of the layers that build them; those that are tied by attribute first in each."""
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
