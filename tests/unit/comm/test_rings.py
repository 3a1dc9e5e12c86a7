"""The rings of one host's messages, with threads for streams: what is sent arrives, in order, whatever the sizes and delays."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Sequence

import pytest
import torch
from streams import CurrentStream, ThreadStream

from parallel3d.comm.peer import rings
from parallel3d.comm.peer.buffers import TensorKind, loan_of
from parallel3d.comm.peer.channels import Channels
from parallel3d.comm.peer.peer_copies import pipeline_channels
from parallel3d.comm.peer.rings import Arriving, Receiver, Ring, Sender, Staying
from parallel3d.comm.peer.shard_copies import slice_channels
from parallel3d.errors import CommunicationError

SLOT = 64


def ring_after(num_slots: int, times: int) -> tuple[Sender, Receiver, list[ThreadStream]]:
    """The ends of a ring whose slots have all been filled so often, and the streams that they use, the sender's first."""
    slots = list(torch.zeros(num_slots * SLOT, dtype=torch.uint8).split(SLOT))
    counts = [torch.full((num_slots,), rings._int32(times), dtype=torch.int32) for _ in range(2)]
    ring = Ring(slots, *counts)
    streams = [ThreadStream(1), ThreadStream(2)]
    sender, receiver = Sender(ring), Receiver(ring, streams[1])
    sender._count = receiver._count = times * num_slots
    return sender, receiver, streams


def exchange(sizes: Sequence[int], num_slots: int, times: int = 0, order: random.Random | None = None) -> None:
    """Send random bytes of these sizes, some time before or after they are expected; take them in order, or in any."""
    sender, receiver, streams = ring_after(num_slots, times)
    taker = ThreadStream(3)
    streams.append(taker)
    generator = torch.Generator().manual_seed(len(sizes))
    sent = [torch.randint(256, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    got = [torch.full((n,), 255, dtype=torch.uint8) for n in sizes]
    expected: list[Arriving] = []
    for k in range(len(sizes) + 3):
        if k >= 3:
            expected.append(receiver.expect(got[k - 3], taker.mark()))
        if k < len(sizes):
            sender.send(sent[k].data_ptr(), sizes[k], taker.mark(), streams[0])
        while expected and (order is None or order.random() < 0.5):
            expected.pop(0 if order is None else order.randrange(len(expected))).take(taker)
    for arriving in expected:
        arriving.take(taker)
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
    """Of four slots the first keeps a message, two are empty again: the next one takes the fourth, and the first."""
    sender, receiver, streams = ring_after(4, 0)
    taker = ThreadStream(3)
    sizes = [SLOT, 2 * SLOT, 2 * SLOT]
    sent = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    got = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    for data in sent:
        sender.send(data.data_ptr(), data.numel(), taker.mark(), streams[0])
    first = receiver.expect(got[0], taker.mark())
    for memory in got[1:]:
        receiver.expect(memory, taker.mark()).take(taker)
    first.take(taker)
    ended = [stream.close() for stream in (*streams, taker)]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_memory_of_a_message_that_nobody_takes_is_kept_until_it_has_come() -> None:
    sender, receiver, (outgoing, beside) = ring_after(1, 0)
    memory = torch.zeros(SLOT, dtype=torch.uint8)
    reference = weakref.ref(memory)
    receiver.expect(memory, beside.mark())
    del memory
    assert reference() is not None
    # The ring has one slot: what is expected next makes the first message leave it.
    receiver.expect(torch.zeros(SLOT, dtype=torch.uint8), beside.mark())
    data = torch.full((SLOT,), 7, dtype=torch.uint8)
    sender.send(data.data_ptr(), SLOT, outgoing.mark(), outgoing)
    ended = [stream.close() for stream in (outgoing, beside)]
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
    sender, receiver, (outgoing, beside) = ring_after(4, 0)
    takers = ThreadStream(3), ThreadStream(4)
    sent = [torch.full((SLOT,), number, dtype=torch.uint8) for number in range(40)]
    got = [torch.full((SLOT,), 255, dtype=torch.uint8) for _ in sent]
    for number, (data, out) in enumerate(zip(sent, got, strict=True)):
        sender.send(data.data_ptr(), SLOT, outgoing.mark(), outgoing)
        place, taker = receiver.next_place(), takers[number % 2]
        place.await_piece(taker)
        if number % 2:
            taker.pause(1e-3)
        taker.copy(out.data_ptr(), place.slot, SLOT)
        place.leave(taker)
    ended = [stream.close() for stream in (outgoing, beside, *takers)]
    assert all(ended), "a stream stands still"
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def kind(size: int = SLOT) -> TensorKind:
    return TensorKind((size // 8, 2), torch.float32, torch.device("cpu"))


class Stay:
    """Both ends of a ring whose messages stay, on streams of threads; the `taker` is the one that computes."""

    def __init__(self, num_slots: int):
        self.sender, self.receiver, (self.outgoing, self.beside) = ring_after(num_slots, 0)
        self.taker = ThreadStream(3)
        self.sent: list[torch.Tensor] = []

    def send(self, value: float, size: int = SLOT) -> None:
        data = torch.full((size // 4,), value)
        self.sent.append(data)
        self.sender.send(data.data_ptr(), size, self.outgoing.mark(), self.outgoing)

    def expect(self, size: int = SLOT) -> Staying:
        self.receiver.end_loans(self.taker)
        return self.receiver.expect_to_stay(kind(size), CurrentStream(self.taker))

    def take(self, message: Staying) -> torch.Tensor:
        self.receiver.prepare(message, self.taker)
        return message.take(self.taker)

    def settle(self) -> None:
        self.taker.mark().wait(20)

    def close(self) -> None:
        ended = [stream.close() for stream in (self.outgoing, self.beside, self.taker)]
        assert all(ended), "a stream stands still"


@pytest.mark.parametrize(("num_slots", "held"), [(2, 1), (4, 1), (4, 3), (6, 5)])
def test_a_message_stays_in_its_slot_until_nothing_refers_to_it(num_slots: int, held: int) -> None:
    """Others come meanwhile, and none over it, however late the streams are: the last look at it is queued right before it is
    dropped. Whatever refers to it last may be a view.
    """
    ends, rng = Stay(num_slots), random.Random(held)
    kept: deque[tuple[int, torch.Tensor]] = deque()
    slots: set[int] = set()
    seen = torch.full((60, SLOT // 4), -1.0)
    for number in range(60 + held):
        if number < 60:
            message = ends.expect()
            ends.send(float(number))
            tensor = ends.take(message)
            slots.add(tensor.data_ptr())
            assert loan_of(tensor) is not None
            kept.append((number, tensor[:] if rng.random() < 0.5 else tensor))
            del tensor
        if number >= held:
            then, view = kept.popleft()
            if rng.random() < 0.2:
                ends.taker.pause(2e-3)
            ends.taker.copy(seen[then].data_ptr(), view.data_ptr(), SLOT)
            del view
    ends.close()
    assert torch.equal(seen, torch.arange(60.0)[:, None].expand_as(seen))
    assert len(slots) == num_slots
    assert loan_of(torch.zeros(3)) is None


def test_a_slot_is_given_back_when_streams_that_were_told_of_are_past_it() -> None:
    ends, other = Stay(1), ThreadStream(5)
    seen = torch.zeros(kind().shape)
    first = ends.expect()
    ends.send(1.0)
    tensor = ends.take(first)
    ends.settle()
    other.pause(0.05)
    other.copy(seen.data_ptr(), tensor.data_ptr(), SLOT)
    loan = loan_of(tensor)
    assert loan is not None
    loan.marks.append(other.mark())
    del tensor
    second = ends.expect()
    ends.send(2.0)
    tensor = ends.take(second)
    ends.settle()
    assert (tensor == 2).all()
    assert (seen == 1).all()
    ends.close()
    assert other.close()


def test_what_is_kept_for_too_long_is_an_error_with_the_remedy_and_not_a_stream_that_stands_still() -> None:
    ends = Stay(2)
    kept = []
    for number in range(2):
        message = ends.expect()
        ends.send(float(number))
        kept.append(ends.take(message))
    message = ends.expect()
    with pytest.raises(
        CommunicationError,
        match=r"the tensor float32 \[8, 2\] which came 2 messages before.*set pipeline.receive_in_place to false",
    ):
        ends.take(message)
    cycle: list[object] = [kept.pop(0)]
    cycle.append(cycle)
    del cycle  # garbage that only the collector frees
    ends.send(7.0)
    tensor = ends.take(message)
    ends.settle()
    assert (tensor == 7).all()
    assert (kept[0] == 1).all()
    ends.close()


def test_a_tensor_in_a_slot_keeps_the_ring_s_memory_and_nothing_else_does() -> None:
    """Whether the receiver goes first or with the tensor, in a cycle; and no collector is needed for what is in none."""
    gc.disable()
    try:
        for cyclic in (False, True):
            ends = Stay(2)
            memory = weakref.ref(ends.receiver._ring)
            message = ends.expect()
            ends.send(3.0)
            tensor = ends.take(message)
            ends.close()
            cycle: list[object] = [tensor, ends.receiver]
            del message, ends
            assert memory() is not None
            if cyclic:
                cycle.append(cycle)
                del cycle, tensor
                gc.collect()
            else:
                del cycle
                assert (tensor == 3).all()
                assert memory() is not None
                del tensor
            assert memory() is None
    finally:
        gc.enable()


def test_a_message_that_is_to_stay_leaves_the_ring_where_another_needs_its_slot_first() -> None:
    """Before it is taken: of rings whose messages have more pieces than ever before."""
    ends = Stay(3)
    messages = [ends.expect() for _ in range(5)]
    for number in range(5):
        ends.send(float(number))
    for number in (1, 0, 4, 2, 3):
        tensor = ends.take(messages[number])
        ends.settle()
        assert (tensor == number).all()
        assert (loan_of(tensor) is None) == (number < 2)
        del tensor
        ends.receiver.end_loans(ends.taker)
    ends.close()


@pytest.mark.parametrize("num_slices", range(2, 9))
def test_every_slot_of_slices_is_aligned_for_products(num_slices: int) -> None:
    """However many: 32 MiB are no multiple of 3."""
    channels = slice_channels(num_slices)
    assert channels.slot_bytes % 256 == 0
    assert 0.99 * 2**25 < num_slices * channels.slot_bytes <= 2**25


def small(channels: Channels) -> Channels:
    return Channels(channels.peers, channels.num_slots, SLOT)


@pytest.mark.parametrize(
    ("channels", "pairs"),
    [(small(pipeline_channels(n, kind)), 2 if n == 2 else 2 * n) for n in (2, 3, 4, 7) for kind in (False, True)]
    + [(small(slice_channels(n)), n * (n - 1)) for n in (2, 3, 4, 8)],
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
