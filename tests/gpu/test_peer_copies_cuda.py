"""Peer copies on real devices: every byte arrives, in both directions at once, whatever sizes, delays and reuse of memory."""

from __future__ import annotations

import random

import pytest
import torch
from ranks import RankPools

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import open_peer_copies, pipeline_channels
from parallel3d.comm.topology import PipeDataParallelTopology

pytestmark = pytest.mark.usefixtures("compiled_kernels")

ROUNDS = 200
NUM_SLOTS, SLOT_BYTES = pipeline_channels(2).num_slots, pipeline_channels(2).slot_bytes


def pattern(source: int, target: int, number: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the contents of a message from a sender."""
    generator = torch.Generator(device=device).manual_seed(1_000_003 * number + 1009 * source + target)
    return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=generator)


def size_of(number: int, source: int, target: int) -> int:
    """Return the size of a message: small or odd, about one slot, or more than the whole ring."""
    rng = random.Random(number * 97 + source * 11 + target)
    return rng.choice(
        (1, 3, 4097, 1 << 20, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 5, (NUM_SLOTS + 1) * SLOT_BYTES + 7)
    )


def exchange(num_stages: int) -> tuple[int, int]:
    """(messages, bytes that differ) of rounds in which every rank sends to and receives from its neighbours."""
    groups = ProcessGroups(PipeDataParallelTopology(num_stages, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    copies = open_peer_copies(groups, device)
    assert copies is not None
    stage, rng = groups.coordinate("pipe"), random.Random(groups.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    count = 0
    for number in range(ROUNDS):
        works = []
        for other in pipeline_channels(num_stages).peers[stage]:
            data = pattern(stage, other, number, size_of(number, stage, other), device)
            (work,) = copies.send([data], other)
            buffer = torch.empty(size_of(number, other, stage), dtype=torch.uint8, device=device)
            works.append((other, *copies.receive([buffer], other), work))
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(2_000_000))
        for other, received, sent in works:
            buffer = received.wait()
            wrong += (buffer != pattern(other, stage, number, buffer.numel(), device)).sum()
            sent.wait()
            count += 1
    torch.cuda.synchronize()
    return count, int(wrong)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_every_byte_arrives(gpu_pool: RankPools, num_gpus: int, num_stages: int):
    if num_stages > num_gpus:
        pytest.skip(f"needs {num_stages} CUDA devices")
    for count, wrong in gpu_pool.run(num_stages, exchange, num_stages, timeout=60):
        assert count == ROUNDS * len(pipeline_channels(num_stages).peers[0])
        assert wrong == 0
