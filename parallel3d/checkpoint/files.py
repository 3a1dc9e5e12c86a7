"""The files of a Hugging Face directory, written one after the other, and the directory that appears whole."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.stored import Stored
from parallel3d.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Target:
    """A parameter to be written: how it is stored, and its dtype there."""

    stored: Stored
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Its numbers."""
        return sum(section.size for section in self.stored.sections) * math.prod(self.stored.rest)


def dtype_of(have: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in a file: the one asked for, for floating-point tensors."""
    return asked if asked is not None and have.is_floating_point else have


def check_empty(directory: Path) -> str | None:
    """Why nothing can be written there, if so."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        return f"{directory} is there already and not empty; remove it or choose another directory"
    return None


class Writing:
    """A directory on its way: each file is written once all its tensors are there, and `finish` gives the directory its name.

    targets: all that will be added, in any order. All methods raise OSError and SafetensorError; then `drop`.
    """

    def __init__(self, directory: Path, targets: Sequence[Target], max_file_bytes: int = MAX_FILE_BYTES):
        self._directory = directory
        self._partial = directory.parent / f".{directory.name}.partial"
        self._targets = targets
        self._file_of = _assign(targets, max_file_bytes)
        self._tensors: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._unwritten = Counter(self._file_of.values())
        self._num_bytes = 0

    def begin(self) -> None:
        """Make room, also of what a killed one has left."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)

    def add(self, target: Target, parameter: Tensor) -> None:
        """Put a whole parameter where it is stored."""
        stored, parameter = target.stored, parameter.to(target.dtype)
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
            self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, self._partial / file, metadata={"format": "pt"})

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Index and config.json, on the disk before the directory gets its name. config: without its dtype; None for none."""
        if set(self._file_of.values()) != {SINGLE}:
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self._file_of.items()))}
            (self._partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if config is not None:
            (self._partial / "config.json").write_text(as_json({**config, **self._dtype()}) + "\n")
        for path in (*self._partial.iterdir(), self._partial):
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        self._partial.rename(self._directory)

    def _dtype(self) -> dict[str, str]:
        """The dtype that most of the numbers have, as transformers 4 and 5 both read it."""
        sizes: Counter[torch.dtype] = Counter()
        for target in self._targets:
            sizes[target.dtype] += target.numel
        return {"torch_dtype": str(sizes.most_common(1)[0][0]).removeprefix("torch.")} if sizes else {}

    def drop(self, error: Exception) -> CheckpointError:
        """Leave nothing behind; what to raise."""
        shutil.rmtree(self._partial, ignore_errors=True)
        return CheckpointError(f"{self._directory} can't be written: {error}")


def as_json(config: Mapping[str, Any]) -> str:
    """A config as text; a dtype in it by its name."""
    kept = {key: value for key, value in config.items() if key != "dtype"}
    return json.dumps(kept, indent=2, sort_keys=True, default=lambda value: str(value).removeprefix("torch."))


def _assign(targets: Sequence[Target], max_file_bytes: int) -> dict[str, str]:
    """Name of a stored tensor -> its file."""
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for target in targets:
        for name, shape in target.stored.shapes.items():
            if name in numbers:
                continue
            num_bytes = math.prod(shape) * target.dtype.itemsize
            if size and size + num_bytes > max_file_bytes:
                number, size = number + 1, 0
            numbers[name], size = number, size + num_bytes
    if number == 1:
        return dict.fromkeys(numbers, SINGLE)
    return {name: f"model-{k:05}-of-{number:05}.safetensors" for name, k in numbers.items()}
