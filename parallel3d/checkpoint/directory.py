"""Directories of checkpoints: which are complete, which one `latest` names, and changes that a kill at any point leaves valid.

<save_dir>/<tag>                          a checkpoint, see format.py
<save_dir>/latest                         the tag of the last one
<save_dir>/.parallel3d/lock               locked while a name changes
<save_dir>/.parallel3d/<id>/lock          its tag; locked as long as this save runs
<save_dir>/.parallel3d/<id>/new           the checkpoint that is being written, until it gets its name
<save_dir>/.parallel3d/<id>/old           the one that it replaces, valid until then

Several processes may save into a directory at once. Only files that a save has written are ever removed, and folders that hold
nothing else.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from parallel3d.checkpoint.format import MANIFEST, Manifest, manifest_text, read_manifest
from parallel3d.errors import CheckpointError, nearest

LATEST = "latest"
OWN = ".parallel3d"
LOCK = "lock"
MARK = "parallel3d save of "  # in a save's lock, before the tag
FILES = re.compile(r"manifest\.json|rank[0-9]{5,}-[0-9]{2,}\.safetensors")
_ORDER = re.compile(rb'"order": ([0-9]{1,15})[,}]')
# Bytes of a manifest in which its first entries are.
_HEAD_BYTES = 4096
_LONGEST_TAG = 200
# Number of tags that a message lists.
_MOST = 5


def check_tag(tag: object) -> str:
    """Return the tag as the name of a directory. Raises CheckpointError if it can't be one."""
    name = str(tag)
    is_plain = name not in ("", ".", "..", LATEST, OWN) and Path(name).name == name and name.strip() == name
    if not is_plain or not name.isprintable() or len(name.encode()) > _LONGEST_TAG:
        raise CheckpointError(
            f"tag {name[:_LONGEST_TAG]!r} can't be the name of a checkpoint's directory; give a plain name of at most "
            f"{_LONGEST_TAG} bytes, without '/' or blanks at its ends"
        )
    return name


@dataclass(frozen=True)
class CompleteCheckpoint:
    """Tag, directory and manifest of a checkpoint whose files are all there."""

    tag: str
    path: Path
    manifest: Manifest


def check_complete(path: Path) -> Manifest:
    """Return the manifest of a directory whose files are all there, in their sizes. Raises CheckpointError."""
    manifest = read_manifest(path)
    for name, file in manifest.files.items():
        there = path / name
        if not there.is_file():
            raise CheckpointError(f"{there} is missing")
        if there.stat().st_size != file.num_bytes:
            size = there.stat().st_size
            raise CheckpointError(f"{there} is damaged: it has {size} bytes, not {file.num_bytes}")
    return manifest


def saved(save_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield (tag, directory) of the directories, and of what a save was about to replace when it was killed."""
    for path in sorted(save_dir.iterdir()) if save_dir.is_dir() else ():
        if path.is_dir() and path.name != OWN:
            yield path.name, path
    for folder in save_folders(save_dir):
        tag = tag_of(folder)
        if tag is not None and (folder / "old").is_dir() and not os.path.lexists(save_dir / tag):
            yield tag, folder / "old"


def complete_checkpoints(save_dir: Path) -> list[CompleteCheckpoint]:
    """Return the complete checkpoints of a directory in the order of their saves, whatever the clock showed."""
    found = []
    for tag, path in saved(save_dir):
        with suppress(CheckpointError):
            found.append(CompleteCheckpoint(tag, path, check_complete(path)))
    return sorted(found, key=lambda checkpoint: (checkpoint.manifest.order, checkpoint.manifest.saved))


def candidates(save_dir: Path) -> list[tuple[str, str | None]]:
    """Return (tag, why it isn't complete or None) of the checkpoints that resume may try, the best first.

    First comes the one that `latest` names, then those that were saved as the latest, the newest first, damaged ones included.
    Raises CheckpointError if `latest` can't be read.
    """
    named = latest_tag(save_dir)
    faults: dict[str, str | None] = {}
    orders: dict[str, tuple[float, float]] = {}
    for tag, path in saved(save_dir):
        if tag == named or _has_own_files(path):
            try:
                manifest = check_complete(path)
            except CheckpointError as error:
                faults[tag], orders[tag] = str(error), (order_of(path), path.stat().st_mtime)
                continue
            if tag == named or manifest.latest:
                faults[tag], orders[tag] = None, (manifest.order, manifest.saved)
    if named is not None and named not in faults:
        faults[named], orders[named] = f"{save_dir / named}, which `latest` names, is not there", (0, 0)
    return [(tag, faults[tag]) for tag in sorted(faults, key=lambda tag: (tag == named, orders[tag]), reverse=True)]


def _has_own_files(path: Path) -> bool:
    """Return whether a directory is, or was, a checkpoint: other programs have a manifest.json too."""
    return "parallel3d checkpoint" in _head(path).decode(errors="replace") or any(
        FILES.fullmatch(entry.name) for entry in path.iterdir() if entry.name != MANIFEST
    )


def _head(path: Path) -> bytes:
    """Return the first bytes of a directory's manifest; none where there is none."""
    manifest = path / MANIFEST
    with suppress(OSError):
        if manifest.is_file():
            with manifest.open("rb") as file:
                return file.read(_HEAD_BYTES)
    return b""


def order_of(path: Path) -> int:
    """Return a checkpoint's place in the order of saves only from its manifest's first entries; 0 if they have none."""
    found = _ORDER.search(_head(path))
    return int(found[1]) if found else 0


def latest_tag(save_dir: Path) -> str | None:
    """Return the tag in the file `latest`, or None without such a file.

    Raises CheckpointError for what is not a file, and for a directory that is itself a checkpoint: nothing in it can be loaded.
    """
    try:
        if (save_dir / LATEST).is_fifo():
            raise OSError("it is not a file")
        return (save_dir / LATEST).read_text().strip()
    except FileNotFoundError:
        if (save_dir / MANIFEST).is_file():
            path = save_dir.absolute()
            raise CheckpointError(
                f"{path} is itself a checkpoint; give the directory that holds it, {path.parent}, and tag={path.name!r}"
            ) from None
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{save_dir / LATEST} can't be read: {error}; give load_checkpoint a tag") from error


def find(load_dir: Path, tag: str) -> Path:
    """Return the directory of a tag. Raises CheckpointError, with what else can be loaded, where there is none."""
    places = dict(saved(load_dir))
    if check_tag(tag) not in places:
        raise CheckpointError(f"{load_dir / tag} is not there{other_tags(load_dir, tag)}")
    return places[tag]


@contextmanager
def naming_others(load_dir: Path, tag: str) -> Iterator[None]:
    """Add to a CheckpointError about the checkpoint `tag` what can be loaded instead."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}{other_tags(load_dir, tag)}") from None


def other_tags(load_dir: Path, tag: str) -> str:
    """Return the end of a message: what can be loaded instead of a tag."""
    others = [found.tag for found in complete_checkpoints(load_dir) if found.tag != tag]
    if not others:
        return f"; {load_dir} holds no other complete checkpoint"
    listed = ", ".join(map(repr, others[::-1][:_MOST]))
    return f"; complete in {load_dir}, the newest first: {listed}.{nearest(tag, others)}"


def save_folders(save_dir: Path) -> list[Path]:
    """Return the folders of saves that are running or were killed."""
    own = save_dir / OWN
    return sorted(path for path in own.iterdir() if path.is_dir()) if own.is_dir() else []


def tag_of(folder: Path) -> str | None:
    """Return the tag that a save's folder is for; None for a folder that no save has made."""
    with suppress(OSError, ValueError, CheckpointError):
        lock = folder / LOCK
        mark = lock.read_text(encoding="utf-8") if lock.is_file() else ""
        if mark.startswith(MARK):
            return check_tag(mark.removeprefix(MARK))
    return None


# How long a save waits for another one that changes a name, which takes milliseconds.
_LOCK_S = 60.0


class PendingSave:
    """A save in progress, in a folder of its own, on rank 0. Raises OSError, CheckpointError.

    path: where the checkpoint is written; place: where it goes. The folder is locked until the save ends, so that no other
    save takes it for the leftover of a killed one.
    """

    def __init__(self, save_dir: Path, tag: str):
        save_dir.mkdir(parents=True, exist_ok=True)
        self.place = save_dir / tag
        if self.place.exists() and not (self.place / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.place} is there and is not a checkpoint of parallel3d's; choose another tag, or remove it"
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

    def commit(self, manifest: Manifest, keep_last: int | None = None) -> None:
        """Give the checkpoint, whose other files are on the disk, its manifest and its name.

        If the manifest says so, `latest` names it from then on, and all but the newest `keep_last` of the checkpoints saved as
        the latest are removed.
        """
        with _names_locked(self._save_dir):
            order = 1 + max((order_of(path) for _, path in saved(self._save_dir)), default=0)
            write_file(self.path / MANIFEST, manifest_text(manifest.model_copy(update={"order": order})))
            self._replace()
            if not manifest.latest:
                return
            write_file(self._folder / LATEST, self._tag)
            (self._folder / LATEST).rename(self._save_dir / LATEST)
            sync(self._save_dir)
            try:
                if keep_last is not None:
                    keep_newest(self._save_dir, keep_last)
            except OSError as error:
                warnings.warn(f"checkpoints older than {self.place} can't be removed: {error}", stacklevel=2)

    def _replace(self) -> None:
        """Give the checkpoint its name, and remove the one that had it."""
        place = self.place
        sync(self.path)
        if place.is_symlink():
            place.unlink()  # a symbolic link: its target stays
        elif place.exists():
            place.rename(self._old)
        self.path.rename(place)
        sync(self._save_dir)
        if self._old.is_dir():
            for path in _foreign(self._old):
                if not os.path.lexists(place / path.name):
                    path.rename(place / path.name)
            _remove_files(self._old)

    def end(self) -> None:
        """Remove what is left of the folder, and unlock it. Warns if it can't be removed; a later save tries again."""
        with self._lock:
            try:
                _end_folder(self._folder, self.place)
            except OSError as error:
                warnings.warn(f"what is left of a save can't be removed: {error}", stacklevel=2)


def keep_newest(save_dir: Path, number: int) -> None:
    """Remove all but the newest `number` of the checkpoints that were saved as the latest.

    The one that `latest` names stays, and so do copies and links under other names than they were saved by.
    """
    counted = [
        found
        for found in complete_checkpoints(save_dir)
        if found.manifest.latest and found.manifest.tag == found.tag and not found.path.is_symlink()
    ]
    for found in counted[:-number]:
        if found.tag != latest_tag(save_dir):
            _remove_files(found.path)


def remove_leftovers(save_dir: Path) -> None:
    """Tidy up after saves that were killed: put back what was set aside, remove what was never a checkpoint. Raises OSError."""
    for folder in save_folders(save_dir):
        tag = tag_of(folder)
        if tag is None:
            with suppress(OSError):
                folder.rmdir()  # removes only an empty folder
            continue
        # A save that ends removes its lock.
        with suppress(FileNotFoundError), (folder / LOCK).open("r+", encoding="utf-8") as lock:
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
    """Remove a checkpoint's files, then the folder if empty. The manifest goes first, so that a partial one isn't complete."""
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
    """Write a text file and wait until it is on the disk. Raises OSError."""
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
