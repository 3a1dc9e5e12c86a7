"""Directories of checkpoints, killed at every point."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel3d.checkpoint import directory as d
from parallel3d.checkpoint.directory import PendingSave
from parallel3d.checkpoint.format import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    manifest_text,
    read_manifest,
)
from parallel3d.checkpoint.read import Reader, find_checkpoint
from parallel3d.errors import CheckpointError


class Killed(BaseException):
    """An exception that nothing catches, in place of SIGKILL."""


def write(save_dir: Path, tag: str, saved: float, latest: bool = True, keep: int | None = None) -> None:
    """Save as checkpoint/save.py does."""
    pending = PendingSave(save_dir, tag)
    (pending.path / "rank00000-00.safetensors").write_bytes(b"12345678")
    files = {"rank00000-00.safetensors": StoredFile(num_bytes=8, header_crc32=0)}
    values = {"tag": tag, "saved": saved, "latest": latest, "files": files, "tensors": {}, "ranks": []}
    pending.commit(Manifest(**values, state={"saved": saved}), keep)
    pending.end()


def tags(save_dir: Path) -> list[str]:
    return [found.tag for found in d.complete_checkpoints(save_dir)]


STEPS = [
    *((Path, name) for name in "rename mkdir rmdir unlink open write_bytes".split()),
    (d, "sync"),
    (d, "write_file"),
]


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """killing(k): the k-th of the steps that change the disk is not taken, and nothing after it."""
    left = [10**9]

    def patched(original):
        def step(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return original(*args, **kwargs)

        return step

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, patched(getattr(owner, name)))

    def killing(k: int) -> None:
        left[0] = k

    return killing


@pytest.mark.parametrize("tag", ["two", "one"], ids=["beside", "overwriting"])
def test_a_save_killed_at_any_step_leaves_the_old_or_the_new_one(tmp_path: Path, killing, tag: str) -> None:
    for k in range(200):
        place = tmp_path / str(k)
        killing(10**9)
        write(place, "one", saved=1.0)
        killing(k)
        try:
            write(place, tag, saved=2.0)
            done = True
        except Killed:
            done = False
        killing(10**9)
        latest = d.latest_tag(place)
        path = d.find(place, latest)
        assert d.check_complete(path).saved == (2.0 if done else pytest.approx(1.5, abs=0.5))
        assert "one" in tags(place)
        # The next save tidies up, and nothing valid is lost.
        before = {found.tag: found.manifest.saved for found in d.complete_checkpoints(place)}
        d.remove_leftovers(place)
        assert {found.tag: found.manifest.saved for found in d.complete_checkpoints(place)} == before
        assert {path.name for path in place.iterdir()} == {*before, "latest", ".parallel3d"}
        assert [path.name for path in (place / ".parallel3d").iterdir()] == ["lock"]
        if done:
            return
    raise AssertionError("a save has fewer steps")


def test_the_newest_are_kept_and_what_latest_names_and_what_was_saved_beside(tmp_path: Path) -> None:
    for k in range(5):
        write(tmp_path, f"step{k}", saved=float(k), latest=k != 1)
    (tmp_path / "step3" / "rank00000-00.safetensors").write_bytes(b"1")
    write(tmp_path, "step5", saved=5.0, keep=1)
    # step1 was not saved as the latest; step3 is damaged, and so is none to count or to remove.
    assert names(tmp_path) == ["latest", "step1", "step3", "step5"]
    (tmp_path / "latest").write_text("step5")
    pending = PendingSave(tmp_path, "beside")
    write(tmp_path, "step6", saved=6.0)
    (tmp_path / "latest").write_text("step5")
    d.keep_newest(tmp_path, 1)
    pending.end()
    assert names(tmp_path) == ["latest", "step1", "step3", "step5", "step6"]


def names(directory: Path) -> list[str]:
    """What a user finds in a directory of checkpoints."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".parallel3d")


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path) -> None:
    for k, saved in enumerate((3e9, 2e9, 1e9)):
        write(tmp_path, f"step{k}", saved, keep=2)
    assert tags(tmp_path) == ["step1", "step2"]
    assert [tag for tag, _ in d.candidates(tmp_path)] == ["step2", "step1"]


def test_what_latest_names_is_resumed_first_whatever_was_saved_later(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path, f"step{k}", saved=float(k))
    write(tmp_path, "beside", saved=9.0, latest=False)
    (tmp_path / "latest").write_text("step1\n")
    assert [tag for tag, _ in d.candidates(tmp_path)] == ["step1", "step2", "step0"]
    (tmp_path / "latest").write_text("beside")
    assert [tag for tag, _ in d.candidates(tmp_path)] == ["beside", "step2", "step1", "step0"]


def test_copies_and_links_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    for k in range(2):
        write(tmp_path, f"step{k}", saved=float(k))
    shutil.copytree(tmp_path / "step0", tmp_path / "mine")
    (tmp_path / "step1").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    (tmp_path / "step1").symlink_to(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    write(tmp_path, "step2", saved=2.0, keep=2)
    assert names(tmp_path) == ["latest", "mine", "step0", "step1", "step2"]
    assert set(tags(tmp_path)) == {"mine", "step0", "step1", "step2"}


def test_a_tag_that_is_a_link_is_saved_again_and_what_it_named_stays(tmp_path: Path) -> None:
    write(tmp_path / "a", "best", saved=1.0)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "best").symlink_to(tmp_path / "a" / "best")
    (tmp_path / "b" / "gone").symlink_to(tmp_path / "nowhere")
    for tag in ("best", "gone"):
        write(tmp_path / "b", tag, saved=2.0)
        assert not (tmp_path / "b" / tag).is_symlink()
        assert d.check_complete(tmp_path / "b" / tag).saved == 2.0
    assert d.check_complete(tmp_path / "a" / "best").saved == 1.0


def test_the_users_directories_stay_whatever_their_names(tmp_path: Path) -> None:
    users = ["notes.old-20251123", "data.tmp-20251101", "step0.gone-0123abcd", ".parallel3d/mine", ".parallel3d/empty"]
    for name in users:
        (tmp_path / name).mkdir(parents=True)
        if name != ".parallel3d/empty":
            (tmp_path / name / "thesis.txt").write_text("x")
    for k in range(3):
        write(tmp_path, "step0", saved=float(k), keep=1)
    for name in users[:-1]:
        assert (tmp_path / name / "thesis.txt").read_text() == "x"


def test_files_that_a_user_puts_into_a_checkpoint_stay(tmp_path: Path) -> None:
    write(tmp_path, "step0", saved=0.0)
    write(tmp_path, "best", saved=0.5, latest=False)
    for tag in ("step0", "best"):
        (tmp_path / tag / "notes").mkdir()
        (tmp_path / tag / "notes" / "thesis.txt").write_text("x")
    write(tmp_path, "best", saved=0.75, latest=False)
    write(tmp_path, "step1", saved=1.0, keep=1)
    assert tags(tmp_path) == ["best", "step1"]
    assert names(tmp_path / "step0") == ["notes"]
    for tag in ("step0", "best"):
        assert (tmp_path / tag / "notes" / "thesis.txt").read_text() == "x"


def test_saves_of_several_processes_leave_each_other_alone(tmp_path: Path) -> None:
    """Each process begins before the other one is through, under the same tag too; the lock ends with the process."""
    first = PendingSave(tmp_path, "step1")
    (first.path / "rank00000-00.safetensors").write_bytes(b"12345678")
    write(tmp_path, "step1", saved=2.0)
    write(tmp_path, "step2", saved=3.0)
    assert (first.path / "rank00000-00.safetensors").read_bytes() == b"12345678"
    first._lock.close()  # as the end of its process does
    write(tmp_path, "step3", saved=4.0)
    assert not first.path.exists()
    assert tags(tmp_path) == ["step1", "step2", "step3"]


def test_a_save_that_ends_while_another_begins_does_not_make_it_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tag_of = PendingSave(tmp_path, "step1"), d.tag_of

    def seen_before_it_ends(folder: Path) -> str | None:
        tag = tag_of(folder)
        first.end()
        return tag

    monkeypatch.setattr(d, "tag_of", seen_before_it_ends)
    second = PendingSave(tmp_path, "step2")
    monkeypatch.undo()
    second.end()
    assert not d.save_folders(tmp_path)


def test_leftovers_that_can_not_be_removed_are_told_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that an error has made read-only: the checkpoint is there, and rank 0 goes on with the others."""

    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    pending = PendingSave(tmp_path, "step1")
    pending.commit(manifest())
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.warns(UserWarning, match=r"what is left of a save can't be removed: .*Read-only"):
        pending.end()
    monkeypatch.undo()
    write(tmp_path, "step2", saved=2.0)
    assert not d.save_folders(tmp_path)
    assert (tmp_path / "step1" / MANIFEST).is_file()


def test_a_file_system_without_locks_keeps_what_may_be_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(d.fcntl, "flock", unsupported)
    first = PendingSave(tmp_path, "step1")
    write(tmp_path, "step2", saved=2.0)
    assert first.path.is_dir()
    first.end()
    assert not first.path.exists()


def test_names_that_another_process_holds_locked_are_waited_for_and_then_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(d, "_LOCK_S", 0.05)
    pending = PendingSave(tmp_path, "step1")
    with (
        d._names_locked(tmp_path),
        pytest.raises(CheckpointError, match=r"another process has held .*/lock for .* s; end that"),
    ):
        PendingSave(tmp_path, "step2")
    pending.end()


def test_a_name_that_can_not_be_given_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "step1", saved=1.0)
    pending = PendingSave(tmp_path, "step1")
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if path == pending.path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"):
        pending.commit(manifest())
    pending.end()
    assert tags(tmp_path) == ["step1"]
    assert d.check_complete(tmp_path / "step1").saved == 1.0


def test_damaged_checkpoints_are_candidates_with_their_faults(tmp_path: Path) -> None:
    for k in range(5):
        write(tmp_path, f"step{k}", saved=float(k))
    manifest = tmp_path / "step4" / MANIFEST
    manifest.write_text(manifest.read_text()[:200])
    (tmp_path / "step3" / MANIFEST).unlink()
    (tmp_path / "step2" / "rank00000-00.safetensors").write_bytes(b"1")
    for other in ("logs", "page"):
        (tmp_path / other).mkdir()
    (tmp_path / "page" / MANIFEST).write_text('{"name": "another program\'s"}')
    found = d.candidates(tmp_path)
    assert [tag for tag, _ in found] == ["step4", "step2", "step1", "step0", "step3"]
    faults = [fault for _, fault in found]
    assert all(word in str(fault) for word, fault in zip(("damaged", "1 bytes, not 8"), faults[:2], strict=True))
    assert faults[2:4] == [None, None]
    assert "it has no manifest.json" in str(faults[4])


def test_a_latest_that_names_nothing_and_a_newer_format_are_said(tmp_path: Path) -> None:
    assert d.candidates(tmp_path) == []
    (tmp_path / "latest").write_text("step9")
    [(_, fault)] = d.candidates(tmp_path)
    assert str(fault).endswith("step9, which `latest` names, is not there")
    write(tmp_path, "step9", saved=1.0)
    manifest = tmp_path / "step9" / MANIFEST
    body = json.loads(manifest.read_text())
    del body["crc32"]
    body["version"] = 2
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    manifest.write_text(json.dumps({"crc32": zlib.crc32(text), **body}))
    [(_, fault)] = d.candidates(tmp_path)
    assert "format version 2, and this parallel3d reads version 1; install the version that wrote it" in str(fault)


@pytest.mark.parametrize("name", [MANIFEST, "rank00000-00.safetensors", "../latest"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """Who opens a FIFO waits until somebody writes into it."""
    write(tmp_path, "step1", saved=1.0)
    path = tmp_path / "step1" / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match=r"it is not a file|is missing"):
        d.check_complete(d.find(tmp_path, str(d.latest_tag(tmp_path))))
    if name.startswith("rank"):
        assert any("is damaged" in fault for fault in Reader(tmp_path / "step1").verify_all())


def test_what_is_not_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="mine is there and is not a checkpoint"):
        PendingSave(tmp_path, "mine")
    assert (tmp_path / "mine" / "file").read_text() == "x"


@pytest.mark.parametrize(
    "tag", ["", ".", "..", "a/b", "latest", ".parallel3d", "x" * 201, " step", "step\n", "a\0b", "\ud800", "\x1b[31m"]
)
def test_tags_are_names_of_directories(tag: str) -> None:
    with pytest.raises(CheckpointError, match="plain name"):
        d.check_tag(tag)


def test_a_tag_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, "global_step10", saved=1.0)
    with pytest.raises(
        CheckpointError, match=r"global_step1 is not there; .*'global_step10'. Did you mean 'global_step10'"
    ):
        d.find(tmp_path, "global_step1")
    write(tmp_path, "first", saved=0.5)
    write(tmp_path, "last", saved=2.0)
    with pytest.raises(CheckpointError, match="the newest first: 'last', 'first', 'global_step10'"):
        d.find(tmp_path, "other")


def test_a_checkpoint_given_for_the_directory_that_holds_it_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    write(tmp_path, "global_step10", saved=1.0)
    for find in (d.latest_tag, d.candidates):
        with pytest.raises(
            CheckpointError, match=rf"give the directory that holds it, {tmp_path}, and tag='global_step10'"
        ):
            find(tmp_path / "global_step10")
        assert not find(tmp_path / "empty")


def manifest() -> Manifest:
    box = StoredBox(start=(0, 1), shape=(2, 3), file="a.safetensors", key="model/w#0", crc32=7)
    tensor = StoredTensor(dtype="bfloat16", shape=(2, 4), boxes=(box,))
    files = {"a.safetensors": StoredFile(num_bytes=10, header_crc32=3)}
    state = {"scale": float("inf"), "x": [1, None, 0.1, {"$": ["tuple", [True]]}]}
    return Manifest(tag="t", saved=1.25, latest=True, files=files, tensors={"model/w": tensor}, state=state, ranks=[{}])


def test_a_manifest_comes_back_and_any_changed_byte_is_found(tmp_path: Path) -> None:
    text = manifest_text(manifest()).encode()
    (tmp_path / MANIFEST).write_bytes(text)
    assert read_manifest(tmp_path) == manifest()
    for k in range(len(text)):
        if text[k : k + 1] == b" ":
            continue  # between JSON's words: nothing is changed
        (tmp_path / MANIFEST).write_bytes(text[:k] + bytes([text[k] ^ 1]) + text[k + 1 :])
        with pytest.raises(CheckpointError, match=MANIFEST):
            read_manifest(tmp_path)


def test_a_manifest_names_no_file_outside(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        Manifest.model_validate({**manifest().model_dump(), "files": {"../x": {"num_bytes": 1, "header_crc32": 0}}})


def test_an_empty_latest_is_told_and_passed_over_by_resume(tmp_path: Path) -> None:
    write(tmp_path, "step1", saved=1.0)
    (tmp_path / "latest").write_text("")
    alone = SimpleNamespace(rank=0, make=lambda _, value, decide: decide([value])[0])
    with pytest.raises(CheckpointError, match="latest is empty; give load_checkpoint a tag, or call"):
        find_checkpoint(alone, tmp_path, None)  # type: ignore[arg-type]
    assert [tag for tag, error in d.candidates(tmp_path) if error is None] == ["step1"]
