"""On CUDA, with deterministic algorithms, a broken run equals an unbroken one bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPools
from resume_runs import break_and_go_on, check_equal


def deterministic(*args: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return break_and_go_on(*args)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("case", "in_use"), [("bf16 zero2", False), ("fp16 zero1", True), ("momentum", False), ("plain", True)]
)
def test_a_broken_run_equals_an_unbroken_one(gpu_pool: RankPools, tmp_path: Path, case: str, in_use: bool):
    for unbroken, broken, skipped in gpu_pool.run(2, deterministic, case, str(tmp_path), in_use):
        for one, other in zip(unbroken, broken, strict=True):
            check_equal(one, other)
        assert not case.startswith("fp16") or skipped > 0, "an overflow must be met to be tested"
