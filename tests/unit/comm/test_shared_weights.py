"""Weights that replicas share, gathered by copies, with threads for streams: nobody reads what isn't there, or is gone."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import ThreadStream

from parallel3d.kernels.shared_weights import SharedWeights, WeightCopies, shared_bytes


def shared_by(world: int, lengths: list[int]) -> list[SharedWeights]:
    """Each rank's, in memory of one process."""
    memories = [torch.full((shared_bytes(lengths, world),), 99, dtype=torch.uint8) for _ in range(world)]
    staging = [memory.data_ptr() for memory in memories]
    found = []
    for rank in range(world):
        group = SimpleNamespace(size=world, index=rank)
        calls: Any = SimpleNamespace(group=group, staging=staging, memory=memories[rank])
        found.append(SharedWeights(calls, lengths))
    return found


@given(st.integers(2, 8), st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_buffers_and_counts_lie_apart(world: int, lengths: list[int]) -> None:
    for shared in shared_by(world, lengths):
        begin = shared.calls.staging[0]
        places = [(shared.address(k, 0) - begin, length) for k, length in enumerate(lengths)]
        for words in (shared.ready, shared.filled):
            places += [(words(k, 0, peer) - begin, 4) for k in range(len(lengths)) for peer in range(world)]
        taken = sorted(places)
        assert all(start + length <= following for (start, length), (following, _) in pairwise(taken))
        assert sum(taken[-1]) <= shared.calls.memory.numel()
        assert [shared.memory(k).numel() for k in range(len(lengths))] == lengths
        assert all(
            shared.memory(k).data_ptr() == shared.address(k, shared.calls.group.index) for k in range(len(lengths))
        )
        assert all(shared.address(k, 0) % 512 == begin % 512 for k in range(len(lengths)))


def rounds(world: int, lengths: list[int], steps: int, seed: int) -> list[str]:
    """What is wrong in steps that write parts, gather them and read all, on ranks of random speed."""
    rng = random.Random(seed)
    everyones = shared_by(world, [world * length for length in lengths])
    streams = [[ThreadStream(rng.randrange(100)) for _ in range(2)] for _ in range(world)]
    wrong: list[str] = []
    for shared, (main, outgoing) in zip(everyones, streams, strict=True):
        copies = WeightCopies(shared, outgoing, lambda main=main: main)
        rank = shared.calls.group.index
        for step in range(1, steps + 1):
            for k, length in enumerate(lengths):
                part = shared.memory(k)[rank * length : (rank + 1) * length]
                main.run(lambda part=part, value=step * world + rank: part.fill_(value))
            works = [copies.gather(k, rank * length, length) for k, length in enumerate(lengths)]
            for k, work in enumerate(works):
                work.wait()
                length = lengths[k]
                expected = torch.tensor([step * world + r for r in range(world)], dtype=torch.uint8).repeat_interleave(
                    length
                )

                def read(k: int = k, step: int = step, expected: torch.Tensor = expected, shared: Any = shared) -> None:
                    if not torch.equal(shared.memory(k), expected):
                        wrong.append(f"step {step}, buffer {k} on rank {shared.calls.group.index}")

                main.run(read)
                if rng.random() < 0.3:
                    main.pause(rng.random() * 2e-3)
    assert all(stream.close() for pair in streams for stream in pair), "a stream stands still"
    return wrong


def test_every_rank_reads_what_the_others_have_written_in_this_step() -> None:
    for seed in range(3):
        assert rounds(2, [5, 300], 12, seed) == []
        assert rounds(4, [64], 12, seed) == []


def test_copies_that_do_not_wait_for_readers_are_found_out(monkeypatch: Any) -> None:
    wait_for = ThreadStream.wait_for

    def careless(self: ThreadStream, word: int, count: int) -> None:
        wait_for(self, word, count - 1)

    monkeypatch.setattr(ThreadStream, "wait_for", careless)
    assert any(rounds(2, [5, 300], 12, seed) for seed in range(10))
