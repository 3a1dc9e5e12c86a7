"""Processes that are not of the job: they take no rank's place, and what they send is not used."""

from __future__ import annotations

import os
import pickle
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from warm import WarmProcess

from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.comm.groups import ProcessGroups, prove_membership
from parallel3d.comm.liveness import PeerLiveness
from parallel3d.comm.topology import PipeDataParallelTopology
from parallel3d.errors import CommunicationError
from parallel3d.launcher.rendezvous import listen as _listen
from parallel3d.membership import TOKEN

ROOT = Path(__file__).parents[2]


def meet(tokens: list[str | None]) -> str | None:
    """Prove membership with a token for each rank; return why that is refused."""
    before, token = os.environ.pop(TOKEN, None), tokens[dist.get_rank()]
    if token is not None:
        os.environ[TOKEN] = token
    try:
        prove_membership(dist.new_group(backend="gloo"))
        return None
    except CommunicationError as error:
        return str(error)
    finally:
        os.environ.pop(TOKEN, None)
        if before is not None:
            os.environ[TOKEN] = before


@pytest.mark.parametrize(
    ("tokens", "refused"), [([None, None], []), (["a", "a"], []), (["a", "b"], [0, 1]), (["a", None], [0])]
)
def test_a_rank_without_the_jobs_token_is_refused(run_ranks, tokens: list[str | None], refused: list[int]) -> None:
    found = run_ranks(2, meet, tokens)
    for rank, message in enumerate(found):
        if rank in refused:
            assert f"rank {1 - rank} can't prove that it belongs to this job" in message
        else:
            assert message is None


class ForgedStore:
    """A store in which the content of the second rank's value is another one than it has signed."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value[:-4] + "AAAA" if key == "0/1/0" else value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def decide_with_a_stranger(forged: bool) -> Any:
    groups = ProcessGroups(PipeDataParallelTopology(num_pp=2, num_dp=1))
    decision = CollectiveDecision(groups.control, "strangers", 20.0)
    if groups.rank == 1 and forged:
        decision._store = ForgedStore(decision._store)  # type: ignore[assignment]
    os.environ[TOKEN] = "secret"
    try:
        return decision.make("a choice", groups.rank, lambda values: values[::-1])
    except CommunicationError as error:
        return str(error)
    finally:
        del os.environ[TOKEN]


@pytest.mark.parametrize("forged", [False, True])
def test_a_value_that_no_rank_has_signed_is_not_used(run_ranks, forged: bool) -> None:
    found = run_ranks(2, decide_with_a_stranger, forged)
    assert (found == [1, 0]) != forged
    if forged:
        assert all("a value in the job's store is of no rank of this job" in message for message in found)


def meet_strangers(count: int) -> tuple[list[int], int]:
    """The first rank's connections are first those of strangers: silent ones, and ones that send garbage."""
    groups = ProcessGroups(PipeDataParallelTopology(num_pp=2, num_dp=1))
    strangers: list[socket.socket] = []

    def connect(self: PeerLiveness, offer: Any, index: int, deadline: float) -> None:
        for k in range(count):
            strangers.append(socket.create_connection(("127.0.0.1", offer.port)))
            if k % 3 == 1:
                strangers[-1].sendall(b"\x80\x04garbage that is longer than a greeting")
            if k % 3 == 2:
                strangers[-1].sendall(bytes(16))
        original(self, offer, index, deadline)

    original, PeerLiveness._connect = PeerLiveness._connect, connect
    try:
        liveness = PeerLiveness(groups.control, 20.0)
    finally:
        PeerLiveness._connect = original
    dist.barrier()
    found = liveness.ended([0, 1]), len(liveness._connections)
    dist.barrier()
    return found


def test_strangers_keep_no_rank_from_knowing_its_peers(run_ranks) -> None:
    assert run_ranks(2, meet_strangers, 100) == [([], 1), ([], 1)]


def test_the_launchers_store_listens_on_this_host_alone_and_outlives_strangers() -> None:
    store = _listen(0)
    with open("/proc/net/tcp") as file:
        addresses = [line.split()[1] for line in file.readlines()[1:] if line.split()[3] == "0A"]
    assert [a for a in addresses if a.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(900)]
    for k, stranger in enumerate(strangers[::9]):
        stranger.sendall(b"\x80\x04garbage" * k)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    client.set("a", "b")
    assert store.get("a") == b"b"
    for stranger in strangers:
        stranger.close()


TRAINING = """
import os, sys, time
from pathlib import Path
import torch, parallel3d

place = Path(sys.argv[1])
layers = [parallel3d.LayerSpec(torch.nn.Linear, 4, 4) for _ in range(2)]
config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "steps_per_print": None,
          "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "pipeline": {"stages": 2}}
module = parallel3d.PipelineModule(layers, loss_fn=torch.nn.MSELoss(), config=config)
engine, *_ = parallel3d.initialize(model=module, config=config)
pids = [os.getpid(), os.getppid()]
told = [False]
while not told[0]:
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))] * 2))
    part = place / f"pids.{engine.global_rank}"
    part.write_text(" ".join(map(str, pids)))
    part.rename(f"{part}.whole")
    told = [(place / "enough").exists()]
    parallel3d.comm.broadcast_object_list(told, 0)
engine.save_checkpoint(place / "saved")
engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))] * 2))
"""


class RunsCode:
    """An object whose pickle makes a file where it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses, in the kernel's form, and ports at which processes listen."""
    inodes = set()
    for pid in pids:
        for handle in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(handle).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_a_job_goes_on_whatever_strangers_send_to_its_ports(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["--num_procs", "2", str(tmp_path / "script.py"), str(tmp_path)]
    job = WarmProcess(tmp_path, environment, "forked_ranks", "parallel3d.launcher", *arguments)
    end, pids = time.monotonic() + 60, set[int]()
    while len(pids) < 3 and time.monotonic() < end:  # of two ranks and the launcher
        time.sleep(0.02)
        pids = {int(word) for path in tmp_path.glob("pids.*.whole") for word in path.read_text().split()}
    places = listening(sorted(pids))
    assert places
    assert {address for address, _ in places} == {"0100007F"}, "they listen on this host alone"
    payload = pickle.dumps(RunsCode(tmp_path / "code ran"))
    strangers = []
    for _, port in places:
        for k in range(900 // len(places)):
            with suppress(OSError):
                strangers.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                if k % 10 == 1:
                    strangers[-1].sendall(payload)
                if k % 10 == 2:
                    strangers[-1].sendall(len(payload).to_bytes(8, "little") + payload)
                if k % 10 == 3:
                    strangers[-1].sendall(os.urandom(4096))
    (tmp_path / "enough").touch()
    _, errors = job.communicate(timeout=100)
    for stranger in strangers:
        stranger.close()
    assert job.returncode == 0, errors
    assert (tmp_path / "saved" / "latest").exists()
    assert not (tmp_path / "code ran").exists()
