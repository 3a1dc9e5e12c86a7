"""The file of calls that ran uncompiled, where it can't be written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.monitor.uncompiled import UncompiledWriter, describe_uncompiled


def test_a_training_goes_on_where_its_uncompiled_calls_can_not_be_written(tmp_path: Path) -> None:
    function = FirstShapes(abs, "Block", backend="eager")
    function.others = Counter({"[2, 8]": 3})
    folder = tmp_path / "runs"
    folder.write_text("a file in the folder's place")
    writer = UncompiledWriter([function], folder)
    with pytest.warns(UserWarning, match="ran uncompiled can't be written: .*runs"):
        writer.write()
    folder.unlink()
    function.others["[3, 8]"] += 1
    writer.write()
    assert any("3 calls of Block with [2, 8]" in line for line in describe_uncompiled(folder))
