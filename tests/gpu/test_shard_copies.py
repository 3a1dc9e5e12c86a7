"""Shards between slices on real devices: every byte arrives, however it is taken, and sliced layers compute the same.

Streams wait for them by the driver, or by the kernel of csrc/await_count.cu.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch import Tensor, nn

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.message_wait import open_message_wait
from parallel3d.comm.peer.shard_copies import ShardCopies, open_shard_copies, slice_channels
from parallel3d.errors import CommunicationError
from parallel3d.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_sequence, scatter_sequence
from parallel3d.topology import ProcessTopology

pytestmark = pytest.mark.usefixtures("compiled_kernels")

ROUNDS = 2_000
WORLDS = [2, 4]
HIDDEN, FFN, SHARD = 256, 1024, 768


def opened(asked: bool, by_kernel: bool) -> tuple[Any, ProcessGroups, torch.device]:
    size, device = dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    groups = ProcessGroups(ProcessTopology(["data", "model"], [1, size]))
    open_shard_copies(groups, device, asked, by_kernel)
    copies: Any = groups.model.kernels.copies
    assert isinstance(copies, ShardCopies) == asked
    return copies, groups, device


def exchange(by_kernel: bool) -> tuple[int, int]:
    """(messages, bytes that differ) of rounds in which every rank sends to all others, some of them late."""
    copies, groups, device = opened(True, by_kernel)
    size, rank = groups.model.size, groups.rank
    shared, own = random.Random(7), random.Random(100 + rank)
    wrong, count = torch.zeros((), dtype=torch.int64, device=device), 0
    most = slice_channels(size).slot_bytes
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


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_every_byte_arrives(gpu_pool: RankPool, num_gpus: int, world: int, by_kernel: bool):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    messages = ROUNDS * (world - 1)
    assert gpu_pool.run(world, exchange, by_kernel, timeout=180) == [(messages, 0)] * world


def train(asked: bool, by_kernel: bool) -> list[Tensor]:
    """Output, and the gradients of a column and a row layer that share sequences, of two samples."""
    _, groups, device = opened(asked, by_kernel)
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
def test_layers_compute_the_same_as_with_nccl(gpu_pool: RankPool, num_gpus: int, world: int):
    if world > num_gpus:
        pytest.skip(f"needs {world} CUDA devices")
    ways = (False, False), (True, False), (True, True)
    nccl, first, second = (gpu_pool.run(world, train, *way, timeout=120) for way in ways)
    for a, b, c in zip(nccl, first, second, strict=True):
        assert len(a) == len(b) == 6
        for left, right in zip(a, b, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * float(left.abs().max()))
        assert all(torch.equal(left, right) for left, right in zip(b, c, strict=True))


def wait_for_nobody() -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    waits = open_message_wait(device, True, limit_s=0.5)
    assert waits is not None
    word = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    waits.wait(torch.cuda.current_stream(device).cuda_stream, word.data_ptr(), 1)
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pass  # nothing is computed with what did not come
    else:
        return "the device went on"
    try:
        waits.wait(torch.cuda.current_stream(device).cuda_stream, word.data_ptr(), 1)
    except CommunicationError as error:
        return str(error)
    return "nothing was raised"


def test_a_message_that_never_comes_ends_the_wait(num_gpus: int):
    pool = RankPool("cuda")  # whose device is lost
    try:
        (said,) = pool.run(1, wait_for_nobody, timeout=120)
    finally:
        pool.close()
    assert "did not come within 0.5 s" in said
