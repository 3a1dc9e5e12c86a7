"""On GPUs the host enqueues a step and goes on: nothing in train_batch waits for the device, but fp16's one flag."""

from __future__ import annotations

import warnings

import pytest
import torch
from host_reads import LAYOUTS, PRECISIONS, READS, data, decoder_data, make, make_decoder
from ranks import RankPools

from parallel3d import DeepSpeedEngine as Engine

WARMUP, STEPS = 2, 3
SLEEP = 1_500_000_000  # cycles: most of a second, many times what the host needs for a step


def train(engine: Engine, iterator: object, mode: str) -> list[str]:
    """Return torch's warnings of synchronizing calls in STEPS steps; in mode "error" the first raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(STEPS):
                engine.train_batch(iterator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(warning.message) for warning in seen if "synchroniz" in str(warning.message)]


def steps(layout: str, precision: str) -> tuple[list[str], bool]:
    """Synchronizing calls; and whether the host was done with a step while the device was still busy with what came before."""
    engine, iterator = (
        (make_decoder(precision), decoder_data()) if layout == "decoder" else (make(layout, precision), data())
    )
    for _ in range(WARMUP):
        engine.train_batch(iterator)
    said = train(engine, iterator, "warn" if READS[precision] else "error")
    was_ahead = False
    for _ in range(2):  # in the first, the caches of pinned memory grow to what a whole step holds
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        before = torch.cuda.Event()
        before.record()
        engine.train_batch(iterator)
        was_ahead = not before.query()
    return said, was_ahead


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "decoder"])
def test_the_host_does_not_wait_for_the_device(gpu_pool: RankPools, layout: str, precision: str):
    num_ranks = LAYOUTS[layout][0] if layout in LAYOUTS else 2
    for said, was_ahead in gpu_pool.run(num_ranks, steps, layout, precision):
        assert len(said) == STEPS * READS[precision], said
        # What CUDA itself waits in, such as a copy from pageable memory, no debug mode tells.
        assert was_ahead == (READS[precision] == 0)
