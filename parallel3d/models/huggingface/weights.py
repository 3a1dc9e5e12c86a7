"""Weights of a Hugging Face checkpoint; each rank reads only its part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ValidationError
from torch import Tensor, nn

from parallel3d.checkpoint.export import INDEX, SINGLE, LayerNames, Stored
from parallel3d.checkpoint.read import differences, open_safetensors
from parallel3d.config.files import explain, parse_json, read_mapping
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.parameters import slicing_of

HEAD = "lm_head.weight"
# Buffers in old checkpoints, which are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Weights:
    """Named tensors, each a torch tensor or a safetensors slice, which is read from its file when it is asked for."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = dict(tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        return {name: tuple(t.shape if isinstance(t, Tensor) else t.get_shape()) for name, t in self._tensors.items()}

    def alias(self, name: str, other: str) -> None:
        """Give the tensor `other` the second name `name`, unless there is one of that name, or none to name."""
        if other in self._tensors:
            self._tensors.setdefault(name, self._tensors[other])

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor along dim 0 or 1; nothing else is read from a file."""
        tensor = self._tensors[name]
        part: Tensor = tensor[start:stop] if dim == 0 else tensor[:, start:stop]
        return part


def _plain(name: str) -> str:
    if not name.isprintable() or Path(name).name != name or len(os.fsencode(name)) > 255:
        raise ValueError(f"{name!r} is no name of a file in the directory")
    return name


class _Index(BaseModel):
    """The index of several files. weight_map: tensor -> name of its file."""

    weight_map: dict[str, Annotated[str, AfterValidator(_plain)]]


def open_directory(directory: Path, base: str) -> Weights:
    """Return the weights in a directory, which holds one file, or several with an index.

    base: prefix of the names that a checkpoint of the model without its head leaves out, such as "transformer.".
    Raises CheckpointError if there are no weights.
    """
    tensors: dict[str, Any] = {}
    for path in _files_of(directory):
        file = open_safetensors(path)
        tensors |= {name: file.get_slice(name) for name in list(file.keys())}
    if not any(name.startswith(base) for name in tensors):
        tensors = {name if name == HEAD else base + name: tensor for name, tensor in tensors.items()}
    return Weights(tensors)


def _files_of(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        try:
            index = _Index.model_validate(read_mapping(directory / INDEX, parse_json))
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        except ValidationError as error:
            raise CheckpointError(f"{directory / INDEX} is no index of weights: {explain(error)}") from None
        files = sorted({directory / file for file in index.weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(f"{directory / INDEX} names files that are not there: {', '.join(missing)}")
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    others = sorted(p.name for p in directory.glob("*.bin")) if directory.is_dir() else []
    hint = f"; {others[0]} is a pickle: save it again with transformers' save_pretrained" if others else ""
    raise CheckpointError(f"{directory} has no {SINGLE} and no {INDEX}{hint}")


def check_weights(weights: Weights, wanted: Iterable[Stored], tied: bool, where: str) -> None:
    """Raise CheckpointError, with the names of all at fault, unless the weights are those wanted, of their shapes."""
    shapes = weights.shapes()
    expected = {name: shape for stored in wanted for name, shape in stored.shapes.items()}
    # Hugging Face writes a tied head's weight or not; what is there is the embedding's.
    extra = [n for n in shapes if n not in expected and not n.endswith(_COMPUTED)]
    unknown = [n for n in extra if not (tied and n == HEAD)]
    misshapen = {name: (s, shapes[name]) for name, s in expected.items() if shapes.get(name, s) != s}
    if faults := differences(set(expected) - set(shapes), unknown, misshapen):
        raise CheckpointError(f"the tensors of {where} don't fit its config.json; {faults}")


@torch.no_grad()
def load_layer(module: nn.Module, names: LayerNames, weights: Weights) -> None:
    """Fill a layer's parameters, whole or sharded, in their dtype."""
    for name, parameter in module.named_parameters():
        slicing = slicing_of(parameter)
        dim, ranges = (0, ((0, parameter.shape[0]),)) if slicing is None else (slicing.dim, slicing.ranges)
        parts = parameter.split([stop - start for start, stop in ranges], dim)
        for part, (start, stop) in zip(parts, ranges, strict=True):
            _read_range(part, names[name], dim, start, stop, weights)


def _read_range(target: Tensor, stored: Stored, dim: int, start: int, stop: int, weights: Weights) -> None:
    """Fill target with elements start to stop, along dim, of the parameter."""
    begin = 0
    for section in stored.sections:
        if dim == 0:
            low, high = max(start, begin) - begin, min(stop, begin + section.size) - begin
            here = target.narrow(0, begin + low - start, high - low) if low < high else None
            low, high = low + section.start, high + section.start
        else:
            # Of all the section's rows, a range of columns: the rows are cut after reading, where they are not all.
            low, high, here = start, stop, target.narrow(0, begin, section.size)
        if here is not None:
            read = weights.read(section.name, 1 - dim if stored.transposed else dim, low, high)
            here.copy_((read.t() if stored.transposed else read) if dim == 0 else stored.rows_of(read, section))
        begin += section.size
