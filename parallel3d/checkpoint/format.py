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
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from parallel3d.checkpoint.boxes import Box
from parallel3d.errors import CheckpointError

MANIFEST = "manifest.json"
VERSION = 1
_MOST_BYTES = 2**30  # of a manifest
MODEL, MASTER, OPTIMIZER = "model/", "master/", "optimizer/"


def sources(stored: Collection[str], masters: bool = True) -> dict[str, str]:
    """Return model name -> stored name of each weight or buffer; with `masters`, of its master where there is one."""
    prefixes = (MODEL, MASTER) if masters else (MODEL,)
    return {name.removeprefix(prefix): name for prefix in prefixes for name in stored if name.startswith(prefix)}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_Lengths = tuple[Annotated[int, Field(ge=0, lt=2**62)], ...]


class StoredBox(_Record):
    """Stored box of a tensor: tensor `key` of a file, whose bytes have this checksum."""

    start: _Lengths
    shape: _Lengths
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
    shape: _Lengths
    boxes: tuple[StoredBox, ...]

    @field_validator("dtype")
    @classmethod
    def _known(cls, name: str) -> str:
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is not a torch dtype")
        return name

    @model_validator(mode="after")
    def _inside(self) -> StoredTensor:
        for box in self.boxes:
            ends = zip(box.start, box.shape, self.shape, strict=False)
            if not len(box.start) == len(box.shape) == len(self.shape) or any(a + n > most for a, n, most in ends):
                raise ValueError(
                    f"a box from {box.start} of shape {box.shape} is not in a tensor of shape {self.shape}"
                )
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class StoredFile(_Record):
    """Size of a file, and the checksum of its header, which precedes the tensors' bytes."""

    num_bytes: int = Field(ge=0, lt=2**62)
    header_crc32: int


class _StoredOptimizer(_Record):
    type: str
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]


class TrainingState(_Record):
    """State of a training that all ranks share, stored in a manifest's `state`; values are encoded by values.py.

    layout: ranks along each axis; streams: seeds of the random streams; left_out: names of frozen parameters that were not
    saved; huggingface: names of the weights there; copies: tied parameters of a module, by the names they are stored under;
    extra: what get_extra_state of the first replica's modules returned, by its names in a state_dict.
    """

    layout: dict[Literal["pipe", "data", "model"], Annotated[int, Field(gt=0)]]
    counters: dict[str, int]
    loss_scaler: dict[str, Any] | None
    streams: dict[str, list[int]]
    lr_scheduler: Any
    client_state: dict[str, Any]
    optimizer: _StoredOptimizer
    left_out: list[str]
    huggingface: dict[str, Any] | None
    copies: dict[str, str] = Field(default_factory=dict)
    extra: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def check(cls, manifest: Manifest, path: Path) -> None:
        """Raise CheckpointError if a manifest is not that of a training."""
        try:
            cls.model_validate(manifest.state)
        except ValidationError as error:
            raise CheckpointError(f"{path / MANIFEST} is not of a training: {error}") from error
        keys = {"generators", "data", "replica"}
        if not manifest.ranks or any(rank.keys() != keys for rank in manifest.ranks):
            raise CheckpointError(f"{path / MANIFEST} is not of a training: each rank has {', '.join(sorted(keys))}")


class Manifest(_Record):
    """Description of a checkpoint: everything but the values of its tensors.

    order: its position among the saves into its directory, which does not depend on the clock; saved: time of the save, in
    seconds since 1970; latest: whether it was saved as the latest; ranks: the own state of each rank that saved; state: the
    state that all ranks share.
    """

    format: Literal["parallel3d checkpoint"] = "parallel3d checkpoint"
    version: Literal[1] = 1
    order: int = Field(0, ge=0, lt=10**15)
    tag: str
    saved: float = Field(ge=0, lt=2**36)
    latest: bool
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    state: dict[str, Any]
    ranks: list[dict[str, Any]]

    @field_validator("files")
    @classmethod
    def _plain(cls, files: dict[str, StoredFile]) -> dict[str, StoredFile]:
        outside = [name for name in files if Path(name).name != name or not name.isprintable()]
        if outside:
            raise ValueError(f"{outside[0]!r} is not the name of a file in the directory")
        return files

    @model_validator(mode="after")
    def _listed(self) -> Manifest:
        unknown = {box.file for tensor in self.tensors.values() for box in tensor.boxes} - self.files.keys()
        if unknown:
            raise ValueError(f"a box is in {min(unknown)!r}, which is not among the files")
        return self


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
        if path.stat().st_size > _MOST_BYTES or not path.is_file():
            raise CheckpointError(f"{path} is damaged: it is not a file of at most {_MOST_BYTES} bytes")
        body = json.loads(path.read_bytes())
        crc32 = body.pop("crc32") if isinstance(body, dict) else None
        if crc32 is None or crc32 != _checksum(body):
            raise CheckpointError(f"{path} is damaged: its checksum is not what was written")
        if body.get("version", VERSION) != VERSION:
            raise CheckpointError(
                f"{path} has format version {body['version']}, and this parallel3d reads version {VERSION}; install the "
                "version that wrote it"
            )
        return Manifest.model_validate(body)
    except FileNotFoundError:
        foreign = any(directory.glob("*_states.pt")) or (directory / ".metadata").is_file()
        remedy = (
            f"; `p3d ckpt import {directory} DIRECTORY` makes one of DeepSpeed's or torch's files" if foreign else ""
        )
        raise CheckpointError(f"{directory} is not a complete checkpoint: it has no {MANIFEST}{remedy}") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    except (ValidationError, RecursionError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged, or of another version: {error}") from error
