"""Directories of checkpoints: which are complete, and which one `latest` names.

<save_dir>/<tag>                          a checkpoint, see format.py
<save_dir>/latest                         the tag of the last one
<save_dir>/.parallel3d/lock               locked while a name changes
<save_dir>/.parallel3d/<id>/lock          its tag; locked as long as this save runs
<save_dir>/.parallel3d/<id>/new           the checkpoint that is being written, until it gets its name
<save_dir>/.parallel3d/<id>/old           the one that it replaces, valid until then
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from parallel3d.checkpoint.format import MANIFEST, Manifest, read_manifest
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
class Found:
    """A complete checkpoint."""

    tag: str
    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, complete or not. error: why it isn't complete; latest: whether it was saved as the latest, if known."""

    tag: str
    path: Path
    order: tuple[float, float]
    latest: bool
    error: str | None = None


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


def complete_checkpoints(save_dir: Path) -> list[Found]:
    """Return the complete checkpoints of a directory in the order of their saves, whatever the clock said."""
    found = []
    for tag, path in saved(save_dir):
        with suppress(CheckpointError):
            found.append(Found(tag, path, check_complete(path)))
    return sorted(found, key=lambda checkpoint: (checkpoint.manifest.order, checkpoint.manifest.saved))


def candidates(save_dir: Path) -> list[Candidate]:
    """Return what could be resumed from, the best first: what `latest` names, then those saved as the latest, newest first.

    Damaged checkpoints are among them. Raises CheckpointError if `latest` can't be read.
    """
    named = latest_tag(save_dir)
    found = [_candidate(tag, path) for tag, path in saved(save_dir) if tag == named or _has_own_files(path)]
    if named is not None and named not in {one.tag for one in found}:
        path = save_dir / named
        found.append(Candidate(named, path, (0, 0), True, f"{path}, which `latest` names, is not there"))
    wanted = [one for one in found if one.latest or one.tag == named]
    return sorted(wanted, key=lambda one: (one.tag == named, one.order), reverse=True)


def _candidate(tag: str, path: Path) -> Candidate:
    try:
        manifest = check_complete(path)
    except CheckpointError as error:
        return Candidate(tag, path, (order_of(path), path.stat().st_mtime), True, str(error))
    return Candidate(tag, path, (manifest.order, manifest.saved), manifest.latest)


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
    """Return a checkpoint's place in the order of saves by its manifest's first entries alone; 0 if it says none."""
    found = _ORDER.search(_head(path))
    return int(found[1]) if found else 0


def latest_tag(save_dir: Path) -> str | None:
    """Return the tag in the file `latest`, or None without such a file."""
    try:
        if (save_dir / LATEST).is_fifo():
            raise OSError("it is no file")
        return (save_dir / LATEST).read_text().strip()
    except FileNotFoundError:
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
