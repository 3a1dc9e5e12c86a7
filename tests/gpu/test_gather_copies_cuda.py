"""Weights of ZeRO-3 gathered by copies: every byte arrives, and training gives the bits that it gives over NCCL."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import toy
from layouts import SHARDED, make_engine, own_iterator, run_steps
from ranks import RankPools
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.gathers import mapped_bytes, open_gather_copies
from parallel3d.comm.topology import ProcessTopology
from parallel3d.zero.weights import weights_of

ROUNDS, SIZES = 1_000, (1, 4097, 1 << 20)
WORLDS = [2, 4]


def gathered() -> int:
    """The number of wrong elements in rounds in which every rank writes its shards, some of them late."""
    size, device = dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    groups = ProcessGroups(ProcessTopology(["data"], [size]))
    copies = open_gather_copies(groups, device, sum(mapped_bytes(4 * n) for n in SIZES))
    assert copies is not None
    shards = [copies.keep(torch.zeros(n, device=device)) for n in SIZES]
    wholes = [torch.empty(n * size, device=device) for n in SIZES]
    rank, wrong = groups.rank, torch.zeros((), dtype=torch.int64, device=device)
    shared, own = random.Random(7), random.Random(100 + rank)
    for number in range(ROUNDS):
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(2_000_000))
        k = shared.randrange(len(SIZES))
        shards[k].fill_(number * size + rank)
        copies.gather(wholes[k], shards[k]).wait()
        wanted = torch.arange(number * size, (number + 1) * size, device=device).repeat_interleave(SIZES[k])
        wrong += (wholes[k] != wanted).sum()
    return int(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_every_shard_arrives(gpu_pool: RankPools, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    assert gpu_pool.run(world, gathered, timeout=180) == [0] * world


def train(pp: int, peer_copies: bool, config: dict[str, Any]) -> tuple[Any, bool]:
    """Losses, norms and weights, and whether weights were gathered by copies."""
    zero = {"stage": 3, "peer_copies": peer_copies, **SHARDED}
    engine = make_engine(toy.model(False), toy.cross_entropy, pipeline={"stages": pp}, zero_optimization=zero, **config)
    sharded = next(weights for p in engine.module.parameters() if (weights := weights_of(p)) is not None)
    per_step = engine.gradient_accumulation_steps() * engine.grid.get_data_parallel_world_size()
    data = own_iterator(engine, [toy.micro_batch(k, "tensor") for k in range(4 * per_step)])
    return run_steps(engine, data, 4), sharded.partition.gather_copies is not None


@pytest.mark.parametrize(("pp", "dp"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_training_has_the_same_bits(gpu_pool: RankPools, num_gpus: int, pp: int, dp: int, config: dict[str, Any]):
    if pp * dp > num_gpus:
        pytest.skip(f"needs {pp * dp} CUDA devices")
    copied, plain = (gpu_pool.run(pp * dp, train, pp, asked, config) for asked in (True, False))
    for ((losses, norms, weights), used), ((wanted, of_norms, of_weights), unused) in zip(copied, plain, strict=True):
        assert used
        assert not unused
        assert (losses, norms) == (wanted, of_norms)
        for name, weight in weights.items():
            other: Tensor = of_weights[name]
            assert torch.equal(weight, other), name
