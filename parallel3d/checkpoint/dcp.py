"""Checkpoints of torch.distributed.checkpoint, with the names of its state dicts: written from a checkpoint, and read whole.

model.<name>                                   masters where the optimizer updates any, else weights; buffers
optimizer.state.<name>.<state>                 as get_optimizer_state_dict names them with flatten_optimizer_state_dict
optimizer.param_groups.<name>.<setting>
"""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.export import check_empty
from parallel3d.checkpoint.format import MODEL, OPTIMIZER, TrainingState, sources
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.values import decode
from parallel3d.checkpoint.whole import WholeCheckpoint
from parallel3d.errors import CheckpointError

_METADATA = ".metadata"
_OPTIMIZER = re.compile(r"optim\w*\.(state|param_groups)\.(.+)\.(\w+)")
# Settings of torch's groups that concern how a process computes; a checkpoint here has none.
_UNSET = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
# Classes and functions that a metadata file may name, besides dtypes and layouts.
_CLASSES = {
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
}


def is_dcp(directory: Path) -> bool:
    """Return whether a directory holds a checkpoint of torch.distributed.checkpoint."""
    return (directory / _METADATA).is_file()


def export_dcp(checkpoint: Path, directory: Path) -> None:
    """Write the weights and the optimizer's state of a checkpoint. Raises CheckpointError, and has then written nothing."""
    if problem := check_empty(directory):
        raise CheckpointError(problem)
    from torch.distributed.checkpoint import CheckpointException, save  # they take a second to import

    reader = Reader(checkpoint)
    TrainingState.check(reader.manifest, checkpoint)
    optimizer: dict[str, Any] = {}
    model = {name: reader.read(source) for name, source in sources(reader.tensors).items()}
    copies = reader.manifest.state.get("copies", {})
    model |= {copy: model[name] for copy, name in copies.items() if name in model}
    for source in (name for name in reader.tensors if name.startswith(OPTIMIZER)):
        _, key, name = source.split("/", 2)
        optimizer[f"state.{name}.{key}"] = reader.read(source)
    for group in reader.manifest.state["optimizer"]["groups"]:
        settings = {**_UNSET, **decode(group["settings"], reader.read)}
        optimizer |= {f"param_groups.{name}.{key}": value for name in group["names"] for key, value in settings.items()}
    try:
        save({"model": model, "optimizer": optimizer}, checkpoint_id=directory, no_dist=True)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise CheckpointError(f"{directory} can't be written: {error}; free space, or write elsewhere") from error


class _Metadata(pickle.Unpickler):
    """Reads a file of metadata, and refuses any class or function that such a file does not need."""

    def find_class(self, module: str, name: str) -> Any:
        value = getattr(torch, name, None) if module == "torch" else None
        if name in _CLASSES.get(module, ()) or isinstance(value, (torch.dtype, torch.layout)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_dcp(directory: Path, weights_only: bool = False) -> WholeCheckpoint:
    """Read weights and the optimizer's tensors; its settings, which are pickled, stay the new engine's.

    Names are as in export_dcp; weights may also be outside of "model", as torchtitan saves them. weights_only: leave out the
    optimizer's state. Raises CheckpointError.
    """
    from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        with (directory / _METADATA).open("rb") as file:
            _Metadata(file).load()  # checked before torch loads the file, which would execute what it names
        reader = FileSystemReader(directory)
        metadata = reader.read_metadata()
        # name -> its keys, one in each of the nested mappings that were saved
        paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        found: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        load(found, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        raise CheckpointError(f"{directory} can't be read as torch.distributed.checkpoint's: {error}") from error
    # Names inside the mapping "model", not those of a model whose own names begin with "model.", as Hugging Face's do.
    wrapped = {name for name in found if name.startswith("model.") and paths.get(name, ["model"])[0] == "model"}
    prefix, tensors = "model." if wrapped else "", {}
    for name, value in found.items():
        if match := _OPTIMIZER.fullmatch(name):
            if match[1] == "state" and not weights_only:
                tensors[f"{OPTIMIZER}{match[3]}/{match[2]}"] = value
        elif name in wrapped or not wrapped:
            tensors[MODEL + name.removeprefix(prefix)] = value
        else:
            raise CheckpointError(
                f'{directory} has weights {prefix}* and {name!r}; save them as {{"model": model.state_dict()}}, and no other '
                "tensors but the optimizer's"
            )
    trained = sorted({name.split("/", 2)[2] for name in tensors if name.startswith(OPTIMIZER)})
    if unknown := [name for name in trained if MODEL + name not in tensors]:
        raise CheckpointError(
            f"{directory} has optimizer state of {unknown[0]!r}, which is not a weight there; save what "
            "torch.distributed.checkpoint.state_dict.get_state_dict returns, whose names are the weights'"
        )
    steps = [int(value) for name, value in tensors.items() if name.startswith(f"{OPTIMIZER}step/")]
    counters = {"global_steps": max(steps, default=0), "global_samples": 0, "skipped_steps": 0}
    groups = [{"names": trained, "settings": {}, "place": 0}] if trained else []
    return WholeCheckpoint(tensors, [groups], "AdamW", counters)
