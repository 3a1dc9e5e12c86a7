"""The rings of peer copies, played with threads for streams: what is sent arrives, in order, whatever the sizes and delays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.comm import peer_copies
from parallel3d.comm.peer_copies import Receiver, Ring, Sender, buffer_bytes, neighbours, ring_of

SLOT = 64


class ThreadStream:
    """Runs what is queued on a thread of its own, with random pauses, as a CUDA stream runs beside the host."""

    def __init__(self, seed: int):
        self._queue: Queue[Callable[[], Any] | None] = Queue()
        self._rng = random.Random(seed)
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._rng.random() < 0.3:
                time.sleep(self._rng.random() * 1e-3)
            task()

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self._queue.put(lambda: target.copy_(source))

    def wait_for(self, flag: Tensor, count: int) -> None:
        def wait() -> None:
            end = time.monotonic() + 20
            while (int(flag) - count + 2**31) % 2**32 < 2**31:  # signed difference, as the driver compares
                assert time.monotonic() < end, "the flag never came"
                time.sleep(1e-5)

        self._queue.put(wait)

    def write(self, flag: Tensor, count: int) -> None:
        self._queue.put(lambda: flag.fill_(count))

    def close(self) -> bool:
        """Whether all that was queued is done."""
        self._queue.put(None)
        self._thread.join(30)
        return not self._thread.is_alive()


def exchange(sizes: Sequence[int], num_slots: int, first_count: int = 0) -> None:
    """Send random bytes of these sizes, some time before or after they are received."""
    slots = list(torch.zeros(num_slots * SLOT, dtype=torch.uint8).split(SLOT))
    counts = [torch.full((1,), peer_copies._int32(first_count), dtype=torch.int32) for _ in range(2)]
    ring = Ring(slots, *counts)
    streams = ThreadStream(1), ThreadStream(2)
    sender, receiver = Sender(ring, streams[0]), Receiver(ring, streams[1])
    sender._count = receiver._count = first_count
    generator = torch.Generator().manual_seed(len(sizes))
    sent = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    got = [torch.full((n,), 255, dtype=torch.uint8) for n in sizes]
    for k in range(len(sizes) + 3):
        if k >= 3:
            receiver.receive(got[k - 3])
        if k < len(sizes):
            sender.send(sent[k])
    ended = [stream.close() for stream in streams]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_all_arrives_in_order_in_pieces_and_with_tails(num_slots: int) -> None:
    rng = random.Random(num_slots)
    exchange([rng.choice((1, 7, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT, 9 * SLOT + 13)) for _ in range(60)], num_slots)


def test_counts_wrap_around() -> None:
    """A flag is an int32: after 2^31 pieces it is negative, after 2^32 zero again."""
    for start in (2**31 - 5, 2**32 - 5):
        exchange([SLOT] * 12, 4, first_count=start)


@pytest.mark.parametrize("num_stages", [2, 3, 4, 7])
def test_channels_share_no_byte(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ordered pair of neighbours has slots and both flags of its own."""
    monkeypatch.setattr(peer_copies, "SLOT_BYTES", SLOT)
    memory = [torch.zeros(buffer_bytes(num_stages), dtype=torch.uint8) for _ in range(num_stages)]
    channels = [(s, t) for s in range(num_stages) for t in neighbours(s, num_stages)]
    assert len(channels) == (2 if num_stages == 2 else 2 * num_stages)
    for number, (source, target) in enumerate(channels, start=1):
        ring = ring_of(source, target, num_stages, memory.__getitem__)
        for part in (*ring.slots, ring.arrived.view(torch.uint8), ring.freed.view(torch.uint8)):
            assert not part.any(), "another channel's"
            part.fill_(number)
        assert len(ring.slots) == peer_copies.NUM_SLOTS
        assert all(slot.data_ptr() >= memory[target].data_ptr() for slot in ring.slots)
    assert ring_of(0, 1, num_stages, memory.__getitem__).arrived.view(torch.uint8).tolist() == [1] * 4
