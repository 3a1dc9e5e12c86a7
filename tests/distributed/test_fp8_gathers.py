"""ZeRO-3 gathers weights of fp8 linears in fp8: half the bytes, and to the bit the numbers of whole weights that are cast."""

from __future__ import annotations

from pathlib import Path

import pytest
from fp8_runs import LINEARS, change_a_weight, compare, interrupted


@pytest.mark.parametrize(("pipelined", "compiled"), [(False, False), (True, False), (True, True)])
def test_a_byte_an_element_gives_the_same_numbers(run_ranks, pipelined: bool, compiled: bool):
    """In bf16 go weights of a Borrower, one of a Reader, and those of a module that the script calls in evaluation."""
    for gathered in run_ranks(2, compare, pipelined, compiled):
        assert {LINEARS, LINEARS // 2} <= gathered
        assert (2 * LINEARS in gathered) == (not compiled)


@pytest.mark.parametrize("pipelined", [False, True])
def test_scales_follow_weights_whatever_changes_them(run_ranks, tmp_path: Path, pipelined: bool):
    """Losses are those of stage 2, where whole weights are cast."""
    whole, shards = (run_ranks(2, interrupted, stage, pipelined, str(tmp_path / str(stage))) for stage in (2, 3))
    assert shards == whole
    assert "nan" in whole[0]


@pytest.mark.parametrize("change", ["master", "weight"])
def test_a_weight_that_is_changed_in_a_step_is_cast_again(run_ranks, change: str):
    """The loss after the change is the loss of a step that begins with the changed weight."""
    for stage in (1, 3) if change == "master" else (1,):
        for before, between in run_ranks(2, change_a_weight, stage, change):
            assert before[0] != between[0]
            assert before[1] == between[1]
