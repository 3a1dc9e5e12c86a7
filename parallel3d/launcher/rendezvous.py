"""Where the launchers of a job's hosts meet, by torch's rendezvous, and how each knows that the others live."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.launcher.hosts import Node

ADDRESS = "127.0.0.1"
_RENDEZVOUS_TIMEOUT_S = 60
_BACKLOG = 4096

_JOB = "parallel3d"
_JOIN_S = 600.0  # time after which a host that has not joined is an error
_LAST_CALL_S = 5.0  # time after which a restart goes on without hosts that have not joined
_BEGIN_S = 15.0  # time after which a host that has joined a start, but gives no sign of life, is lost
_ANSWER = timedelta(seconds=5)
_LOOK_S, _LOST_S = 1.0, 10.0  # time between two signs of life, and without one until a host is lost
_LEAVE_S, _REST_S = 5.0, 2.0

RUNS, DONE, FAILED, LEFT = "runs", "done", "failed", "left"
"""States of a host in the store: its ranks run, have ended well or have failed for good; it has read that all are done."""


class OneHost(StaticTCPRendezvous):
    """Rendezvous of this node alone, with a store that listens as soon as its port is picked; the ranks join that store.

    Each start has its own store: a rank that is started again must not find what an earlier one left there, such as
    addresses of connections. port: of the first store, 0 for a free one.
    """

    def __init__(self, port: int):
        super().__init__(ADDRESS, port, 0, 1, time.strftime("%Y-%m-%d_%H-%M-%S"), _RENDEZVOUS_TIMEOUT_S)
        self._next: TCPStore | None = listen(port)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the address and store of the next start."""
        self._store, self._next = self._next or listen(0), None
        self.master_port = self._store.port
        return super().next_rendezvous()


class SeveralHosts(DynamicRendezvousHandler):
    """torch's elastic rendezvous in one store, on the first host, with signs of life of each host there.

    Ranks follow the order of the hosts. starts: how often the job has been started before. is_cut_off: whether the store does
    not answer.
    """

    node: Node
    starts = 0
    is_cut_off = False
    _kept: SeveralHosts
    _connect: Callable[..., TCPStore]
    _jobs: TCPStore
    _max_restarts: int

    @classmethod
    def of(cls, node: Node, max_restarts: int) -> SeveralHosts:
        """Return the rendezvous of a host. With restarts, a start but the first may go on without hosts that are lost.

        Raises ConfigError if the store can't listen, ExecutionError if it does not answer, hosts don't come, or their clocks
        differ.
        """
        connect = partial(TCPStore, node.address, node.port, is_master=False, wait_for_workers=False)
        try:
            store = listen(node.port, node.address) if node.index == 0 else connect(timeout=timedelta(seconds=_JOIN_S))
        except DistError as error:
            raise ExecutionError(
                f"host {node.hosts[0]} does not answer at {node.address}:{node.port}; look whether the job runs there, and "
                f"for a firewall ({error})"
            ) from error
        # torch's own store of the ranks is not found by a host that joins later. next_rendezvous makes one for each start.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self = cls.from_backend(
            _JOB,
            store,
            C10dRendezvousBackend(store, _JOB),
            len(node.hosts),
            len(node.hosts),
            # torch sorts the hosts by this.
            local_addr=f"{node.index:06}",
            timeout=RendezvousTimeout(timedelta(seconds=_JOIN_S), timedelta(seconds=_LAST_CALL_S)),
            keep_alive_interval=1,
            keep_alive_max_attempt=int(_LOST_S),
        )
        self.node, self._max_restarts, self._connect, self._jobs = node, max_restarts, connect, store
        cls._kept = self  # its end would wait for its thread, which waits as long as TCP for a host that is cut off
        store.set_timeout(timedelta(seconds=_BEGIN_S))
        self._gather()
        return self

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks meet in a launcher's store."""
        return True

    def _gather(self) -> None:
        """Wait until every host has come once, and compare their clocks. Raises ExecutionError that names hosts."""
        jobs, hosts = self._jobs, self.node.hosts
        jobs.set(f"came/{self.node.index}", socket.gethostname())
        came, end = [f"came/{k}" for k in range(len(hosts))], time.monotonic() + _JOIN_S
        while not jobs.check(came):
            if time.monotonic() > end:
                missing = [host for host, key in zip(hosts, came, strict=True) if not jobs.check([key])]
                raise ExecutionError(
                    f"these hosts have not come within {_JOIN_S:g} s: {', '.join(missing)}; look at their output"
                )
            time.sleep(0.1)
        self._names = [name.decode() for name in jobs.multi_get(came)]
        if jobs.add("starts", 0) == 0:  # at the first start all hosts read their clocks at the same moment
            jobs.set(f"clock/{self.node.index}", str(time.time()))
            check_clocks(self._names, [float(jobs.get(f"clock/{k}")) for k in range(len(hosts))])

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next start, and return this host's place in it. Raises ExecutionError if no start succeeds."""
        for attempt in range(1 + self._max_restarts):
            if self._max_restarts and attempt + self._jobs.add("starts", 0) > 0:  # the first start is one of all hosts
                object.__setattr__(self.settings, "min_nodes", 1)  # one object for all parts of torch's rendezvous
            with suppress(DistError):  # a host was lost after it had joined
                return self._begin(super().next_rendezvous())
        raise ExecutionError(f"hosts that had joined did not begin within {_BEGIN_S:g} s; look at their output")

    def _begin(self, info: RendezvousInfo) -> RendezvousInfo:
        """Return the place in a start, at the address of its ranks' store, once all hosts of the start have come to it."""
        if info.rank == 0:
            info.store.set("starts", str(self._jobs.add("starts", 1) - 1))
        self.starts, self._place = int(info.store.get("starts")), info.rank
        self._keys = [f"life/{place}" for place in range(info.world_size)]
        store = self._of_start(self._jobs)
        if info.rank == 0:
            address = self.node.address if self.node.index == 0 else own_address(self.node.address)
            self._of_ranks = listen(0, address)
            store.set("ranks", f"{address} {self._of_ranks.port}")
        address, port = store.get("ranks").decode().split()
        store.set(self._keys[info.rank], f"{self.node.index} {RUNS} 0")
        store.wait(self._keys)
        self._signs = store.multi_get(self._keys)
        self._looked, self._waiting = time.monotonic(), 0
        self._lives = [self._looked] * info.world_size
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(address, int(port)))

    def look(self, state: str) -> str | None:
        """Give a sign of life once a second, and return what is wrong with another host, if anything is.

        Each time by a new connection: one to a host that is cut off waits as long as TCP does.
        """
        if time.monotonic() - self._looked < _LOOK_S and state in (RUNS, DONE):
            return None
        try:
            store = self._of_start(self._connect(timeout=_ANSWER))
            store.set(self._keys[self._place], f"{self.node.index} {state} {time.monotonic()}")
            signs = store.multi_get(self._keys)
            if state in (RUNS, DONE):  # once the others have left, the first host may be gone
                self._waiting = super().num_nodes_waiting()
        except (DistError, RendezvousConnectionError):
            if time.monotonic() - self._lives[self._place] < _LOST_S:
                return None
            self.cut_off()
            return f"host {self._names[0]}, which has the job's store, does not answer"
        self._looked = time.monotonic()
        for place, (sign, before) in enumerate(zip(signs, self._signs, strict=True)):
            if sign != before:
                self._lives[place] = self._looked
        self._signs = signs
        for place, sign in enumerate(signs):
            index, other, _ = sign.decode().split()
            if other == FAILED:
                return f"the ranks of host {self._names[int(index)]} have failed"
            if other == RUNS and self._looked - self._lives[place] > _LOST_S:
                return f"host {self._names[int(index)]} is lost: no sign of life for {_LOST_S:g} s"
        return None

    def num_nodes_waiting(self) -> int:
        """Return how many hosts wait to join, at the last look: asking waits as long as TCP if this host is cut off."""
        return self._waiting

    def cut_off(self) -> None:
        """Note that the store does not answer."""
        self.is_cut_off = True

    def states(self) -> set[str]:
        """Return the states of all hosts of this start, at the last look."""
        return {sign.decode().split()[1] for sign in self._signs}

    def leave(self, state: str) -> None:
        """Announce that this host is done. The first host, whose store the others read, waits a moment for them."""
        end = time.monotonic() + _LEAVE_S
        self.look(state)
        while self.node.index == 0 and self._stays() and time.monotonic() < end:
            time.sleep(0.1)
            self.look(state)

    def _stays(self) -> bool:
        """Return whether a host that gave a sign of life just now has yet to leave."""
        recent = time.monotonic() - 3 * _LOOK_S
        states = (sign.decode().split()[1] for sign in self._signs)
        return any(state in (RUNS, DONE) and lived > recent for state, lived in zip(states, self._lives, strict=True))

    def rest(self) -> None:
        """End the keep-alive thread of torch's rendezvous, which would abort at exit, unless it waits for a lost host."""
        ending = Thread(target=self._stop_heartbeats, daemon=True)
        ending.start()
        ending.join(_REST_S)

    def _of_start(self, store: Store) -> PrefixStore:
        return PrefixStore(f"{_JOB}/{self.starts}", store)


def check_clocks(hosts: Sequence[str], clocks: Sequence[float]) -> None:
    """Raise ExecutionError if hosts' times, in seconds and read at one moment, differ: torch's rendezvous compares them."""
    ahead, (first, last) = max(clocks) - min(clocks), [hosts[clocks.index(end(clocks))] for end in (min, max)]
    if ahead > _LAST_CALL_S:
        raise ExecutionError(
            f"the clock of {last} is {ahead:.0f} s ahead of that of {first}: hosts whose clocks differ by more than "
            f"{_LAST_CALL_S:g} s take each other for lost; set them by NTP"
        )


def own_address(other: str) -> str:
    """Return the address by which this host reaches another one."""
    with socket.socket(type=socket.SOCK_DGRAM) as unsent:
        unsent.connect((other, 1))
        address: str = unsent.getsockname()[0]
        return address


def listen(port: int, address: str = ADDRESS) -> TCPStore:
    """Return a store that listens only on one address of this host; by default torch's listens on all interfaces.

    With port 0 it finds a free one. If the address is not this host's, or other hosts can't reach it, it listens on all.
    Raises ConfigError if the port is taken.
    """
    try:
        own = socket.gethostbyname(address)
        if address != ADDRESS and own.startswith("127."):  # as /etc/hosts of many hosts has their own names
            own = ""
        try:
            server = socket.create_server((own, port), backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            server = socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--master_port {port} is taken; leave it out to get a free one ({error})") from error
    port = server.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
    )
