"""Messages between stages by copies, with threads for streams: what stays in its slot and what doesn't, and what is opened."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from streams import CurrentStream, ThreadStream

from parallel3d.comm.obstacles import Obstacle
from parallel3d.comm.peer import peer_copies
from parallel3d.comm.peer.buffers import TensorKind, loan_of
from parallel3d.comm.peer.peer_copies import PeerCopies, _Ends, open_peer_copies, pipeline_channels

SLOT = 64
IN_PLACE = replace(pipeline_channels(2, in_place=True), slot_bytes=SLOT)
COPIED = replace(pipeline_channels(2), slot_bytes=SLOT)


class Stages:
    """Two stages in one process; all streams compute, copy and receive as threads."""

    def __init__(self) -> None:
        self.streams: list[ThreadStream] = []
        self.computing = [self.new_stream() for _ in range(2)]
        memories = [[torch.zeros(kind.num_bytes, dtype=torch.uint8) for _ in range(2)] for kind in (COPIED, IN_PLACE)]
        self.copies = []
        for stage, stream in enumerate(self.computing):
            ends = [
                _Ends(stage, kind, memory.__getitem__, self.new_stream)
                for kind, memory in zip((COPIED, IN_PLACE), memories, strict=True)
            ]
            self.copies.append(PeerCopies(*ends, CurrentStream(stream), self.new_stream))

    def new_stream(self) -> ThreadStream:
        self.streams.append(ThreadStream(len(self.streams)))
        return self.streams[-1]

    def settle(self) -> None:
        for _ in range(3):  # what one waits for may be behind what another does
            for stream in self.streams:
                stream.mark().wait(20)

    def close(self) -> None:
        ended = [stream.close() for stream in self.streams]
        assert all(ended), "a stream stands still"


def message(*sizes: int, value: int) -> list[torch.Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8) for size in sizes]


def kinds(*sizes: int) -> list[TensorKind]:
    return [TensorKind((size,), torch.uint8, torch.device("cpu")) for size in sizes]


@pytest.mark.parametrize(("behind", "stays"), [(None, False), (0, True), (4, True), (5, False)])
def test_the_largest_that_fits_a_slot_stays_if_it_is_gone_soon_enough(behind: int | None, stays: bool) -> None:
    """Of six slots two are for messages that are posted before the slot is given back."""
    stages = Stages()
    sizes = (3, SLOT, 2 * SLOT, 8)
    for number in range(20):
        sent = message(*sizes, value=number)
        works = stages.copies[0].send(sent, 1)
        got = [incoming.wait() for incoming in stages.copies[1].receive(kinds(*sizes), 0, behind)]
        stages.settle()
        assert [loan_of(tensor) is not None for tensor in got] == [False, stays, False, False]
        assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))
        del works
    stages.close()


def test_as_many_as_may_stay_do_and_the_ring_goes_on() -> None:
    """Each is dropped right before the message is taken that is the last to be posted meanwhile."""
    stages = Stages()
    kept: list[torch.Tensor] = []
    for number in range(30):
        sent = message(SLOT, value=number)
        works = stages.copies[0].send(sent, 1)
        (incoming,) = stages.copies[1].receive(kinds(SLOT), 0, 4)
        if len(kept) == 5:
            stages.settle()
            assert (kept[0] == number - 5).all()
            del kept[0]
        kept.append(incoming.wait())
        assert loan_of(kept[-1]) is not None
        stages.settle()
        del works
    stages.close()


def test_what_lies_in_a_slot_is_sent_on_from_a_copy() -> None:
    """So that it doesn't depend on the next stage when the slot is given back."""
    stages = Stages()
    first, second = stages.copies
    works = first.send(message(SLOT, value=7), 1)
    (incoming,) = second.receive(kinds(SLOT), 0, 0)
    received = incoming.wait()
    stages.settle()
    (sent,) = second.send([received[:]], 0)
    assert loan_of(received) is not None
    assert loan_of(sent.data) is None
    (incoming,) = first.receive(kinds(SLOT), 1, 0)
    returned = incoming.wait()
    stages.settle()
    assert (returned == 7).all()
    stages.close()
    assert works[0].data.numel() == SLOT


SHARED = SimpleNamespace(of=None)
REASON = Obstacle("no room", "make some")


@pytest.mark.parametrize(
    ("found", "asked", "opened", "told"),
    [
        ([REASON], False, None, None),
        ([REASON], True, None, "pipeline.receive_in_place: no room; make some; nccl takes messages instead"),
        ([SHARED], False, "copied", None),
        ([SHARED, SHARED], True, "in place", None),
        (
            [SHARED, REASON],
            True,
            "copied",
            "pipeline.receive_in_place: no room; make some; messages are copied out of their slots instead",
        ),
    ],
)
def test_what_is_opened_and_what_is_said_of_the_rest(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], asked: bool, opened: str | None, told: str | None
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(peer_copies, "open_channels", lambda groups, axis, channels, device, noun: found[len(made)])
    monkeypatch.setattr(peer_copies, "_Ends", lambda *args: made.append(True) or SimpleNamespace(senders=()))
    monkeypatch.setattr(peer_copies, "open_message_wait", lambda device, by_kernel: None)
    groups = SimpleNamespace(pipe=SimpleNamespace(size=2), coordinate=lambda axis: 0, rank=0, backend="nccl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copies = open_peer_copies(cast(Any, groups), torch.device("cpu"), in_place=asked)
    assert [str(warning.message) for warning in caught] == ([] if told is None else [told])
    assert (copies is None) == (opened is None)
    assert copies is None or (copies._in_place is not None) == (opened == "in place")
