"""Plans with offload: bytes and seconds counted by hand, and the layout against a prediction of every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_clusters import with_quick_hosts
from test_search import of_blocks, small_model, traced

from parallel3d.config.layout import parse_layout
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict.costs import StepPrediction
from parallel3d.planner.predict.sharded import ONE_WAY
from parallel3d.planner.search.plan import Planner
from parallel3d.planner.search.search import BranchAndBound, evaluate
from parallel3d.schedule.instructions import Op

# Of small_model: attention with 2 of 4 heads for keys and values, the feed-forward's three matrices, two norms.
HIDDEN, FFN, WORDS, LAYERS = 512, 1024, 1024, 6
BLOCK = 3 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
TABLE = WORDS * HIDDEN
# The final norm is a layer of its own, small enough to stay whole.
SHARDED = LAYERS * BLOCK + 2 * TABLE
EVERY = SHARDED + HIDDEN
# Slow enough that each takes longer than all else.
RATES = {"host_bandwidth": "10 MB/s", "host_memory_bandwidth": "20 MB/s", "disk_bandwidth": "3 MB/s"}
ROOMY = {"stage3_max_live_parameters": 2 * EVERY}
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}


def planner_of(
    words: str, zero: dict[str, Any], gpus: int = 1, batch: int = 4, layers: int = LAYERS, **device: Any
) -> Planner:
    model = small_model(seq=64, layers=layers)
    like = traced(model)
    model = replace(model, config={**model.config, "zero_optimization": {"sub_group_size": 100_000, **zero}})
    host = {"gpus": [{"device": "slow", "count": gpus}], "nvlink": {"bandwidth": "400 GB/s"}}
    devices = {"slow": {"base": "H200", **RATES, **device}}
    cluster = load_cluster({"devices": devices, "hosts": [{"pcie": {"bandwidth": "50 GB/s"}, **host}]})
    return Planner(model, with_quick_hosts(cluster), batch, fixed=parse_layout(words), like=like)


def predicted(words: str, zero: dict[str, Any], **more: Any) -> StepPrediction:
    planner = planner_of(words, zero, **more)
    return planner.predictor.predict(planner.space.layout(0))


# Elements x bytes, over the rate: fp32 masters and two moments each way; bf16 weights with them; on the CPU 6 x 4 of that
# state, fp32 gradients written and read as they come, clipped and read again, masters again, and bf16 weights written and read.
STATE, STEP = 12 * EVERY, (6 * 4 + 2 * 4 + 5 * 4 + 2 * 2) * EVERY
WAYS: dict[str, tuple[dict[str, Any], float, int, int]] = {
    "state": ({"offload_optimizer": CPU}, STATE / 10e6, STATE, 0),
    "weights": ({"offload_param": CPU}, 2 * SHARDED / 10e6, 2 * SHARDED, 0),
    "both": ({"offload_optimizer": CPU, "offload_param": CPU}, (STATE + 2 * SHARDED) / 10e6, STATE + 2 * SHARDED, 0),
    "cpu": ({"offload_optimizer": {**CPU, "step": "cpu"}}, STEP / 20e6, STATE, 0),
    "nvme": ({"offload_optimizer": NVME}, STATE / 3e6, 0, STATE),
    "weights on nvme": ({"offload_param": NVME}, 2 * SHARDED / 3e6, 0, 2 * SHARDED),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_update_takes_as_long_as_its_slowest_transfer(way: str) -> None:
    zero, seconds, host, disk = WAYS[way]
    step = predicted("pp1,1f1b,m4,mb1" + ",zero3" * ("offload_param" in zero), zero)
    [memory] = step.memory
    assert step.optimizer == pytest.approx(seconds, rel=1e-3)
    # On the way to the CPU or the disk, it passes through a few buffers in host memory, too.
    buffers = {"cpu": 4 * 100_000 * 8, "nvme": 8 * 3 * 100_352 * 4, "weights on nvme": 5 * 2 * BLOCK}.get(way, 0)
    assert host * 0.999 <= memory.host <= host * 1.001 + buffers
    assert memory.disk == pytest.approx(disk, rel=1e-2)


@pytest.mark.parametrize(
    ("gpus", "place", "rate"), [(1, CPU, ONE_WAY * 10e6), (4, CPU, ONE_WAY * 10e6), (1, NVME, 3e6)]
)
def test_a_gather_copies_the_shard_to_the_device_first(gpus: int, place: dict[str, Any], rate: float) -> None:
    words = f"dp{gpus},zero3,1f1b,m1,mb1"
    # With room for all weights, each layer's are gathered once, one after the other.
    found = [
        predicted(words, zero, gpus=gpus, batch=gpus)
        for zero in (ROOMY | {"offload_param": place}, ROOMY)[: 1 + (gpus > 1)]
    ]
    offloaded, *without = ({u: s for (op, _, u), s in f.cost.links.items() if op is Op.GATHER_PARAMS} for f in found)
    between = without[0] if without else dict.fromkeys(offloaded, 0.0)
    sizes = {0: TABLE, **dict.fromkeys(range(1, LAYERS + 1), BLOCK), LAYERS + 2: TABLE}
    assert offloaded == pytest.approx({u: between[u] + 2 * n / gpus / rate for u, n in sizes.items()}, rel=1e-3)
    assert found[0].makespan == pytest.approx(2 * SHARDED / gpus / rate, rel=0.02)


def test_memory_that_activations_leave_is_filled_with_weights_at_the_same_peak() -> None:
    words, live = "pp1,zero3,1f1b,m4,mb16", 3 * BLOCK
    zero = {"stage3_max_live_parameters": live}
    off, on = (
        predicted(words, zero | {"offload_param": {**CPU, "fill_freed_memory": fills}}, batch=64)
        for fills in (False, True)
    )
    gathers = [sum(i.op is Op.GATHER_PARAMS for i in step.program.instructions[0]) for step in (off, on)]
    assert gathers[1] < 0.7 * gathers[0]
    assert on.makespan < 0.7 * off.makespan
    assert on.memory[0].parts["gathered"] <= 2 * live
    assert on.memory[0].allocated <= off.memory[0].allocated - off.memory[0].parts["gathered"] + 2 * live


def test_as_many_shards_are_in_host_memory_as_max_in_cpu_says() -> None:
    most = EVERY // 2
    step = predicted("pp2,dp2,zero3,1f1b,m1,mb1", {"offload_param": {**CPU, "max_in_cpu": most // 4}}, gpus=4, batch=2)
    whole = predicted("pp2,dp2,zero3,1f1b,m1,mb1", {}, gpus=4, batch=2)
    for stage, memory in enumerate(step.memory):
        # In whole buckets, of at most 2^20 elements here.
        assert 2 * (most // 4 - 2**20) <= memory.host <= 2 * (most // 4)
        moved = whole.memory[stage].parts["weights"] - memory.parts["weights"]
        assert moved == memory.host


def test_programs_that_gather_less_are_found_where_copies_take_longest() -> None:
    """24 blocks, of which a few fit at a time: breadth-first, a chunk's weights serve all micro-batches."""
    zero = {"offload_param": CPU, "offload_optimizer": CPU}
    memory = "1.12 GB"
    planner = planner_of("zero3,mb1,ckpt1", zero, batch=16, layers=24, memory=memory, host_bandwidth="200 MB/s")
    space = of_blocks(planner)
    found = BranchAndBound(planner.predictor, space).run()
    every = [evaluate(planner.predictor, space.layout(k)) for k in range(len(space))]
    fitting = {step.layout.text: step for step in every if step.fits}
    assert found[0].seconds == pytest.approx(min(step.seconds for step in fitting.values()), rel=1e-9)
    assert found[0].layout.schedule == "gpipe"
    assert found[0].layout.chunks > 1
    depth_first = fitting["pp1,zero3,1f1b,m16,mb1,ckpt1"]
    numbers = [sum(i.op is Op.GATHER_PARAMS for i in step.program.instructions[0]) for step in (found[0], depth_first)]
    assert 3 * numbers[0] < numbers[1]
    assert found[0].seconds < 0.5 * depth_first.seconds
