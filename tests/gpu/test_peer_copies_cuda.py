"""Peer copies on real devices: every byte arrives, in both directions at once, whatever sizes, delays and reuse of memory."""

from __future__ import annotations

import random

import pytest
import torch
from ranks import RankPool

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.buffers import TensorKind, loan_of
from parallel3d.comm.peer.peer_copies import open_peer_copies, pipeline_channels
from parallel3d.topology import PipeDataParallelTopology

pytestmark = pytest.mark.usefixtures("compiled_kernels")

ROUNDS = 200
NUM_SLOTS, SLOT_BYTES = pipeline_channels(2).num_slots, pipeline_channels(2).slot_bytes


def pattern(source: int, target: int, number: int, size: int, device: torch.device) -> torch.Tensor:
    """What a message holds, by who sends it."""
    generator = torch.Generator(device=device).manual_seed(1_000_003 * number + 1009 * source + target)
    return torch.randint(256, (size,), dtype=torch.uint8, device=device, generator=generator)


def size_of(number: int, source: int, target: int) -> int:
    """Of small and odd messages, those of a slot and about one, and of more than the whole ring."""
    rng = random.Random(number * 97 + source * 11 + target)
    return rng.choice(
        (1, 3, 4097, 1 << 20, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 5, (NUM_SLOTS + 1) * SLOT_BYTES + 7)
    )


def exchange(num_stages: int, by_kernel: bool) -> tuple[int, int]:
    """(messages, bytes that differ) of rounds in which every rank sends to and receives from its neighbours."""
    groups = ProcessGroups(PipeDataParallelTopology(num_stages, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    copies = open_peer_copies(groups, device, by_kernel)
    assert copies is not None
    stage, rng = groups.coordinate("pipe"), random.Random(groups.rank)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    count = 0
    for number in range(ROUNDS):
        works = []
        for other in pipeline_channels(num_stages).peers[stage]:
            data = pattern(stage, other, number, size_of(number, stage, other), device)
            (work,) = copies.send([data], other)
            kind = TensorKind((size_of(number, other, stage),), torch.uint8, device)
            works.append((other, *copies.receive([kind], other, None), work))
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(2_000_000))
        for other, received, sent in works:
            buffer = received.wait()
            wrong += (buffer != pattern(other, stage, number, buffer.numel(), device)).sum()
            sent.wait()
            count += 1
    torch.cuda.synchronize()
    return count, int(wrong)


def sizes_of(number: int) -> list[int]:
    """Of a message's tensors: one of them stays, unless it is larger than a slot."""
    most = pipeline_channels(2, in_place=True).slot_bytes
    return [[1], [4097, 1 << 20], [most - 1, 5], [most], [most + 1], [3, most, 1 << 20, 2 * most + 3]][number % 6]


def exchange_in_place(num_stages: int, by_kernel: bool, behind: int | None) -> tuple[int, int]:
    """(messages of which a tensor stayed, bytes that differ) of rounds after which the newest messages of each neighbour are
    kept, as many as come `behind` each, 9 where that isn't known, and looked at again before they are dropped.
    """
    held = 9 if behind is None else behind
    groups = ProcessGroups(PipeDataParallelTopology(num_stages, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    copies = open_peer_copies(groups, device, by_kernel, in_place=True)
    assert copies is not None
    stage, rng = groups.coordinate("pipe"), random.Random(groups.rank)
    peers = pipeline_channels(num_stages).peers[stage]
    wrong, stayed = torch.zeros((), dtype=torch.int64, device=device), 0
    kept: dict[int, list[tuple[int, list[torch.Tensor]]]] = {other: [] for other in peers}
    for number in range(ROUNDS):
        sizes = sizes_of(number)
        sent = []
        for other in peers:
            sent += copies.send([pattern(stage, other, number, size, device) for size in sizes], other)
        kinds = [TensorKind((size,), torch.uint8, device) for size in sizes]
        received = {other: copies.receive(kinds, other, behind) for other in peers}
        if rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(2_000_000))
        for other in peers:
            kept[other].append((number, [incoming.wait() for incoming in received[other]]))
            stayed += sum(loan_of(tensor) is not None for tensor in kept[other][-1][1])
            if len(kept[other]) > held:
                for then, tensors in kept[other]:
                    for tensor in tensors:
                        wrong += (tensor != pattern(other, stage, then, tensor.numel(), device)).sum()
                del kept[other][0], tensors, tensor
        for work in sent:
            work.wait()
    torch.cuda.synchronize()
    return stayed, int(wrong)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("behind", [0, 1, 4, 5, None])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_messages_stay_as_they_came_while_anything_refers_to_them(
    gpu_pool: RankPool, num_gpus: int, num_stages: int, behind: int | None, by_kernel: bool
):
    if num_stages > num_gpus:
        pytest.skip(f"needs {num_stages} CUDA devices")
    most = sum(sizes_of(k) != sizes_of(4) for k in range(ROUNDS)) * len(pipeline_channels(num_stages).peers[0])
    for stayed, wrong in gpu_pool.run(num_stages, exchange_in_place, num_stages, by_kernel, behind, timeout=60):
        # With 5 behind the ring's six slots would all be taken when the next message is posted.
        assert stayed == (most if behind in (0, 1, 4) else 0)
        assert wrong == 0


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_every_byte_arrives(gpu_pool: RankPool, num_gpus: int, num_stages: int, by_kernel: bool):
    if num_stages > num_gpus:
        pytest.skip(f"needs {num_stages} CUDA devices")
    for count, wrong in gpu_pool.run(num_stages, exchange, num_stages, by_kernel, timeout=60):
        assert count == ROUNDS * len(pipeline_channels(num_stages).peers[0])
        assert wrong == 0
