"""Weights in files that need no model: a Hugging Face directory, or safetensors under the model's own names."""

from __future__ import annotations

import json
import math
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel3d.checkpoint.directory import sync
from parallel3d.checkpoint.format import sources
from parallel3d.checkpoint.read import Reader
from parallel3d.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GENERATION = "generation_config.json"
MAX_FILE_BYTES = 5 * 10**9
Json = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Rows `start` to `start + size` of a stored tensor of `of` rows; all of it by default."""

    name: str
    size: int
    start: int = 0
    of: int | None = None


@dataclass(frozen=True)
class Stored:
    """How another format stores a parameter: as these sections, concatenated along dim 0.

    rest: the parameter's other sizes. transposed: rows of the parameter are columns in the file, [in, out] for [out, in].
    """

    sections: tuple[Section, ...]
    rest: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, as stored."""
        shapes = {s.name: (s.size if s.of is None else s.of, *self.rest) for s in self.sections}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return sum(section.size for section in self.sections) * math.prod(self.rest)

    def write(self, held: dict[str, Tensor], parameter: Tensor, dtype: torch.dtype | None = None) -> None:
        """Copy a whole parameter into the tensors that store it, by their names; those not held yet are made."""
        sizes = [section.size for section in self.sections]
        parts = parameter.split(sizes) if parameter.dim() else [parameter]
        for section, part in zip(self.sections, parts, strict=True):
            if section.name not in held:
                shape = self.shapes[section.name] if parameter.dim() else ()
                held[section.name] = torch.empty(shape, dtype=dtype or parameter.dtype)
            self.rows_of(held[section.name], section).copy_(part)

    def rows_of(self, tensor: Tensor, section: Section) -> Tensor:
        """Return a view of the section of a stored tensor, in the parameter's orientation."""
        rows = tensor.t() if self.transposed else tensor
        return rows.narrow(0, section.start, section.size) if rows.dim() else rows


def all_of(name: str, *shape: int) -> Stored:
    """Describe a parameter of this shape that is stored unchanged under `name`."""
    size, *rest = shape or (1,)
    return Stored((Section(name, size),), tuple(rest))


# Name of a parameter in its layer -> how it is stored.
LayerNames = Mapping[str, Stored]


@runtime_checkable
class HuggingFaceLayer(Protocol):
    """A layer of a model whose architecture Hugging Face has."""

    def stored(self) -> LayerNames:
        """Return how each parameter is stored, by its name in the layer."""

    def config_json(self) -> Json:
        """Return the whole model's config.json, and in it that of GENERATION under its name, if the model has one.

        Raises ConfigError if Hugging Face has no such architecture.
        """


def huggingface_names(layers: nn.ModuleDict, global_name: Callable[[int, str], str]) -> Json | None:
    """Return config.json, and how each parameter of this rank's layers is stored; None if a layer with weights has no names.

    - layers: by their positions in the model.
    - global_name: (position, name in the layer) -> name in the whole model.
    """
    names: Json = {}
    config: Json = {}
    for position, layer in layers.items():
        if isinstance(layer, HuggingFaceLayer):
            try:
                config = config or json.loads(_as_json(layer.config_json()))
            except ConfigError:
                return None
            names |= {global_name(int(position), name): asdict(stored) for name, stored in layer.stored().items()}
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


def _as_json(config: Mapping[str, Any]) -> str:
    """Format a config, with dtypes by their names."""
    return json.dumps(config, indent=2, sort_keys=True, default=lambda value: str(value).removeprefix("torch."))


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    plain: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> bool:
    """Write the weights of a checkpoint to a directory, and return whether they are in Hugging Face's form.

    A model of `parallel3d.models` becomes a directory that from_pretrained reads; any other model, or any with `plain`,
    becomes safetensors under the model's own names.

    - dtype: the dtype to which floating-point tensors are converted.
    - masters: write the masters that the optimizer updates, where they are wider than the weights.

    Raises CheckpointError, and has then written nothing.
    """
    if problem := check_empty(directory):
        raise CheckpointError(problem)
    reader = Reader(checkpoint)
    known: Mapping[str, Any] | None = None if plain else reader.manifest.state.get("huggingface")
    targets: dict[str, tuple[Stored, torch.dtype]] = {}
    for name, source in sorted(sources(reader.tensors, masters).items()):
        tensor = reader.tensors[source]
        if known is None:
            targets[source] = all_of(name, *tensor.shape), tensor.torch_dtype
        elif name in known["names"]:  # the others are buffers, which their layers make again
            targets[source] = TypeAdapter(Stored).validate_python(known["names"][name]), tensor.torch_dtype
    if not targets:
        raise CheckpointError(f"{checkpoint} holds no weights")
    tensors = ((source, reader.read(source)) for source in targets)
    write_weights(directory, targets, tensors, known["config"] if known is not None else None, dtype, max_file_bytes)
    return known is not None


def export_one_file(checkpoint: Path, file: Path) -> None:
    """Write all weights of a checkpoint into one file, replaced atomically.

    It is a safetensors file, or one for torch.load if its name ends otherwise. Raises CheckpointError, OSError.
    """
    beside = checkpoint / "export"
    export_checkpoint(checkpoint, beside, plain=True, max_file_bytes=sys.maxsize)
    written = beside / SINGLE
    if file.suffix != ".safetensors":
        tensors, written = load_file(written), beside / file.name
        torch.save(tensors, written)
        sync(written)
    written.replace(file)
    sync(file.parent)


def check_empty(directory: Path) -> str | None:
    """Return why nothing can be written to a directory, or None."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        return f"{directory} is there already and not empty; remove it or choose another directory"
    return None


def write_weights(
    directory: Path,
    targets: Mapping[Any, tuple[Stored, torch.dtype]],
    tensors: Iterable[tuple[Any, Tensor]],
    config: Mapping[str, Any] | None,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Write whole parameters to a directory that appears once everything in it is on the disk.

    - targets: how each parameter is stored, and its dtype.
    - tensors: the parameters by the keys of `targets`. If they come in that order, one file's tensors are held at a time.
    - config: what HuggingFaceLayer.config_json returns, without its dtype; None for no such files.
    - dtype: the dtype to which floating-point tensors are converted.

    Raises CheckpointError if a file can't be written; then, and after any other exception, nothing is left.
    """
    if dtype is not None:
        targets = {key: (stored, dtype if d.is_floating_point else d) for key, (stored, d) in targets.items()}
    file_of = _assign_files(targets.values(), max_file_bytes)
    unwritten = Counter(file_of[section.name] for stored, _ in targets.values() for section in stored.sections)
    held: dict[str, Tensor] = {}
    with appearing(directory) as partial:
        for key, parameter in tensors:
            stored, target_dtype = targets[key]
            stored.write(held, parameter, target_dtype)
            for file in (file_of[section.name] for section in stored.sections):
                unwritten[file] -= 1
                if not unwritten[file]:
                    complete = {other: held.pop(other) for other in list(held) if file_of[other] == file}
                    save_file(complete, partial / file, metadata={"format": "pt"})
        _write_descriptions(partial, targets.values(), file_of, config)


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """Yield a new directory that gets this name at the end, once its files are on the disk.

    Raises CheckpointError if a file can't be written; then, and after any other exception, nothing is left.
    """
    partial = directory.parent / f".{directory.name}.{secrets.token_hex(8)}"
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(directory)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise CheckpointError(f"{directory} can't be written: {error}; free space, or write elsewhere") from error
        raise


def _write_descriptions(
    directory: Path,
    targets: Iterable[tuple[Stored, torch.dtype]],
    file_of: Mapping[str, str],
    config: Mapping[str, Any] | None,
) -> None:
    """Write the index of several files, config.json with the dtype that most of the elements have, and GENERATION."""
    elements: Counter[torch.dtype] = Counter()
    for stored, dtype in targets:
        elements[dtype] += stored.numel
    if set(file_of.values()) != {SINGLE}:
        size = sum(numel * dtype.itemsize for dtype, numel in elements.items())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if config is not None:
        # Under the name that transformers 4 and 5 both read.
        others = {key: value for key, value in config.items() if key not in ("dtype", GENERATION)}
        content = _as_json({**others, "torch_dtype": elements.most_common(1)[0][0]})
        (directory / "config.json").write_text(content + "\n")
        if GENERATION in config:
            (directory / GENERATION).write_text(_as_json(config[GENERATION]) + "\n")


def _assign_files(targets: Iterable[tuple[Stored, torch.dtype]], max_file_bytes: int) -> dict[str, str]:
    """Return the file of each stored tensor, by its name."""
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for stored, dtype in targets:
        for name, shape in stored.shapes.items():
            if name in numbers:
                continue
            num_bytes = math.prod(shape) * dtype.itemsize
            if size and size + num_bytes > max_file_bytes:
                number, size = number + 1, 0
            numbers[name], size = number, size + num_bytes
    if number == 1:
        return dict.fromkeys(numbers, SINGLE)
    return {name: f"model-{k:05}-of-{number:05}.safetensors" for name, k in numbers.items()}
