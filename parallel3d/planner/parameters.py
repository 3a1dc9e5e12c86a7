"""What each stage of a split model holds of parameters: as PipelineModule would register them, without building it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.specs import Layer
from parallel3d.pipe.ties import TieIndex
from parallel3d.planner.profile import LayerProfile


def stage_parameters(
    specs: Sequence[Layer], layers: Sequence[LayerProfile], bounds: Sequence[int], placement: Sequence[int]
) -> list[list[ParameterInfo]]:
    """Of each stage its trainable parameters in the order of the layers, each once. placement: the stage of each chunk."""
    chunk_of = np.repeat(np.arange(len(placement)), np.diff(bounds)).tolist()
    ties = TieIndex(specs, chunk_of.__getitem__)
    found: list[dict[tuple[int, str], ParameterInfo]] = [{} for _ in range(max(placement) + 1)]
    for k, builder in enumerate(ties.builder):
        own = found[placement[chunk_of[k]]]
        for name, parameter in layers[builder].parameters:
            origin, source = ties.origin(builder, name)
            if (origin, source) not in own:
                info = ParameterInfo(f"layers.{origin}.{source}", parameter, ties.owners(builder, name))
                own[origin, source] = info
    return [list(infos.values()) for infos in found]
