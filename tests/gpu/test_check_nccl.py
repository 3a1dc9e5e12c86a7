"""`p3d check` over NCCL, dropout inside sliced regions included."""

from __future__ import annotations

from pathlib import Path

import pytest

from parallel3d.cli import main

CHECKED = str(Path(__file__).parents[1] / "checked.py")


@pytest.mark.parametrize(
    ("options", "code"),
    [(["dropping"], 0), (["dropping_apart"], 1), (["decoder", "--dtype", "bfloat16"], 0), (["faulty"], 1)],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_slices_on_gpus(num_gpus: int, capsys: pytest.CaptureFixture[str], options: list[str], code: int):
    function, *others = options
    got = main(["check", f"{CHECKED}:{function}", "--layouts", "tp2,sp,m2", "tp2,m2", "--steps", "2", *others])
    assert got == code, capsys.readouterr()
