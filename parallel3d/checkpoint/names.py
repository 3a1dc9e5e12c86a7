"""Names of parameters in another format, as layers give them, for an export without the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from torch import nn

from parallel3d.errors import ConfigError

Json = dict[str, Any]


@runtime_checkable
class HuggingFaceLayer(Protocol):
    """A layer of a model that Hugging Face has."""

    def stored(self) -> Mapping[str, Any]:
        """Name of a parameter in the layer -> how it is stored, a dataclass."""

    def config_json(self) -> Json:
        """The whole model's config.json. Raises ConfigError where there is no such architecture."""


def huggingface_names(layers: nn.ModuleDict, global_name: Callable[[int, str], str]) -> Json | None:
    """config.json, and how each parameter of this rank's layers is stored; None where a layer with weights doesn't say.

    layers: by their places; global_name: of a place and a name in the layer, the name in the whole model.
    """
    names: Json = {}
    config: Json = {}
    for place, layer in layers.items():
        if isinstance(layer, HuggingFaceLayer):
            try:
                config = config or json.loads(json.dumps(layer.config_json(), default=_name_of_dtype))
            except ConfigError:
                return None
            names |= {global_name(int(place), name): asdict(stored) for name, stored in layer.stored().items()}
        elif next(layer.parameters(), None) is not None:
            return None
    return {"config": config, "names": names}


def merge_names(everyone: Iterable[Json | None]) -> Json | None:
    """Merge the names of all ranks; None if a rank has none."""
    merged: Json = {"config": {}, "names": {}}
    for own in everyone:
        if own is None:
            return None
        merged["config"] = merged["config"] or own["config"]
        merged["names"] |= own["names"]
    return merged if merged["names"] else None


def _name_of_dtype(value: object) -> str:
    return str(value).removeprefix("torch.")
