"""Format of a checkpoint: safetensors files of boxes, and a manifest of which box of which tensor is in which file.

    <save_dir>/latest                              the tag of the last one
    <save_dir>/<tag>/manifest.json                 this module's Manifest, with its own checksum
    <save_dir>/<tag>/rank00000-00.safetensors      boxes, as each rank held them

Tensors go by their names in the whole model, whatever the layout: "model/<name>", in the dtype that layers compute with;
"master/<name>", where the optimizer updates a wider copy; "optimizer/<state>/<name>"; and what a value held, see values.py.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from torch import Tensor

from parallel3d.checkpoint.boxes import Box
from parallel3d.errors import CheckpointError

MANIFEST = "manifest.json"
MODEL, MASTER, OPTIMIZER = "model/", "master/", "optimizer/"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredBox(_Record):
    """Stored box of a tensor: tensor `key` of a file, whose bytes have this checksum."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str
    crc32: int

    @property
    def box(self) -> Box:
        """Position and shape in the tensor."""
        return Box(self.start, self.shape)


class StoredTensor(_Record):
    """Stored tensor. Its boxes hold each element at least once, and the same values where they overlap."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is no dtype of torch's")
        return name

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class StoredFile(_Record):
    """Size of a file, and the checksum of its header, which precedes the tensors' bytes."""

    num_bytes: int
    header_crc32: int


class Manifest(_Record):
    """Description of a checkpoint: everything but the values of its tensors.

    saved: seconds since 1970; latest: whether `latest` was to name it; ranks: what each rank of the world that saved had of
    its own; state: what is one for all.
    """

    format: Literal["parallel3d checkpoint"] = "parallel3d checkpoint"
    version: Literal[1] = 1
    tag: str
    saved: float
    latest: bool
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]

    @field_validator("files")
    @classmethod
    def _plain(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise ValueError(f"{outside[0]!r} is no name of a file in the directory")
        return files


def checksum(values: Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(values.detach().reshape(-1).view(torch.uint8).numpy().data)


def stored_file(path: Path) -> StoredFile:
    """Return the manifest's entry for a file. Raises OSError."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return StoredFile(num_bytes=path.stat().st_size, header_crc32=zlib.crc32(length + header))


def manifest_text(manifest: Manifest) -> str:
    """Return the manifest as JSON, with a checksum of its other entries."""
    body = manifest.model_dump(mode="json", exclude={"state", "ranks"})
    body |= {"state": manifest.state, "ranks": manifest.ranks}  # as they are: pydantic would make null of inf
    return json.dumps({"crc32": _checksum(body), **body})


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a checkpoint's directory. Raises CheckpointError if it is missing or damaged."""
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_bytes())
        crc32 = body.pop("crc32") if isinstance(body, dict) else None
        if crc32 is None or crc32 != _checksum(body):
            raise CheckpointError(f"{path} is damaged: its checksum is not what was written")
        return Manifest.model_validate(body)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is no complete checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    except (ValidationError, RecursionError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged, or of another version: {error}") from error
