"""`save_hf`: what `from_pretrained` reads, from any layout."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from parallel3d.activity import ACTIVITY, Phase
from parallel3d.comm.collectives import all_gather_object, receive_bytes, send_bytes
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import CheckpointError
from parallel3d.models.huggingface.config import config_json
from parallel3d.models.huggingface.names import LayerNames, Stored
from parallel3d.models.huggingface.weights import INDEX, SINGLE
from parallel3d.models.huggingface.wrap import WrappedPart
from parallel3d.models.layers import DecoderLayer
from parallel3d.models.sliced import whole_shape
from parallel3d.parameters import Slicing, slicing_of
from parallel3d.pipe.module import PipelineModule


class Trained(Protocol):
    """An engine, as far as an export looks at it."""

    module: nn.Module

    def master_weights(self) -> Mapping[nn.Parameter, Tensor]:
        """What the optimizer updates, whole, on the host of the first replica's ranks. Collective."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a stored parameter: of shape `shape` here, of `whole` in all."""

    stored: Stored
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slicing | None


@ACTIVITY.untimed(Phase.SAVING)
def save_hf(
    engine: Trained | PipelineModule,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json and safetensors, which transformers' from_pretrained and `from_hf` read, of a model of `models`.

    directory: must not exist, or be empty; it appears whole, by one rename. masters: the values that the optimizer updates,
    in fp32, instead of the weights rounded to what the layers compute with. dtype: what the values are converted to. Files
    hold up to max_file_bytes, or one tensor. Rank 0 writes, holding one file's tensors at a time. Collective over all
    ranks; raises CheckpointError on all.
    """
    module = engine if isinstance(engine, PipelineModule) else engine.module
    if not isinstance(module, PipelineModule):
        raise CheckpointError(
            f"a {type(module).__name__} is no PipelineModule of from_hf's layers; save it by its own save_pretrained"
        )
    directory = Path(directory)
    values: Mapping[nn.Parameter, Tensor] = {}
    if masters and not isinstance(engine, PipelineModule):
        values = engine.master_weights()
    module.wait_for_weights(module)
    own = _own_pieces(module, values) if module.groups.coordinate("data") == 0 else _Own()
    if module.groups.rank == 0 and directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        own.error = own.error or f"{directory} is there already and not empty; remove it or choose another directory"
    everyone = all_gather_object((own.pieces, own.config, own.error), module.groups.control)
    _raise_first([error for _, _, error in everyone])
    config = next(config for _, config, _ in everyone if config)
    plan = _Plan([pieces for pieces, _, _ in everyone])
    error = None
    if module.groups.rank == 0:
        error = _write(plan, _Gathering(own.values, module.groups), directory, config, dtype, max_file_bytes)
    else:
        for key, held in plan.tensors.items():
            if module.groups.rank in held:
                send_bytes(own.values[key], 0, module.groups.control)
    _raise_first(all_gather_object(error, module.groups.control))


def _raise_first(errors: Sequence[str | None]) -> None:
    """On all ranks, what one of them has met."""
    found = next((error for error in errors if error is not None), None)
    if found is not None:
        raise CheckpointError(found)


# A parameter's place in the whole model: layer and name.
Key = tuple[int, str]


@dataclass
class _Own:
    """What a rank has to give, or why it can't."""

    pieces: dict[Key, Piece] = field(default_factory=dict)
    values: dict[Key, Tensor] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    error: str | None = None


def _own_pieces(module: PipelineModule, values: Mapping[nn.Parameter, Tensor]) -> _Own:
    """values: of the parameters that are not to be written as they are."""
    own = _Own()
    for place, layer in module.layers.items():
        if isinstance(layer, DecoderLayer):
            own.config = config_json(layer.config)
        elif isinstance(layer, WrappedPart):
            own.config = layer.config_json()
        elif next(layer.parameters(), None) is not None:
            kind = type(layer).__name__
            own.error = (
                f"layer {place}, a {kind}, is none of from_hf's or decoder's: Hugging Face has no name for its weights"
            )
            return own
        else:
            continue
        names: LayerNames = layer.stored()
        for name, parameter in layer.named_parameters():
            value = values.get(parameter, parameter)
            piece = Piece(names[name], tuple(value.shape), whole_shape(parameter), value.dtype, slicing_of(parameter))
            own.pieces[int(place), name], own.values[int(place), name] = piece, value
    return own


class _Plan:
    """Which ranks hold a piece of each tensor, in the order of the layers; of a tied one, of its first place."""

    def __init__(self, everyone: Sequence[Mapping[Key, Piece]]):
        self.tensors: dict[Key, dict[int, Piece]] = {}
        written: dict[Stored, Key] = {}
        for key in sorted({key for pieces in everyone for key in pieces}):
            held: dict[int, Piece] = {}
            for rank, pieces in enumerate(everyone):
                # Of ranks that hold the same, the first is enough.
                if key in pieces and all(pieces[key].slicing != piece.slicing for piece in held.values()):
                    held[rank] = pieces[key]
            if written.setdefault(next(iter(held.values())).stored, key) == key:
                self.tensors[key] = held

    def files(self, dtype: torch.dtype | None, max_file_bytes: int) -> dict[str, str]:
        """Name of a stored tensor -> its file."""
        numbers: dict[str, int] = {}
        number, size = 1, 0
        for held in self.tensors.values():
            piece = next(iter(held.values()))
            for name, shape in piece.stored.shapes.items():
                if name in numbers:
                    continue
                num_bytes = math.prod(shape) * _dtype_of(piece, dtype).itemsize
                if size and size + num_bytes > max_file_bytes:
                    number, size = number + 1, 0
                numbers[name], size = number, size + num_bytes
        if number == 1:
            return dict.fromkeys(numbers, SINGLE)
        return {name: f"model-{k:05}-of-{number:05}.safetensors" for name, k in numbers.items()}


def _dtype_of(piece: Piece, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and piece.dtype.is_floating_point else piece.dtype


class _Gathering:
    """Rank 0's side: whole tensors, from the ranks that hold their pieces."""

    def __init__(self, own: Mapping[Key, Tensor], groups: ProcessGroups):
        self._own, self._groups = own, groups

    def whole(self, key: Key, held: Mapping[int, Piece]) -> Tensor:
        """One tensor, on the host. The other ranks send in the plan's order."""
        first = next(iter(held.values()))
        whole = torch.empty(first.whole, dtype=first.dtype, device="cpu")
        for rank, piece in held.items():
            if rank == self._groups.rank:
                value = self._own[key].detach()
            else:
                value = receive_bytes(piece.shape, piece.dtype, rank, self._groups.control)
            if piece.slicing is None:
                return value.cpu()
            piece.slicing.write(whole, value)
        return whole


class _Files:
    """Stored tensors on their way to their files: each is written once all its tensors are there."""

    def __init__(self, directory: Path, file_of: Mapping[str, str]):
        self._directory, self._file_of = directory, file_of
        self._tensors: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._unwritten = Counter(file_of.values())
        self.num_bytes = 0

    def add(self, stored: Stored, parameter: Tensor) -> None:
        """Put a whole parameter where it is stored. Raises OSError, SafetensorError."""
        shapes = stored.shapes
        parts = parameter.split([section.size for section in stored.sections]) if parameter.dim() else [parameter]
        for section, part in zip(stored.sections, parts, strict=True):
            name = section.name
            if name not in self._tensors:
                self._tensors[name] = torch.empty(shapes[name] if parameter.dim() else (), dtype=parameter.dtype)
                self._missing[name] = section.rows
            stored.rows_of(self._tensors[name], section).copy_(part)
            self._missing[name] -= section.size
            if not self._missing[name]:
                self._complete(self._file_of[name])

    def _complete(self, file: str) -> None:
        self._unwritten[file] -= 1
        if not self._unwritten[file]:
            tensors = {name: self._tensors.pop(name) for name in list(self._tensors) if self._file_of[name] == file}
            self.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, self._directory / file, metadata={"format": "pt"})


def _write(
    plan: _Plan,
    gathering: _Gathering,
    directory: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> str | None:
    """Write all on rank 0; returns what went wrong, once all other ranks have been received from."""
    partial = directory.parent / f".{directory.name}.partial"
    file_of = plan.files(dtype, max_file_bytes)
    files = _Files(partial, file_of)
    error: Exception | None = None
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
        partial.mkdir(parents=True)
    except OSError as raised:
        error = raised
    for key, held in plan.tensors.items():
        whole = gathering.whole(key, held)
        if error is None:
            piece = next(iter(held.values()))
            try:
                files.add(piece.stored, whole.to(_dtype_of(piece, dtype)))
            except (OSError, SafetensorError) as raised:
                error = raised
    if error is None:
        try:
            _finish(partial, directory, file_of, files.num_bytes, _config_of(plan, config, dtype))
        except OSError as raised:
            error = raised
    if error is None:
        return None
    shutil.rmtree(partial, ignore_errors=True)
    return f"{directory} can't be written: {error}"


def _config_of(plan: _Plan, config: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """config.json with the dtype that most of the numbers have."""
    sizes: Counter[torch.dtype] = Counter()
    for held in plan.tensors.values():
        piece = next(iter(held.values()))
        sizes[_dtype_of(piece, dtype)] += math.prod(piece.whole)
    name = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
    # As transformers 4 and 5 both read it.
    return {**{key: value for key, value in config.items() if key != "dtype"}, "torch_dtype": name}


def _finish(partial: Path, directory: Path, file_of: Mapping[str, str], total: int, config: Mapping[str, Any]) -> None:
    """Index and config.json, on the disk before the directory gets its name."""
    if set(file_of.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    text = json.dumps(config, indent=2, sort_keys=True, default=lambda value: str(value).removeprefix("torch."))
    (partial / "config.json").write_text(text + "\n")
    for path in (*partial.iterdir(), partial):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    partial.rename(directory)
