"""Shards on disk: a gather gets what was written last, whatever was read ahead."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest
import torch

from parallel3d.comm.collectives import Group
from parallel3d.errors import OffloadError
from parallel3d.zero import storage
from parallel3d.zero.disk import ScratchFile
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.memory import StateBytes
from parallel3d.zero.policy import WeightOffload, ZeroPolicy

ALONE = Group((0,), None)
SIZES = (1500, 32, 4096, 2048, 700)


@pytest.mark.parametrize(("count", "seed"), [(2, 0), (3, 1), (5, 2)])
def test_a_gather_gets_what_was_written_last(tmp_path: Path, count: int, seed: int) -> None:
    random = Random(seed)
    with closing(ScratchFile(tmp_path, 16 * 4096)) as file:
        host = HostShards(torch.device("cpu"), False, file, count)
        values = [torch.randn(n).to(torch.bfloat16 if n < 1000 else torch.float32) for n in SIZES]
        # The third one is in memory.
        shards = [host.keep(value, on_disk=k != 2) for k, value in enumerate(values)]
        expected: list[int] = []

        def check(k: int) -> None:
            whole = torch.full_like(values[k], torch.nan)
            host.gather(whole, shards[k], ALONE, None).wait()
            assert torch.equal(whole, values[k])

        for _ in range(200):
            k = random.randrange(len(SIZES))
            what = random.choice(("expect", "as expected", "as expected", "gather", "write", "write on the host"))
            if what == "expect":
                expected = random.choices(range(len(SIZES)), k=6)
                host.expect(shards[k] for k in expected)
            elif what == "as expected" and expected:
                check(expected.pop(0))
            elif what == "gather":
                check(k)
            elif what == "write":
                new, cut = torch.randn(SIZES[k]), random.randrange(SIZES[k])
                host.write(shards[k], slice(0, cut), new[:cut])
                host.write(shards[k], slice(cut, None), new[cut:])
                values[k] = new.to(values[k].dtype)
            elif what == "write on the host":
                host.settle()
                shards[k].fill_(k)
                values[k].fill_(k)
        host.settle()
        assert all(torch.equal(shard, value) for shard, value in zip(shards, values, strict=True))
        assert host.bytes_on_disk() == (2 + 1 + 2 + 1) * 4096


def test_memory_that_the_built_model_gives_back_is_not_needed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ZeroPolicy(3, 1, weight_offload=WeightOffload())
    monkeypatch.setattr(storage, "host_capacity", lambda limit: {"a limit": int(limit or 60)})

    def open_storage(held: int, limit: float | None) -> None:
        storage.open_storage(policy, StateBytes(host=100), StateBytes(host=100), held, ALONE, limit)

    open_storage(40, None)
    open_storage(0, 100)
    for held, limit in ((39, None), (40, 99)):
        with pytest.raises(OffloadError, match="a limit leaves"):
            open_storage(held, limit)
