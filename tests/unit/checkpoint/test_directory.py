"""Directories of checkpoints, killed at every point."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel3d.checkpoint import directory as d
from parallel3d.checkpoint.format import (
    MANIFEST,
    Manifest,
    StoredBox,
    StoredFile,
    StoredTensor,
    manifest_text,
    read_manifest,
)
from parallel3d.errors import CheckpointError


class Killed(BaseException):
    """An exception that nothing catches, in place of SIGKILL."""


def write(save_dir: Path, tag: str, saved: float, latest: bool = True) -> None:
    path = d.begin(save_dir, tag)
    (path / "rank00000-00.safetensors").write_bytes(b"12345678")
    files = {"rank00000-00.safetensors": StoredFile(num_bytes=8, header_crc32=0)}
    manifest = Manifest(tag=tag, saved=saved, latest=latest, files=files, tensors={}, state={"saved": saved}, ranks=[])
    d.write_file(path / MANIFEST, manifest_text(manifest))
    d.commit(path, save_dir, tag)
    if latest:
        d.set_latest(save_dir, tag)


def tags(save_dir: Path) -> list[str]:
    return [found.tag for found in d.complete_checkpoints(save_dir)]


STEPS = [(Path, "rename"), (Path, "mkdir"), (d, "sync"), (d, "write_file"), (shutil, "rmtree"), (Path, "write_bytes")]


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
    for k in range(40):
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
        assert {p.name for p in place.iterdir()} == {*before, "latest"}
        if done:
            return
    raise AssertionError("a save has fewer steps")


def test_the_newest_are_kept_and_what_latest_names_and_what_was_saved_beside(tmp_path: Path) -> None:
    for k in range(5):
        write(tmp_path, f"step{k}", saved=float(k), latest=k != 1)
    d.set_latest(tmp_path, "step0")
    (tmp_path / "step3" / "rank00000-00.safetensors").write_bytes(b"1")
    d.keep_newest(tmp_path, 1)
    # step1 was not saved as the latest; step3 is damaged, and so is none to count or to remove.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step0", "step1", "step3", "step4"]


def test_what_is_not_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(CheckpointError, match="mine is there and is no checkpoint"):
        d.begin(tmp_path, "mine")
    assert (tmp_path / "mine" / "file").read_text() == "x"


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "latest", "step1.tmp-0123abcd"])
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
    with pytest.raises(CheckpointError, match="the newest first: 'last', 'global_step10', 'first'"):
        d.find(tmp_path, "other")


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
    with pytest.raises(ValueError, match="no name of a file"):
        Manifest.model_validate({**manifest().model_dump(), "files": {"../x": {"num_bytes": 1, "header_crc32": 0}}})
