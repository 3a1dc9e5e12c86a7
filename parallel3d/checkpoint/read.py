"""Reading of the stored boxes that a rank's boxes overlap, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel3d.checkpoint.boxes import Box, whole_box
from parallel3d.checkpoint.format import MANIFEST, Manifest, StoredBox, StoredTensor, read_manifest
from parallel3d.checkpoint.write import checksum, stored_file
from parallel3d.errors import CheckpointError


def open_safetensors(path: Path) -> Any:
    """A file of tensors, of which none is read yet. Raises CheckpointError, also for a pickle of that name."""
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error


class Reader:
    """The tensors of a checkpoint's directory, by name. Raises CheckpointError where the manifest is damaged.

    Of a file nothing is read before its size and header were found to be what the manifest says, of a box nothing before
    its checksum was: all else is a CheckpointError that names the file.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest: Manifest = read_manifest(directory)
        self._files: dict[str, Any] = {}
        self._verified: set[tuple[str, str]] = set()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The stored tensors, by name."""
        return self.manifest.tensors

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, on the host."""
        stored = self.tensors[name]
        box = box or whole_box(stored.shape)
        values = torch.empty(box.shape, dtype=stored.torch_dtype, device="cpu")
        self.read_into(name, box, values)
        return values

    @torch.no_grad()
    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor into `target` [box.shape], in whatever dtype and on whatever device that is."""
        for stored, common in self._sources(name, box):
            self._verify(stored)
            values = self._values(stored, common)
            target[common.slices(box.start)].copy_(values)

    def verify(self, name: str, box: Box | None = None) -> None:
        """Read what `read` would, and compare it with its checksums."""
        for stored, _ in self._sources(name, box or whole_box(self.tensors[name].shape)):
            self._verify(stored)

    def verify_all(self) -> Iterator[str]:
        """Verify everything there is; yields what is wrong, a line each."""
        for name in self.manifest.files:
            try:
                self._open(name)
            except CheckpointError as error:
                yield str(error)
        for name in self.tensors:
            try:
                self.verify(name)
            except CheckpointError as error:
                yield str(error)

    def _sources(self, name: str, box: Box) -> Iterable[tuple[StoredBox, Box]]:
        """The stored boxes that hold `box`, each with what they have in common with it."""
        found, missing = [], [box] if box.numel else []
        for stored in self.tensors[name].boxes:
            common = stored.box.common(box)
            # Of boxes that overlap, as slices of a head that several ranks share do, one is enough.
            if common is not None and any(rest.common(common) for rest in missing):
                found.append((stored, common))
                missing = [piece for rest in missing for piece in rest.without(common)]
        if missing:
            raise CheckpointError(f"{self.directory / MANIFEST} names no file for {missing[0]} of tensor {name}")
        return found

    def _values(self, stored: StoredBox, box: Box) -> Tensor:
        try:
            if box == stored.box:
                values: Tensor = self._open(stored.file).get_tensor(stored.key)
                return values
            part: Tensor = self._open(stored.file).get_slice(stored.key)[box.slices(stored.start)]
            return part
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory / stored.file} can't be read: {error}") from error

    def _verify(self, stored: StoredBox) -> None:
        if (stored.file, stored.key) in self._verified:
            return
        values = self._values(stored, stored.box)
        if tuple(values.shape) != stored.shape or checksum(values) != stored.crc32:
            raise CheckpointError(
                f"{self.directory / stored.file} is damaged: tensor {stored.key} is not what was written"
            )
        self._verified.add((stored.file, stored.key))

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path, wanted = self.directory / name, self.manifest.files.get(name)
            try:
                found = stored_file(path)
            except FileNotFoundError:
                raise CheckpointError(f"{path} is missing") from None
            except OSError as error:
                raise CheckpointError(f"{path} can't be read: {error}") from error
            if found != wanted:
                raise CheckpointError(
                    f"{path} is damaged: it was cut short, replaced or changed since it was written ({found}, not {wanted})"
                )
            self._files[name] = open_safetensors(path)
        return self._files[name]
