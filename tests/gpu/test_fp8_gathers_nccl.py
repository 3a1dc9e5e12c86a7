"""Gathers in fp8 over NCCL give the numbers of weights that are whole, to the bit."""

from __future__ import annotations

import pytest
import torch
from fp8_runs import LINEARS, compare
from ranks import RankPools

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs tensor cores for fp8"
)


def deterministic(pipelined: bool, compiled: bool) -> set[int]:
    torch.use_deterministic_algorithms(True)
    try:
        return compare(pipelined, compiled, "cuda")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("pipelined", "compiled"), [(False, False), (True, False), (True, True)])
def test_a_byte_an_element_gives_the_same_numbers(gpu_pool: RankPools, pipelined: bool, compiled: bool):
    for gathered in gpu_pool.run(2, deterministic, pipelined, compiled):
        assert {LINEARS, LINEARS // 2} <= gathered
        assert (2 * LINEARS in gathered) == (not compiled)
