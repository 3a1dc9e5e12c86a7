"""Messages between stages by copies, with threads for streams: all tensors arrive, in both directions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from streams import CurrentStream, ThreadStream

from parallel3d.comm.peer import copies
from parallel3d.comm.peer.copies import PeerCopies, open_peer_copies, pipeline_channels
from parallel3d.comm.peer.symmetric import Unavailable

SLOT = 64
CHANNELS = replace(pipeline_channels(2), slot_bytes=SLOT)


class Stages:
    """Two stages in one process; all streams compute, copy and receive as threads."""

    def __init__(self) -> None:
        self.streams: list[ThreadStream] = []
        self.computing = [self.new_stream() for _ in range(2)]
        memory = [torch.zeros(CHANNELS.num_bytes, dtype=torch.uint8) for _ in range(2)]
        self.copies = [
            PeerCopies(stage, CHANNELS, memory.__getitem__, CurrentStream(stream), self.new_stream)
            for stage, stream in enumerate(self.computing)
        ]

    def new_stream(self) -> ThreadStream:
        self.streams.append(ThreadStream(len(self.streams)))
        return self.streams[-1]

    def settle(self) -> None:
        for _ in range(3):  # one stream may wait for what another does later
            for stream in self.streams:
                stream.mark().wait(20)

    def close(self) -> None:
        ended = [stream.close() for stream in self.streams]
        assert all(ended), "a stream stands still"


def message(*sizes: int, value: int) -> list[torch.Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8) for size in sizes]


def test_all_tensors_of_a_message_arrive_in_both_directions() -> None:
    stages = Stages()
    sizes = (3, SLOT, 2 * SLOT, 9 * SLOT + 5, 8)
    for number in range(20):
        sent = [message(*sizes, value=number + 100 * stage) for stage in range(2)]
        works = [stages.copies[stage].send(sent[stage], 1 - stage) for stage in range(2)]
        incoming = [stages.copies[stage].receive(message(*sizes, value=0), 1 - stage) for stage in range(2)]
        got = [[tensor.wait() for tensor in tensors] for tensors in incoming]
        stages.settle()
        for stage in range(2):
            assert all(torch.equal(a, b) for a, b in zip(sent[1 - stage], got[stage], strict=True))
        del works
    stages.close()


@pytest.mark.parametrize("size", [1, 2])
def test_no_copies_where_there_is_one_stage_or_an_obstacle(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    reason = Unavailable("no room", "make some") if size == 2 else None
    monkeypatch.setattr(copies, "check_axis", lambda *arguments: reason)
    groups = SimpleNamespace(pipe=SimpleNamespace(size=size), coordinate=lambda axis: 0)
    assert open_peer_copies(cast(Any, groups), torch.device("cpu")) is None
