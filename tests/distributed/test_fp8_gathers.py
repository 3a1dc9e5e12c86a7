"""ZeRO-3 gathers weights of fp8 linears in fp8: half the bytes, and to the bit the numbers of whole weights that are cast."""

from __future__ import annotations

import pytest
from fp8_runs import LINEARS, compare


@pytest.mark.parametrize(("pipelined", "compiled"), [(False, False), (True, False), (True, True)])
def test_a_byte_an_element_gives_the_same_numbers(run_ranks, pipelined: bool, compiled: bool):
    """In bf16 go weights of a Borrower, one of a Reader, and those of a module that the script calls in evaluation."""
    for gathered in run_ranks(2, compare, pipelined, compiled):
        assert {LINEARS, LINEARS // 2} <= gathered
        assert (2 * LINEARS in gathered) == (not compiled)
