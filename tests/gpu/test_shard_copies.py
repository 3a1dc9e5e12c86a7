"""Shards between slices on real devices: every byte arrives, however it is taken, and sliced layers compute the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import Tensor, nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import ShardCopies, open_shard_copies, shard_channels
from parallel3d.comm.topology import ProcessTopology
from parallel3d.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_sequence, scatter_sequence

pytestmark = pytest.mark.usefixtures("compiled_kernels")

ROUNDS = 2_000
WORLDS = [2, 4]
HIDDEN, FFN, SHARD = 256, 1024, 768


def opened(asked: bool) -> tuple[Any, ProcessGroups, torch.device]:
    size, device = dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    groups = ProcessGroups(ProcessTopology(["data", "model"], [1, size]))
    copies: Any = open_shard_copies(groups, device) if asked else None
    assert isinstance(copies, ShardCopies) == asked
    groups.model.use_shard_messages(copies)
    return copies, groups, device


def exchange() -> tuple[int, int]:
    """(messages, bytes that differ) of rounds in which every rank sends to all others, some of them late."""
    copies, groups, device = opened(True)
    size, rank = groups.model.size, groups.rank
    shared, own = random.Random(7), random.Random(100 + rank)
    wrong, count = torch.zeros((), dtype=torch.int64, device=device), 0
    most = shard_channels(size).slot_bytes
    ramp = torch.arange(most, device=device, dtype=torch.int64).to(torch.uint8)
    waiting: list[tuple[Any, Tensor, Tensor]] = []
    for number in range(ROUNDS):
        length = shared.choice((1, 3, 4097, 1 << 20, most - 1, most))
        beside = shared.random() < 0.4
        if own.random() < 0.02:
            torch.cuda._sleep(own.randrange(2_000_000))
        for distance in range(1, size):
            copies.send(ramp[:length] + (number + rank) % 251, (rank + distance) % size)
        for distance in range(1, size):
            peer = (rank - distance) % size
            expected = ramp[:length] + (number + peer) % 251
            count += 1
            if beside:
                out = torch.full((length,), 7, dtype=torch.uint8, device=device)
                waiting.append((copies.receive(out, peer), out, expected))
            else:
                with copies.taken((length,), torch.uint8, peer) as given:
                    wrong += (given != expected).sum()
        while len(waiting) > 2 or (waiting and not beside):
            work, out, expected = waiting.pop(0)
            work.wait()
            wrong += (out != expected).sum()
    torch.cuda.synchronize()
    return count, int(wrong)


@pytest.mark.parametrize("world", WORLDS)
def test_every_byte_arrives(gpu_pool: RankPools, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    messages = ROUNDS * (world - 1)
    assert gpu_pool.run(world, exchange, timeout=180) == [(messages, 0)] * world


def train(asked: bool) -> list[Tensor]:
    """Output, and the gradients of a column and a row layer that share sequences, of two samples."""
    _, groups, device = opened(asked)
    group = groups.model
    torch.manual_seed(1)
    column = ColumnParallelLinear(HIDDEN, FFN, group=group, sequence_parallel=True)
    row = RowParallelLinear(FFN, HIDDEN, group=group, sequence_parallel=True)
    layers = nn.Sequential(column, nn.GELU(), row).to(device)
    generator = torch.Generator(device=device).manual_seed(2)
    x = torch.randn(2, SHARD * group.size, HIDDEN, device=device, generator=generator).requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    y = gather_sequence(layers(scatter_sequence(x, group)), group)
    y.square().sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    return [t.detach().cpu() for t in (y, x.grad, *(p.grad for p in layers.parameters() if p.grad is not None))]


@pytest.mark.parametrize("world", WORLDS)
def test_layers_compute_the_same_as_with_nccl(gpu_pool: RankPools, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    nccl, copied = (gpu_pool.run(world, train, asked, timeout=120) for asked in (False, True))
    for a, b in zip(nccl, copied, strict=True):
        assert len(a) == len(b) == 6
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * float(left.abs().max()))
