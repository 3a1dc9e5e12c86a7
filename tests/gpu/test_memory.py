"""The memory of a batch on GPUs equals the program's prediction."""

from __future__ import annotations

import activations
import pytest
from ranks import RankPools


@pytest.mark.parametrize("schedule", activations.SCHEDULES)
def test_activations_in_flight_are_predicted(gpu_pool: RankPools, schedule: str):
    first, *_ = gpu_pool.run(2, activations.report, schedule, 512)
    activations.check_report(schedule, first, 512, messages=2)
