"""comms_logger over NCCL counts the collectives that are made, which are those of the same layout over gloo."""

from __future__ import annotations

from math import inf

import pytest
from collective_counts import log_of
from ranks import RankPool, RankPools


@pytest.mark.parametrize("stage", [2, 3])
def test_the_log_has_the_collectives_of_the_layout_and_their_time(gpu_pool: RankPools, rank_pool: RankPool, stage: int):
    (logged, made, printed), (other, *_) = gpu_pool.run(2, log_of, {}, stage)
    assert logged == other == rank_pool.run(2, log_of, {}, stage)[0][0]
    assert sum(logged.values()) == sum(made.values())
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert {(row[0], int(row[1])): int(row[2]) for row in rows} == logged
    for *_, total, _, rate, bus, straggler in rows:
        assert float(total) > 0
        assert 0 <= float(bus) <= float(rate) < inf
        assert 0 <= float(straggler) <= float(total)
