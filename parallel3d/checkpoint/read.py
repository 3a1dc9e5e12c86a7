"""Reading: all ranks find the same checkpoint and verify all that they will read, before any rank changes its state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel3d.checkpoint.boxes import Box, whole_box
from parallel3d.checkpoint.directory import check_complete, find, latest_tag, naming_others
from parallel3d.checkpoint.format import MANIFEST, MODEL, StoredBox, StoredTensor, checksum, read_manifest, stored_file
from parallel3d.checkpoint.parts import Part
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.errors import CheckpointError

# Maximum number of names of each kind that a message lists.
_MOST = 20
# Maximum number of pairs of boxes that are compared for one read: 32 replicas of 64 tensor-parallel shards take as many.
_MOST_COMPARED = 10**6


def open_safetensors(path: Path) -> Any:
    """Open a file of tensors without reading any. Raises CheckpointError, also for a pickle of that name."""
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error


class Reader:
    """Reader of the tensors in a checkpoint's directory, by name. Raises CheckpointError where the manifest is damaged.

    Before a file is read, its size and header are compared with the manifest, and the checksum of each box before its use. If
    they differ, a CheckpointError names the file.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._files: dict[str, Any] = {}
        self._verified: set[StoredBox] = set()

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The stored tensors, by name."""
        return self.manifest.tensors

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor, or all of it, on the host."""
        stored = self.tensors[name]
        box = box or whole_box(stored.shape)
        self.verify(name, box)  # before memory is taken for a shape that the files may not have
        values = torch.empty(box.shape, dtype=stored.torch_dtype, device="cpu")
        self.read_into(name, box, values)
        return values

    @torch.no_grad()
    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copy a box of a tensor into `target` [box.shape], of any dtype and on any device."""
        for stored, common in self._sources(name, box):
            self._verify(stored)
            target[common.slices(box.start)].copy_(self._values(stored, common))

    def verify(self, name: str, box: Box | None = None) -> None:
        """Read the stored boxes that `read` would, and compare them with their checksums."""
        for stored, _ in self._sources(name, box or whole_box(self.tensors[name].shape)):
            self._verify(stored)

    def verify_all(self) -> Iterator[str]:
        """Verify all files and tensors; yield a line for each fault."""
        checks = [(self._open, name) for name in self.manifest.files] + [(self.verify, name) for name in self.tensors]
        for check, name in checks:
            try:
                check(name)
            except CheckpointError as error:
                yield str(error)

    def _sources(self, name: str, box: Box) -> Iterable[tuple[StoredBox, Box]]:
        """Return the stored boxes that hold `box`, each with its intersection with it."""
        found, missing, compared = [], [box] if box.numel else [], 0
        pairs = [
            (stored, common) for stored in self.tensors[name].boxes if (common := stored.box.common(box)) is not None
        ]
        for stored, common in sorted(pairs, key=lambda pair: pair[1].start):
            # No later box has an element before this start. Many gaps would make the list of missing boxes long.
            if any(rest.start < common.start for rest in missing):
                break
            compared += len(missing)
            if compared > _MOST_COMPARED:
                raise CheckpointError(
                    f"{self.directory / MANIFEST} has too irregular a division of tensor {name} into {len(pairs)} boxes"
                )
            left = [part for rest in missing for part in rest.without(common)]
            # Boxes may overlap, like those of a head that several ranks share; one of them is enough.
            if left != missing:
                found.append((stored, common))
                missing = left
        if missing:
            element = min(rest.start for rest in missing)
            raise CheckpointError(f"{self.directory / MANIFEST} names no file for element {element} of tensor {name}")
        return found

    def _values(self, stored: StoredBox, box: Box) -> Tensor:
        file = self._open(stored.file)
        try:
            values: Tensor
            if box == stored.box:
                values = file.get_tensor(stored.key)
            else:
                values = file.get_slice(stored.key)[box.slices(stored.start)]
            return values
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory / stored.file} can't be read: {error}") from error

    def _verify(self, stored: StoredBox) -> None:
        if stored in self._verified:
            return
        values = self._values(stored, stored.box)
        if tuple(values.shape) != stored.shape or checksum(values) != stored.crc32:
            raise CheckpointError(
                f"{self.directory / stored.file} is damaged: tensor {stored.key} is not what was written"
            )
        self._verified.add(stored)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path, wanted = self.directory / name, self.manifest.files.get(name)
            try:
                found = stored_file(path) if path.is_file() or not path.exists() else None
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


# Name of a tensor -> (expected shape, stored shape).
Misshapen = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class Wanted:
    """Parts that a rank wants to read, and those that are missing or have another shape.

    - parts: each has the name of the stored tensor that it is read from.
    - known: names of the model's tensors.
    """

    parts: list[Part] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def add(self, reader: Reader, parts: Iterable[Part]) -> None:
        """Add parts, each to be read from the tensor of its name."""
        for part in parts:
            if part.name not in reader.tensors:
                self.missing.add(part.name)
            elif reader.tensors[part.name].shape != part.shape:
                self.misshapen[part.name] = (part.shape, reader.tensors[part.name].shape)
            else:
                self.parts.append(part)


def find_checkpoint(decision: CollectiveDecision, load_dir: Path, tag: str | None) -> Path | None:
    """Return the directory of the tag, or of the one that `latest` names; None, with a warning, without either. Collective.

    Raises CheckpointError, with what can be loaded instead, for what is not there or not complete.
    """

    def decide(values: list[dict[str, Any]]) -> list[str | None]:
        place = Path(values[0]["directory"])
        chosen = latest_tag(place) if values[0]["tag"] is None else values[0]["tag"]
        if chosen is None:
            return [None] * len(values)
        if not chosen and values[0]["tag"] is None:
            raise CheckpointError(f"{place / 'latest'} is empty; give load_checkpoint a tag, or call engine.resume")
        path = find(place, chosen)
        with naming_others(place, chosen):
            check_complete(path)
        return [str(path)] * len(values)

    path = decision.make("load_checkpoint", {"directory": str(load_dir.absolute()), "tag": tag}, decide)
    if path is None and decision.rank == 0:
        warnings.warn(
            f"nothing is loaded: there is no {load_dir / 'latest'}; save there first, or give a tag", stacklevel=5
        )
    return None if path is None else Path(path)


def agree_to_read(decision: CollectiveDecision, reader: Reader, wanted: Wanted, strict: bool) -> None:
    """Verify all that this rank will read, and that the checkpoint holds what the model does. Collective.

    Raises CheckpointError on all ranks that lists what is missing, extra or of another shape; without `strict` it warns.
    """

    def check() -> dict[str, Any]:
        with naming_others(reader.directory.parent, reader.directory.name):
            for part in wanted.parts:
                reader.verify(part.name, part.box)
        return {"known": list(wanted.known), "missing": list(wanted.missing), "misshapen": wanted.misshapen}

    def decide(values: list[dict[str, Any]]) -> list[None]:
        known, missing = ({name for item in values for name in item[key]} for key in ("known", "missing"))
        unknown = {name for name in reader.tensors if name.startswith(MODEL)} - known
        faults = differences(
            missing, unknown, {k: shapes for item in values for k, shapes in item["misshapen"].items()}
        )
        if faults and strict:
            raise CheckpointError(
                f"{reader.directory} doesn't fit the model: {faults}; build the model that was saved, or load what fits by "
                "load_checkpoint(..., strict=False)"
            )
        if faults:
            warnings.warn(f"{reader.directory} fits the model in part: {faults}", stacklevel=4)
        return [None] * len(values)

    decision.attempt("load_checkpoint, checking tensors", check, decide)


def differences(missing: Iterable[str], unknown: Iterable[str], misshapen: Misshapen) -> str:
    """Describe how stored tensors differ from those of a model; empty if they don't."""
    kinds = {
        "missing": sorted(missing),
        "not known to the model": sorted(unknown),
        "of another shape": [
            f"{name} is {list(found)}, not {list(wanted)}" for name, (wanted, found) in sorted(misshapen.items())
        ],
    }
    return "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
