"""Whole tensors out of a checkpoint, without a model: a Hugging Face directory, or safetensors under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from parallel3d.checkpoint.directory import sync
from parallel3d.checkpoint.files import MAX_FILE_BYTES, Target, Writing, check_empty, dtype_of
from parallel3d.checkpoint.format import MASTER, MODEL
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.stored import Section, Stored, all_of
from parallel3d.errors import CheckpointError


def export_checkpoint(
    checkpoint: Path,
    directory: Path,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    plain: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> bool:
    """Write the weights of a checkpoint's directory; whether they went as Hugging Face has them.

    A model of `parallel3d.models` becomes a directory that from_pretrained reads, any other, or each with `plain`,
    safetensors under the model's own names. masters: what the optimizer updated, where that is wider. dtype: what
    floating-point numbers are converted to. Raises CheckpointError, and has then written nothing.
    """
    reader = Reader(checkpoint)
    known: Mapping[str, Any] | None = None if plain else reader.manifest.state.get("huggingface")
    found = {name.removeprefix(MODEL): name for name in reader.tensors if name.startswith(MODEL)}
    if masters:
        found |= {name.removeprefix(MASTER): name for name in reader.tensors if name.startswith(MASTER)}
    if problem := check_empty(directory):
        raise CheckpointError(problem)
    targets: dict[str, Target] = {}
    for name, source in sorted(found.items()):
        tensor = reader.tensors[source]
        if known is None:
            stored = all_of(name, *tensor.shape)
        elif name in known["names"]:
            stored = stored_of(known["names"][name])
        else:
            continue  # a buffer, which its layer makes anew
        targets[source] = Target(stored, dtype_of(tensor.torch_dtype, dtype))
    if not targets:
        raise CheckpointError(f"{checkpoint} holds no weights")
    writing = Writing(directory, list(targets.values()), max_file_bytes)
    try:
        writing.begin()
        for source, target in targets.items():
            reader.verify(source)
            writing.add(target, reader.read(source))
        writing.finish(known["config"] if known is not None else None)
    except (OSError, SafetensorError) as error:
        raise writing.drop(error) from error
    except CheckpointError as error:
        writing.drop(error)
        raise
    return known is not None


def write_one_file(checkpoint: Path, file: Path) -> None:
    """All weights of a checkpoint's directory as one file of safetensors, replaced at once. Raises CheckpointError."""
    reader = Reader(checkpoint)
    tensors = {}
    for name in reader.tensors:
        if name.startswith(MODEL):
            reader.verify(name)
            tensors[name.removeprefix(MODEL)] = reader.read(name)
    partial = file.with_name(f".{file.name}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        sync(partial)
        partial.rename(file)
        sync(file.parent)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{file} can't be written: {error}; free some space, or save elsewhere") from error


def stored_of(value: Mapping[str, Any]) -> Stored:
    """A Stored that was written as JSON, by dataclasses.asdict."""
    sections = tuple(Section(**section) for section in value["sections"])
    return Stored(sections, tuple(value["rest"]), value["transposed"])
