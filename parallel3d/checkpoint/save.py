"""Saving: all ranks agree which of them writes which tensors, write them, and agree that all are written; then the checkpoint
gets its name.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.directory import PendingSave, check_tag, sync
from parallel3d.checkpoint.format import Manifest, checksum, stored_file
from parallel3d.checkpoint.parts import Part
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.config import CheckpointConfig
from parallel3d.errors import CheckpointError
from parallel3d.logs import logger

Json = dict[str, Any]
# How long a process that ends by an exception waits for what it saves.
_LONGEST_FAILING_S = 20.0
# Bytes of one file, which are copied from the device at once.
_FILE_BYTES = 2 << 30
# Every rank's mapping -> (the manifest's state of all ranks, the state of each).
Summarize = Callable[[list[Json]], tuple[Json, list[Json]]]


@dataclass(frozen=True)
class _Job:
    """Checkpoint that is being written.

    - directory: where it is written, next to where it goes afterwards.
    - own: this rank's own mapping of JSON values.
    - error: why this rank can't write its parts.
    """

    directory: Path
    tag: str
    latest: bool
    parts: Sequence[Part]
    own: Json
    summarize: Summarize
    error: Exception | None = None


class Saver:
    """Saves checkpoints of one engine, one after the other; settings: the configuration's section."""

    def __init__(self, decision: CollectiveDecision, settings: CheckpointConfig):
        self._decision, self._settings = decision, settings
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pending: PendingSave | None = None  # on rank 0
        if settings.async_save:
            # Handlers run in reverse order: this one after that which waits, and after those of the script.
            atexit.register(self._fail_at_exit)

    def save(
        self,
        save_dir: Path,
        tag: str,
        latest: bool,
        collect: Callable[[], tuple[Sequence[Part], Json]],
        summarize: Summarize,
    ) -> None:
        """Save this rank's parts and its mapping, which `collect` returns. Collective.

        With async_save a copy is made before this returns, and written later.
        Raises CheckpointError on all ranks, now or, of what failed later, at the next save or wait.
        """
        self.wait()
        parts: Sequence[Part] = ()
        own: Json = {}

        def offer() -> Json:
            nonlocal parts, own
            parts, own = collect()
            boxes = [(p.name, p.box.start, p.box.shape, p.values.nbytes) for p in parts]
            return {"tag": tag, "directory": str(save_dir.absolute()), "offers": boxes}

        plan = self._decision.attempt("save_checkpoint", offer, self._plan)
        job = _Job(Path(plan["directory"]), plan["tag"], latest, [parts[k] for k in plan["writes"]], own, summarize)
        if not self._settings.async_save:
            self._write(job, may_thread=True)
            return
        try:
            job = replace(job, parts=to_host(job.parts, copied=True))
        except Exception as raised:  # memory ran out: the thread lets the other ranks know
            job = replace(job, error=raised)
        atexit.unregister(self._wait_at_exit)
        atexit.register(self._wait_at_exit)
        self._thread = threading.Thread(target=self._write_later, args=(job,), name="parallel3d saves", daemon=True)
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
        """Wait at exit until the checkpoint is on the disk; only briefly after an exception, as other ranks may be gone."""
        if self._thread is not None:
            fails = not isinstance(getattr(sys, "last_value", None), SystemExit | None)
            self._thread.join(_LONGEST_FAILING_S if fails else None)

    def _fail_at_exit(self) -> None:
        """End the process with exit code 1 if its last save failed, which no later call has raised."""
        if self._error is not None:
            logger.error("parallel3d: exit code 1, as the last checkpoint was not saved: %s", self._error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # Python has no other way to change its exit code now

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
        self._end_pending()  # of a save that some rank has given up
        try:
            self._pending = PendingSave(directory, tag)
        except OSError as error:
            raise CheckpointError(f"{directory / tag} can't be written: {error}; save to another directory") from error
        return [{"tag": tag, "directory": str(self._pending.path), "writes": own} for own in writes]

    def _write_later(self, job: _Job) -> None:
        try:
            self._write(job, may_thread=False)
        except Exception as raised:
            self._error = raised
            # Warn at once, because the next save, which raises the error, may never come.
            warnings.warn(f"checkpoint {job.tag!r} was not saved: {raised}", stacklevel=2)

    def _write(self, job: _Job, may_thread: bool) -> None:
        def write() -> Json:
            if job.error is not None:
                raise job.error
            if not job.directory.is_dir():
                raise CheckpointError(f"{job.directory} is not there: save to a directory that all hosts share")
            return {**write_parts(job.directory, self._decision.rank, job.parts, may_thread), "own": job.own}

        try:
            self._decision.attempt(f"save_checkpoint, tag {job.tag!r}", write, lambda values: self._finish(job, values))
        finally:
            self._end_pending()

    def _finish(self, job: _Job, values: list[Json]) -> list[None]:
        """Complete the checkpoint on rank 0: all parts are on the disk."""
        pending = self._pending
        assert pending is not None
        state, ranks = job.summarize([item["own"] for item in values])
        manifest = Manifest.model_validate(
            {
                "tag": job.tag,
                "saved": time.time(),
                "latest": job.latest,
                "files": {name: file for item in values for name, file in item["files"].items()},
                "tensors": _merged([item["tensors"] for item in values]),
                "state": state,
                "ranks": ranks,
            }
        )
        try:
            for name, file in manifest.files.items():
                if (job.directory / name).stat().st_size != file.num_bytes:
                    raise OSError(f"rank 0 finds {job.directory / name} shorter than it was written")
            pending.commit(manifest, self._settings.keep_last)
        except OSError as error:
            raise CheckpointError(
                f"{pending.place} can't be written: {error}; what was saved before is as it was"
            ) from error
        return [None] * len(values)

    def _end_pending(self) -> None:
        """Remove what is left of a save that was written or has failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.end()


# A box that a rank could write: the tensor's name, the box's start and shape, its bytes.
Offer = tuple[str, Sequence[int], Sequence[int], int]


def assign(offers: Sequence[Sequence[Offer]]) -> list[list[int]]:
    """Return the positions of the offers that each rank writes, balanced so that all ranks write about as many bytes.

    If several ranks offer the same box of a tensor, the rank with the least to write writes it.
    """
    holders: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], dict[int, int]] = {}
    for rank, own in enumerate(offers):
        for k, (name, start, shape, num_bytes) in enumerate(own):
            holders.setdefault((-num_bytes, name, tuple(start), tuple(shape)), {}).setdefault(rank, k)
    load = [0] * len(offers)
    chosen: list[list[int]] = [[] for _ in offers]
    # Those without a choice first, then the largest first.
    for box, positions in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, item[0])):
        rank = min(positions, key=lambda rank: (load[rank], rank))
        load[rank] -= box[0]
        chosen[rank].append(positions[rank])
    return [sorted(own) for own in chosen]


def _merged(everyone: Sequence[Json]) -> Json:
    """Merge the stored tensors of all ranks. Raises CheckpointError if a dtype or shape differs."""
    merged: dict[str, Json] = {}
    for rank, tensors in enumerate(everyone):
        for name, tensor in tensors.items():
            one = merged.setdefault(name, {**tensor, "boxes": []})
            kind, known = ((t["dtype"], tuple(t["shape"])) for t in (tensor, one))
            if kind != known:
                raise CheckpointError(f"tensor {name} is {kind} on rank {rank} and {known} on another; make them alike")
            one["boxes"] += tensor["boxes"]
    return merged


def to_host(parts: Sequence[Part], copied: bool) -> list[Part]:
    """Return the parts with values in host memory; copied: in memory of their own, which training doesn't touch.

    They are copied from CUDA into pinned memory, all at once, and complete when this returns.
    """
    moved = []
    for part in parts:
        values = part.values
        if copied or values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            values = host.copy_(values, non_blocking=True)
        moved.append(replace(part, values=values))
    if device := next((part.values.device for part in parts if part.values.is_cuda), None):
        torch.cuda.synchronize(device)
    return moved


def write_parts(directory: Path, rank: int, parts: Sequence[Part], may_thread: bool) -> Json:
    """Write a rank's parts, and return the manifest's "files" and "tensors". Raises CheckpointError that names the file.

    may_thread: whether another thread may compute the checksums meanwhile; while the interpreter ends, none can be started.
    """
    files: Json = {}
    tensors: dict[str, Json] = {}
    for number, own in enumerate(_portions(parts)):
        path = directory / f"rank{rank:05}-{number:02}.safetensors"
        values: dict[str, Tensor] = {}
        seen: set[int] = set()
        # Values are moved from the device one file at a time, unless they were moved before.
        for k, part in enumerate(to_host(own, copied=False)):
            tensor = part.values.contiguous()
            # safetensors refuses two names for the same memory, as for a buffer that layers share.
            values[f"{part.name}#{k}"] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
        try:
            files[path.name], checksums = _write_file(path, values, may_thread)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be written: {error}; free some space, or save elsewhere") from error
        for part, (key, crc32) in zip(own, checksums.items(), strict=True):
            dtype = str(part.values.dtype).removeprefix("torch.")
            box = {"start": part.box.start, "shape": part.box.shape, "file": path.name, "key": key, "crc32": crc32}
            tensor_entry = tensors.setdefault(part.name, {"dtype": dtype, "shape": part.shape, "boxes": []})
            tensor_entry["boxes"].append(box)
    return {"files": files, "tensors": tensors}


def _portions(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield the parts of one file after the other."""
    portion: list[Part] = []
    size = 0
    for part in parts:
        if portion and size + part.values.nbytes > _FILE_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(part)
        size += part.values.nbytes
    if portion:
        yield portion


def _write_file(path: Path, values: dict[str, Tensor], may_thread: bool) -> tuple[Json, dict[str, int]]:
    """Write a file of tensors; returns its entry in the manifest, and the checksum of each tensor."""

    def checksums() -> dict[str, int]:
        return {key: checksum(value) for key, value in values.items()}

    def save() -> Json:
        path.touch()
        mode = path.stat().st_mode
        save_file(values, path)
        path.chmod(mode)  # safetensors makes files that only their owner may read
        sync(path)
        return stored_file(path).model_dump()

    if not may_thread:
        return save(), checksums()
    # Both release the interpreter's lock: the checksums, of the memory and not of the file, cost next to no time.
    with ThreadPoolExecutor(1) as pool:
        computed = pool.submit(checksums)
        return save(), computed.result()
