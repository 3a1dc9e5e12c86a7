"""Saving: all ranks agree on who writes what, write, and agree that all is there; only then the checkpoint gets its name."""

from __future__ import annotations

import atexit
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.directory import begin, check_tag, commit, keep_newest, set_latest, write_file
from parallel3d.checkpoint.format import MANIFEST, Manifest, StoredBox, StoredFile, StoredTensor, manifest_text
from parallel3d.checkpoint.parts import Part
from parallel3d.checkpoint.plan import assign
from parallel3d.checkpoint.write import to_host, write_parts
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.config import CheckpointConfig
from parallel3d.errors import CheckpointError

Json = dict[str, Any]
# So long a process that ends by an exception waits for what it saves.
_LONGEST_FAILING_S = 20.0


@dataclass(frozen=True)
class Contents:
    """A rank's contribution to a checkpoint: its parts, and its own mapping of JSON values."""

    parts: Sequence[Part]
    own: Json


# From every rank's own mapping to what the manifest says of all, and of each.
Summarize = Callable[[list[Json]], tuple[Json, list[Json]]]


@dataclass(frozen=True)
class _Job:
    """A write under way. directory: where it is written; save_dir, tag: where it goes afterwards."""

    save_dir: Path
    tag: str
    directory: Path
    latest: bool
    parts: Sequence[Part]
    own: Json
    summarize: Summarize


class Saver:
    """Saves checkpoints of one engine, one after the other; settings: the configuration's section."""

    def __init__(self, decision: CollectiveDecision, settings: CheckpointConfig):
        self._decision, self._settings = decision, settings
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._waits_at_exit = False

    def save(
        self, save_dir: Path, tag: str, latest: bool, collect: Callable[[], Contents], summarize: Summarize
    ) -> None:
        """Save what `collect` returns; with async_save, from a copy that is taken before this returns. Collective.

        Raises CheckpointError on all ranks, now or, of what failed later, at the next save or wait.
        """
        self.wait()
        contents: list[Contents] = []

        def offer() -> Json:
            contents.append(collect())
            offers = [(p.name, p.box.start, p.box.shape, p.values.nbytes) for p in contents[0].parts]
            return {"tag": tag, "directory": str(save_dir.absolute()), "offers": offers}

        plan = self._decision.attempt("save_checkpoint", offer, self._plan)
        parts = [contents[0].parts[k] for k in plan["writes"]]
        directory = Path(plan["directory"])
        job = _Job(directory.parent, plan["tag"], directory, latest, parts, contents[0].own, summarize)
        if not self._settings.async_save:
            self._write(job, may_thread=True)
            return
        error: Exception | None = None
        try:
            parts = to_host(parts, copied=True)
        except Exception as raised:  # memory ran out: the others must be told, by the thread
            error = raised
        job = _Job(job.save_dir, job.tag, directory, latest, parts, job.own, summarize)
        if not self._waits_at_exit:
            atexit.register(self._wait_at_exit)
            self._waits_at_exit = True
        self._thread = threading.Thread(
            target=self._write_later, args=(job, error), name="parallel3d saves", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when what was to be saved is on the disk. Raises the CheckpointError of a save that failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_at_exit(self) -> None:
        """Let the process end when its checkpoint is on the disk. One that fails may have lost ranks: then not for long."""
        if self._thread is not None:
            self._thread.join(_LONGEST_FAILING_S if hasattr(sys, "last_value") else None)

    def _plan(self, values: list[Json]) -> list[Json]:
        tag, directory = values[0]["tag"], Path(values[0]["directory"])
        others = {rank: item["tag"] for rank, item in enumerate(values) if item["tag"] != tag}
        if others and self._settings.tag_validation != "Ignore":
            rank, other = next(iter(others.items()))
            message = f"save_checkpoint: the tag is {tag!r} on rank 0 and {other!r} on rank {rank}; give one tag on all"
            if self._settings.tag_validation == "Fail":
                raise CheckpointError(message)
            warnings.warn(f"{message}; rank 0's is used", stacklevel=2)
        tag = check_tag(tag)
        writes = assign([item["offers"] for item in values])
        try:
            written = begin(directory, tag)
        except OSError as error:
            raise CheckpointError(f"{directory / tag} can't be written: {error}; save to another directory") from error
        return [{"tag": tag, "directory": str(written), "writes": own} for own in writes]

    def _write_later(self, job: _Job, error: Exception | None) -> None:
        try:
            self._write(job, may_thread=False, error=error)
        except Exception as raised:
            self._error = raised
            # At once too: the next save, which raises it, may never come.
            warnings.warn(f"checkpoint {job.tag!r} was not saved: {raised}", stacklevel=2)

    def _write(self, job: _Job, may_thread: bool, error: Exception | None = None) -> None:
        def write() -> Json:
            if error is not None:
                raise error
            if not job.directory.is_dir():
                raise CheckpointError(f"{job.directory} is not there: save to a directory that all hosts share")
            files, tensors = write_parts(job.directory, self._decision.rank, job.parts, may_thread)
            return {
                "files": {name: file.model_dump() for name, file in files.items()},
                "tensors": {name: tensor.model_dump(mode="json") for name, tensor in tensors.items()},
                "own": job.own,
            }

        try:
            self._decision.attempt(f"save_checkpoint, tag {job.tag!r}", write, lambda values: self._finish(job, values))
        except BaseException:
            if self._decision.rank == 0:
                shutil.rmtree(job.directory, ignore_errors=True)
            raise

    def _finish(self, job: _Job, values: list[Json]) -> list[None]:
        """On the first rank: everything is on the disk."""
        state, ranks = job.summarize([item["own"] for item in values])
        files = {name: StoredFile(**file) for item in values for name, file in item["files"].items()}
        manifest = Manifest(
            tag=job.tag,
            saved=time.time(),
            latest=job.latest,
            files=files,
            tensors=_merged([item["tensors"] for item in values]),
            state=state,
            ranks=ranks,
        )
        try:
            for name, file in files.items():
                if (job.directory / name).stat().st_size != file.num_bytes:
                    raise OSError(f"rank 0 finds {job.directory / name} shorter than it was written")
            write_file(job.directory / MANIFEST, manifest_text(manifest))
            commit(job.directory, job.save_dir, job.tag)
            if job.latest:
                set_latest(job.save_dir, job.tag)
        except OSError as error:
            raise CheckpointError(
                f"{job.save_dir / job.tag} can't be written: {error}; what was saved before is as it was"
            ) from error
        if job.latest and self._settings.keep_last is not None:
            try:
                keep_newest(job.save_dir, self._settings.keep_last)
            except OSError as error:
                warnings.warn(f"older checkpoints can't be removed from {job.save_dir}: {error}", stacklevel=2)
        return [None] * len(values)


def _merged(everyone: Sequence[Json]) -> dict[str, StoredTensor]:
    boxes: dict[str, list[StoredBox]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, tensors in enumerate(everyone):
        for name, tensor in tensors.items():
            kind = (tensor["dtype"], tuple(tensor["shape"]))
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(
                    f"tensor {name} is {kind} on rank {rank} and {kinds[name]} on another; make them alike"
                )
            boxes.setdefault(name, []).extend(StoredBox(**box) for box in tensor["boxes"])
    return {name: StoredTensor(dtype=kind[0], shape=kind[1], boxes=tuple(boxes[name])) for name, kind in kinds.items()}
