"""Directories of checkpoints: which are complete, which one `latest` names, and changes that a kill at any point leaves valid.

A checkpoint is written as `<tag>.tmp-<id>` and renamed when all of it is on the disk. One that it replaces is `<tag>.old-<id>`
in between, and valid until the new one has its name; `<tag>.gone-<id>` is being removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from parallel3d.checkpoint.format import MANIFEST, Manifest, read_manifest
from parallel3d.errors import CheckpointError, nearest

LATEST = "latest"
_ASIDE = re.compile(r"(?P<tag>.+)\.(?P<kind>tmp|old|gone)-[0-9a-f]{8}")
# Number of tags that a message lists.
_MOST = 5


def check_tag(tag: object) -> str:
    """Return the tag as the name of a directory. Raises CheckpointError if it can't be one."""
    name = str(tag)
    if name in ("", ".", "..", LATEST) or Path(name).name != name or _ASIDE.fullmatch(name):
        raise CheckpointError(
            f"tag {name!r} can't be the name of a checkpoint's directory; give a plain name, without '/'"
        )
    return name


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

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


def _saved(save_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield (tag, directory) of what was saved, and of what a save was about to replace when it was killed."""
    for path in sorted(save_dir.iterdir()) if save_dir.is_dir() else ():
        aside = _ASIDE.fullmatch(path.name)
        tag = aside["tag"] if aside else path.name
        if path.is_dir() and (aside is None or (aside["kind"] == "old" and not (save_dir / tag).is_dir())):
            yield tag, path


def complete_checkpoints(save_dir: Path) -> list[Found]:
    """Return the complete checkpoints of a directory, the oldest first."""
    found = []
    for tag, path in _saved(save_dir):
        with suppress(CheckpointError):
            found.append(Found(tag, path, check_complete(path)))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.saved)


def latest_tag(save_dir: Path) -> str | None:
    """Return the tag in the file `latest`, or None without such a file."""
    try:
        return (save_dir / LATEST).read_text().strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{save_dir / LATEST} can't be read: {error}; give load_checkpoint a tag") from error


def find(load_dir: Path, tag: str) -> Path:
    """Return the directory of a tag. Raises CheckpointError, with what else can be loaded, where there is none."""
    saved = dict(_saved(load_dir))
    if check_tag(tag) not in saved:
        raise CheckpointError(f"{load_dir / tag} is not there{other_tags(load_dir, tag)}")
    return saved[tag]


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


def begin(save_dir: Path, tag: str) -> Path:
    """Make an empty directory to write a checkpoint in, next to its place. Raises OSError, CheckpointError."""
    save_dir.mkdir(parents=True, exist_ok=True)
    remove_leftovers(save_dir)
    place = save_dir / tag
    if place.exists() and not (place / MANIFEST).is_file():
        raise CheckpointError(
            f"{place} is there and is no checkpoint of parallel3d's; choose another tag, or remove it"
        )
    path = _aside(save_dir / tag, "tmp")
    path.mkdir()
    return path


def commit(written: Path, save_dir: Path, tag: str) -> Path:
    """Give a checkpoint that is on the disk its name, and remove the one that had it. Raises OSError."""
    sync(written)
    path = save_dir / tag
    replaced = _aside(path, "old") if path.exists() else None
    if replaced is not None:
        path.rename(replaced)
    written.rename(path)
    sync(save_dir)
    if replaced is not None:
        _remove(replaced, tag)
    return path


def set_latest(save_dir: Path, tag: str) -> None:
    """Let `latest` name a tag. Raises OSError."""
    beside = _aside(save_dir / LATEST, "tmp")
    write_file(beside, tag)
    beside.rename(save_dir / LATEST)
    sync(save_dir)


def keep_newest(save_dir: Path, number: int) -> None:
    """Remove all but the newest `number` of the checkpoints that were saved as the latest, never the one that `latest` names.

    Raises OSError.
    """
    counted = [found for found in complete_checkpoints(save_dir) if found.manifest.latest]
    for found in counted[:-number]:
        if found.tag != latest_tag(save_dir):
            _remove(found.path, found.tag)


def remove_leftovers(save_dir: Path) -> None:
    """Tidy up after a save that was killed: remove what was never a checkpoint, put back what was set aside. Raises OSError."""
    for path in sorted(save_dir.iterdir()):
        aside = _ASIDE.fullmatch(path.name)
        if aside is None:
            continue
        if aside["kind"] == "old" and not (save_dir / aside["tag"]).exists():
            path.rename(save_dir / aside["tag"])
        elif path.is_dir():
            _remove(path, aside["tag"])
        else:
            path.unlink()


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


def _aside(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(4)}")


def _remove(path: Path, tag: str) -> None:
    # Renamed first: half removed, it must not pass for one that was set aside.
    gone = _aside(path.with_name(tag), "gone")
    path.rename(gone)
    shutil.rmtree(gone)
