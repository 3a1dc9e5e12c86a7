"""The rings of one host's messages, with threads for streams: what is sent arrives, in order, whatever the sizes and delays."""

from __future__ import annotations

import random
import weakref
from collections.abc import Sequence

import pytest
import torch
from streams import CurrentStream, ThreadStream

from parallel3d.comm.peer.copies import Arriving, Channels, Receiver, Ring, Sender, pipeline_channels, shard_channels

SLOT = 64


def ring_after(num_slots: int, times: int) -> tuple[Sender, Receiver, list[ThreadStream]]:
    """The ends of a ring whose slots have all been filled so often, and streams: the sender's, the second, the current one."""
    slots = list(torch.zeros(num_slots * SLOT, dtype=torch.uint8).split(SLOT))
    counts = [torch.full((num_slots,), (times + 2**31) % 2**32 - 2**31, dtype=torch.int32) for _ in range(2)]
    ring = Ring(slots, *counts)
    streams = [ThreadStream(1), ThreadStream(2), ThreadStream(3)]
    sender, receiver = Sender(ring), Receiver(ring, streams[1], CurrentStream(streams[2]))
    sender._count = receiver._count = times * num_slots
    return sender, receiver, streams


def exchange(sizes: Sequence[int], num_slots: int, times: int = 0, order: random.Random | None = None) -> None:
    """Send random bytes of these sizes, some time before or after they are expected; take them in order, or in any."""
    sender, receiver, streams = ring_after(num_slots, times)
    taker = streams[2]
    generator = torch.Generator().manual_seed(len(sizes))
    sent = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    got = [torch.full((n,), 255, dtype=torch.uint8) for n in sizes]
    expected: list[Arriving] = []
    for k in range(len(sizes) + 3):
        if k >= 3:
            expected.append(receiver.expect(got[k - 3]))
        if k < len(sizes):
            sender.send(sent[k].data_ptr(), sizes[k], taker.mark(), streams[0])
        while expected and (order is None or order.random() < 0.5):
            expected.pop(0 if order is None else order.randrange(len(expected))).wait()
    for arriving in expected:
        arriving.wait()
    ended = [stream.close() for stream in streams]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_all_arrives_in_order_in_pieces_and_with_tails(num_slots: int) -> None:
    rng = random.Random(num_slots)
    exchange([rng.choice((1, 7, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT, 9 * SLOT + 13)) for _ in range(60)], num_slots)


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_messages_are_taken_in_any_order(num_slots: int) -> None:
    """However many are expected at once: of those that fill the ring the first go out beside."""
    for seed in range(4):
        rng = random.Random(seed)
        exchange([rng.choice((1, SLOT, SLOT + 1, 3 * SLOT, 5 * SLOT)) for _ in range(40)], num_slots, order=rng)


def test_a_message_that_waits_holds_up_none_that_needs_its_slot_next() -> None:
    """The first of four slots keeps a message, two are empty again: the next messages use the fourth, then the first."""
    sender, receiver, streams = ring_after(4, 0)
    taker = streams[2]
    sizes = [SLOT, 2 * SLOT, 2 * SLOT]
    sent = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    got = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    for data in sent:
        sender.send(data.data_ptr(), data.numel(), taker.mark(), streams[0])
    first = receiver.expect(got[0])
    for memory in got[1:]:
        receiver.expect(memory).wait()
    first.wait()
    ended = [stream.close() for stream in streams]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_memory_of_a_message_that_nobody_takes_is_kept_until_it_has_come() -> None:
    sender, receiver, streams = ring_after(1, 0)
    outgoing, beside, _ = streams
    memory = torch.zeros(SLOT, dtype=torch.uint8)
    reference = weakref.ref(memory)
    receiver.expect(memory)
    del memory
    assert reference() is not None
    # The ring has one slot: what is expected next makes the first message leave it.
    receiver.expect(torch.zeros(SLOT, dtype=torch.uint8))
    data = torch.full((SLOT,), 7, dtype=torch.uint8)
    sender.send(data.data_ptr(), SLOT, outgoing.mark(), outgoing)
    ended = [stream.close() for stream in streams]
    assert all(ended), "a stream stands still"
    (held,) = beside.held
    assert held is reference()
    assert torch.equal(held, data)


def test_counts_wrap_around() -> None:
    """A count is an int32: of a slot that was filled 2^31 times it is negative, after 2^32 zero again."""
    for times in (2**31 - 2, 2**32 - 2):
        exchange([SLOT] * 24, 4, times)


def test_pieces_are_left_in_any_order() -> None:
    """Two streams take every other piece each, one of them late: neither holds up a slot of the other's."""
    sender, receiver, streams = ring_after(4, 0)
    outgoing, takers = streams[0], (streams[2], ThreadStream(4))
    sent = [torch.full((SLOT,), number, dtype=torch.uint8) for number in range(40)]
    got = [torch.full((SLOT,), 255, dtype=torch.uint8) for _ in sent]
    for number, (data, out) in enumerate(zip(sent, got, strict=True)):
        sender.send(data.data_ptr(), SLOT, outgoing.mark(), outgoing)
        slot, taker = receiver.next_slot(), takers[number % 2]
        slot.wait_until_filled(taker)
        if number % 2:
            taker.pause(1e-3)
        taker.copy(out.data_ptr(), slot.address, SLOT)
        slot.release(taker)
    ended = [stream.close() for stream in (*streams, takers[1])]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


@pytest.mark.parametrize("num_slices", range(2, 9))
def test_every_slot_of_slices_is_aligned_for_products(num_slices: int) -> None:
    """However many: 32 MiB are no multiple of 3."""
    channels = shard_channels(num_slices)
    assert channels.slot_bytes % 256 == 0
    assert 0.99 * 2**25 < num_slices * channels.slot_bytes <= 2**25


def small(channels: Channels) -> Channels:
    return Channels(channels.peers, channels.num_slots, SLOT)


@pytest.mark.parametrize(
    ("channels", "pairs"),
    [(small(pipeline_channels(n)), 2 if n == 2 else 2 * n) for n in (2, 3, 4, 7)]
    + [(small(shard_channels(n)), n * (n - 1)) for n in (2, 3, 4, 8)],
)
def test_channels_share_no_byte(channels: Channels, pairs: int) -> None:
    """Every ordered pair of ranks that send to each other has slots and counts of its own."""
    memory = [torch.zeros(channels.num_bytes, dtype=torch.uint8) for _ in channels.peers]
    ends = [(s, t) for t, peers in enumerate(channels.peers) for s in peers]
    assert len(ends) == pairs
    for number, (source, target) in enumerate(ends, start=1):
        ring = channels.ring(source, target, memory.__getitem__)
        for part in (*ring.slots, ring.filled.view(torch.uint8), ring.emptied.view(torch.uint8)):
            assert not part.any(), "another channel's"
            part.fill_(number)
        assert len(ring.slots) == len(ring.filled) == len(ring.emptied) == channels.num_slots
        assert all(slot.numel() == SLOT and slot.data_ptr() >= memory[target].data_ptr() for slot in ring.slots)
    first = channels.ring(*ends[0], memory.__getitem__)
    assert first.filled.view(torch.uint8).tolist() == [1] * 4 * channels.num_slots
