"""Changes to a directory of checkpoints, which a kill at any point leaves valid; several processes may save into it at once.

Only files that a save has written are ever removed, and folders that hold nothing else.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from parallel3d.checkpoint.directory import (
    FILES,
    LATEST,
    LOCK,
    MARK,
    OWN,
    complete_checkpoints,
    latest_tag,
    order_of,
    save_folders,
    saved,
    tag_of,
)
from parallel3d.checkpoint.format import MANIFEST
from parallel3d.errors import CheckpointError

# How long a save waits for another one that changes a name, which takes milliseconds.
_LOCK_S = 60.0


class PendingSave:
    """A save that is under way, in a folder of its own; rank 0 has it. Raises OSError, CheckpointError.

    path: where the checkpoint is written; place: where it goes. The folder is locked until the save ends, so that no other
    save takes it for the leftover of a killed one.
    """

    def __init__(self, save_dir: Path, tag: str):
        save_dir.mkdir(parents=True, exist_ok=True)
        self.place = save_dir / tag
        if self.place.exists() and not (self.place / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.place} is there and is no checkpoint of parallel3d's; choose another tag, or remove it"
            )
        self._save_dir, self._tag = save_dir, tag
        self._folder = save_dir / OWN / secrets.token_hex(8)
        self.path, self._old = self._folder / "new", self._folder / "old"
        with _names_locked(save_dir):
            remove_leftovers(save_dir)
            self._folder.mkdir()
            self._lock = (self._folder / LOCK).open("x", encoding="utf-8")
            _lock(self._lock, otherwise=True)
            self._lock.write(f"{MARK}{tag}")
            self._lock.flush()
            self.path.mkdir()

    @contextmanager
    def committing(self) -> Iterator[int]:
        """Lock the names of the directory; yield this save's place in the order of saves, for its manifest."""
        with _names_locked(self._save_dir):
            yield 1 + max((order_of(path) for _, path in saved(self._save_dir)), default=0)

    def commit(self) -> None:
        """Give the checkpoint, which is on the disk, its name, and remove the one that had it."""
        place = self.place
        sync(self.path)
        if place.is_symlink():
            place.unlink()  # and what it names stays
        elif place.exists():
            place.rename(self._old)
        self.path.rename(place)
        sync(self._save_dir)
        if self._old.is_dir():
            for path in _foreign(self._old):
                if not os.path.lexists(place / path.name):
                    path.rename(place / path.name)
            _remove_files(self._old)

    def set_latest(self) -> None:
        """Let `latest` name the tag."""
        write_file(self._folder / LATEST, self._tag)
        (self._folder / LATEST).rename(self._save_dir / LATEST)
        sync(self._save_dir)

    def keep_newest(self, number: int) -> None:
        """Remove all but the newest `number` of the checkpoints that were saved as the latest.

        The one that `latest` names stays, and so do copies and links under other names than they were saved by.
        """
        counted = [
            found
            for found in complete_checkpoints(self._save_dir)
            if found.manifest.latest and found.manifest.tag == found.tag and not found.path.is_symlink()
        ]
        for found in counted[:-number]:
            if found.tag != latest_tag(self._save_dir):
                _remove_files(found.path)

    def end(self) -> None:
        """Remove what is left of the folder, and unlock it."""
        with self._lock:
            _end_folder(self._folder, self.place)


def remove_leftovers(save_dir: Path) -> None:
    """Tidy up after saves that were killed: put back what was set aside, remove what was never a checkpoint. Raises OSError."""
    for folder in save_folders(save_dir):
        tag = tag_of(folder)
        if tag is None:
            with suppress(OSError):
                folder.rmdir()  # an empty one alone
            continue
        with (folder / LOCK).open("r+", encoding="utf-8") as lock:
            if _lock(lock, otherwise=False):  # else that save may be running
                _end_folder(folder, save_dir / tag)


@contextmanager
def _names_locked(save_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory's names, where its file system has locks. Raises CheckpointError after _LOCK_S."""
    path = save_dir / OWN / LOCK
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        end = time.monotonic() + _LOCK_S
        while not _lock(file, otherwise=True):
            if time.monotonic() > end:
                raise CheckpointError(
                    f"another process has held {path} for {_LOCK_S:.0f} s; end that process, or save to another directory"
                )
            time.sleep(0.01)
        yield


def _lock(file: TextIO, otherwise: bool) -> bool:
    """Take a file's lock without waiting. Returns whether it was free; `otherwise` where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return otherwise
    return True


def _foreign(folder: Path) -> list[Path]:
    """Return what is in a checkpoint's directory and was not written by a save."""
    return [path for path in folder.iterdir() if not FILES.fullmatch(path.name) or path.is_dir()]


def _remove_files(folder: Path) -> None:
    """Remove a checkpoint's files, the manifest first: half removed, it must not pass for whole. Then the folder if empty."""
    for path in sorted(set(folder.iterdir()) - set(_foreign(folder))):
        path.unlink()
    with suppress(OSError):  # other files are in it
        folder.rmdir()


def _end_folder(folder: Path, place: Path) -> None:
    """Put back what a save has set aside if nothing took its place, and remove the save's folder."""
    if (folder / "old").is_dir() and not os.path.lexists(place):
        (folder / "old").rename(place)
    for path in (folder / "new", folder / "old"):
        if path.is_dir():
            _remove_files(path)
    for name in (LATEST, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def write_file(path: Path, text: str) -> None:
    """Write a text; it is on the disk when this returns. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or a directory's names, is on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
