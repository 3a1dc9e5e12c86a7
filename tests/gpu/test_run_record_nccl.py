"""Records of reductions, steps and memory on GPUs, against torch's own events and counters."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
import toy
from layouts import make_engine, own_iterator
from ranks import RankPools

from parallel3d.monitor.run_record import RunRecord, read_run_record

STEPS = 14


def train(directory: str, zero: int) -> tuple[RunRecord, int, float, int]:
    """The record; torch's peak of a step, seconds of a step by events around all, and buckets of this rank."""
    engine = make_engine(
        toy.model(tied=False),
        accumulation=4,
        pipeline={"stages": 1},
        zero_optimization={"stage": zero, "reduce_bucket_size": 1500},
        run_record={"directory": directory, "after_steps": 10},
    )
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(4 * 2 * 2 * STEPS)])
    ends = []
    for _ in range(STEPS):
        engine.train_batch(data)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(data)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    seconds = median(a.elapsed_time(b) / 1e3 for a, b in pairwise(ends[2:10]))
    return read_run_record(directory), peak, seconds, sum(engine.update.reducer.num_buckets().values())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_run_records_reductions_steps_and_peaks(gpu_pool: RankPools, tmp_path: Path, zero: int):
    for rank, (record, peak, seconds, buckets) in enumerate(gpu_pool.run(2, train, str(tmp_path), zero)):
        assert sum(name.startswith("RED@0#") for name in record.instructions) == buckets
        medians = {name: timing.median for name, timing in record.instructions.items()}
        assert not {name: t for name, t in medians.items() if not 0 < t < record.step.median}, record.step.median
        assert record.step.median == pytest.approx(seconds, rel=0.3)
        assert record.step.count == 10 - 2
        own = record.ranks[rank]
        assert own.allocated is not None
        assert own.allocated == pytest.approx(peak, rel=0.05)
        assert own.reserved is not None
        assert own.reserved >= own.allocated
        assert own.capacity is not None
        assert own.capacity > own.reserved
        assert own.outside is not None
        assert own.outside > 100 * 2**20, "a CUDA context alone takes more"
