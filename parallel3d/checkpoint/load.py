"""Loading: all ranks find the same checkpoint, check all that they will read, and only then change what they hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import check_complete, find, latest_tag, other_tags
from parallel3d.checkpoint.format import MODEL
from parallel3d.checkpoint.parts import Part
from parallel3d.checkpoint.read import Reader
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.errors import CheckpointError

# How many names a message lists of each kind.
_MOST = 20


@dataclass
class Wanted:
    """The parts that a rank wants to read, and those that are missing or differ; `known` are the model's tensors.

    targets: each with the name of the stored tensor that it is read from. misshapen: name -> (expected, found).
    """

    targets: list[tuple[str, Part]] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def add(self, reader: Reader, part: Part, source: str | None = None) -> None:
        """A part, to be read from the tensor `source`, by default the one of its name."""
        source = source or part.name
        if source not in reader.tensors:
            self.missing.append(source)
        elif reader.tensors[source].shape != part.shape:
            self.misshapen[source] = (part.shape, reader.tensors[source].shape)
        else:
            self.targets.append((source, part))


def find_checkpoint(decision: CollectiveDecision, load_dir: Path, tag: str | None) -> Path | None:
    """The directory of the tag, or of the one that `latest` names; None, with a warning, without either. Collective.

    Raises CheckpointError, with what can be loaded instead, for what is not there or not complete.
    """

    def decide(values: list[dict[str, Any]]) -> list[str | None]:
        place, chosen = Path(values[0]["directory"]), values[0]["tag"]
        if chosen is None:
            chosen = latest_tag(place)
        if chosen is None:
            return [None] * len(values)
        path = find(place, chosen)
        try:
            check_complete(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{other_tags(place, chosen)}") from None
        return [str(path)] * len(values)

    value = {"directory": str(load_dir.absolute()), "tag": None if tag is None else str(tag)}
    path = decision.make("load_checkpoint", value, decide)
    if path is None and decision.rank == 0:
        warnings.warn(
            f"nothing is loaded: there is no {load_dir / 'latest'}; save there first, or give a tag", stacklevel=4
        )
    return None if path is None else Path(path)


def agree_to_read(decision: CollectiveDecision, reader: Reader, wanted: Wanted, strict: bool) -> None:
    """Verify all that this rank will read, and that the checkpoint holds what the model does. Collective.

    Raises CheckpointError on all ranks that lists what is missing, extra or of another shape; without `strict` it warns.
    """

    def check() -> dict[str, Any]:
        try:
            for source, part in wanted.targets:
                reader.verify(source, part.box)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{other_tags(reader.directory.parent, reader.directory.name)}") from None
        return {
            "known": sorted(set(wanted.known)),
            "missing": sorted(set(wanted.missing)),
            "misshapen": wanted.misshapen,
        }

    def decide(values: list[dict[str, Any]]) -> list[None]:
        told = _differences(values, (name for name in reader.tensors if name.startswith(MODEL)))
        if told and strict:
            raise CheckpointError(f"{reader.directory} doesn't fit the model: {told}; strict=False loads what fits")
        if told:
            warnings.warn(f"{reader.directory} fits the model in part: {told}", stacklevel=4)
        return [None] * len(values)

    decision.attempt("load_checkpoint, checking tensors", check, decide)


def _differences(values: Sequence[dict[str, Any]], stored: Iterable[str]) -> str:
    known = {name for item in values for name in item["known"]}
    misshapen = {name: shapes for item in values for name, shapes in item["misshapen"].items()}
    kinds = {
        "missing": sorted({name for item in values for name in item["missing"]}),
        "not known to the model": sorted(set(stored) - known),
        "of another shape": [
            f"{name} is {list(found)}, not {list(want)}" for name, (want, found) in sorted(misshapen.items())
        ],
    }
    return "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
