"""Tensors of a Hugging Face checkpoint, read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.export import INDEX, SINGLE, LayerNames, Stored
from parallel3d.checkpoint.read import differences, open_safetensors
from parallel3d.errors import CheckpointError
from parallel3d.parameters import slicing_of

# What old checkpoints hold besides weights: buffers that are computed.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Weights(Protocol):
    """Named tensors to read from."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""

    def alias(self, name: str, other: str) -> None:
        """Let the tensor `other` be there as `name` too, unless there is one of that name."""

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Elements start to stop along dim 0 or 1 of a tensor, on the CPU; of the others nothing is read."""


class StateDict:
    """Weights in memory: of a model that is there already."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def alias(self, name: str, other: str) -> None:
        """Give a tensor a second name, if that isn't taken."""
        self._tensors.setdefault(name, self._tensors[other])

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor along `dim`."""
        return self._tensors[name].detach().narrow(dim, start, stop - start)


class Safetensors:
    """Weights in a directory: one file, or several with an index. Raises CheckpointError where there are none.

    base: prefix of the names that a checkpoint of the model without its head leaves out, such as "transformer.".
    """

    def __init__(self, directory: Path, base: str):
        self._files: dict[str, Any] = {}
        self._place: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        found = {name: path for path in _files_of(directory) for name in self._names(path)}
        bare = not any(name.startswith(base) for name in found)
        for stored, path in found.items():
            name = base + stored if bare and stored != "lm_head.weight" else stored
            self._place[name] = (path, stored)
            self._shapes[name] = tuple(self._open(path).get_slice(stored).get_shape())

    def _open(self, path: Path) -> Any:
        if str(path) not in self._files:
            self._files[str(path)] = open_safetensors(path)
        return self._files[str(path)]

    def _names(self, path: Path) -> list[str]:
        return list(self._open(path).keys())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        return self._shapes

    def alias(self, name: str, other: str) -> None:
        """Give a tensor a second name, if that isn't taken."""
        self._place.setdefault(name, self._place[other])
        self._shapes.setdefault(name, self._shapes[other])

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor along `dim`."""
        path, stored = self._place[name]
        there = self._open(path).get_slice(stored)
        return there[start:stop] if dim == 0 else there[:, start:stop]


def _files_of(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        files = sorted({directory / file for file in index["weight_map"].values()})
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
    unknown = [n for n in extra if not (tied and n == "lm_head.weight")]
    misshapen = {name: (s, shapes[name]) for name, s in expected.items() if shapes.get(name, s) != s}
    if faults := differences(set(expected) - set(shapes), unknown, misshapen):
        raise CheckpointError(f"the tensors of {where} don't fit its config.json; {faults}")


@torch.no_grad()
def load_layer(module: nn.Module, names: LayerNames, weights: Weights) -> None:
    """Fill a layer's parameters, whole or sliced, in their dtype."""
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
