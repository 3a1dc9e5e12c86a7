"""Manifests whose checksum is right and whose values are not: an error names the value."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.format import MANIFEST, TrainingState, read_manifest
from parallel3d.errors import CheckpointError

SAVED = Path(__file__).parents[2] / "data" / "checkpoint-a149018" / "global_step2"


def written(directory: Path, body: dict[str, Any]) -> Path:
    compact = json.dumps(body, sort_keys=True, separators=(",", ":"))
    (directory / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(compact.encode()), **body}))
    return directory


@pytest.fixture
def body() -> dict[str, Any]:
    found = json.loads((SAVED / MANIFEST).read_text())
    del found["crc32"]
    return found


def test_a_right_one_is_read(tmp_path: Path, body: dict[str, Any]):
    manifest = read_manifest(written(tmp_path, body))
    TrainingState.check(manifest, tmp_path)
    assert manifest.saved == body["saved"]


@pytest.mark.parametrize("saved", ["yesterday", -1.0, float("nan"), float("inf"), 1e300, None, [1.0]])
def test_a_time_that_is_none_is_refused(tmp_path: Path, body: dict[str, Any], saved: Any):
    with pytest.raises(CheckpointError, match="saved"):
        read_manifest(written(tmp_path, {**body, "saved": saved}))


@pytest.mark.parametrize("key", ["client_state", "counters", "optimizer"])
def test_a_missing_part_of_the_state_is_named(tmp_path: Path, body: dict[str, Any], key: str):
    del body["state"][key]
    manifest = read_manifest(written(tmp_path, body))
    with pytest.raises(CheckpointError, match=key):
        TrainingState.check(manifest, tmp_path)
