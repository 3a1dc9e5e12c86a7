"""Real multi-process runs for tests: a pool of workers that is reused, since starting one costs seconds."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._dynamo.guards
import torch.distributed as dist
from fork_server import use_streams_of, warm_context

from parallel3d.comm.environment import destroy_process_group
from parallel3d.comm.log import LOG
from parallel3d.errors import Parallel3DError

# The compiler measures how long each graph's guards take, with the processor's caches flushed: 20 ms of no use to tests.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# Each seed is kept for devices that torch wasn't built for, with a text of the stack.
for absent in () if torch.backends.cuda.is_built() else (torch.cuda, torch.xpu, torch.mtia):
    absent.manual_seed_all = lambda _: None


class RankError(AssertionError):
    """Some ranks raised; `tracebacks` maps rank -> its traceback."""

    def __init__(self, tracebacks: dict[int, str]):
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = tracebacks


def _worker(connection: Connection, port: int, device: str, folder: str, test_process: int) -> None:
    use_streams_of(test_process)  # the fork server may be another's
    os.chdir(folder)  # for the failure-*.json of what tests break
    gc.freeze()  # what was imported stays
    gc.set_threshold(20_000, 20, 20)  # as in test processes: the compiler makes many small objects
    num_modules = len(sys.modules)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # as init_distributed does, before CUDA is in use
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with suppress(EOFError, ConnectionError):  # the pool is closed
        while True:
            _take_part(connection, store, device)
            LOG.settings = None  # an engine's log goes on with those after it
            LOG.seconds.clear()
            gc.collect()  # engines are in cycles, and each of gloo's threads that they keep wakes up 100 times a second
            if len(sys.modules) > num_modules:  # what was imported since stays too
                num_modules = len(sys.modules)
                gc.freeze()


def _take_part(connection: Connection, store: dist.Store, device: str) -> None:
    """In the next run. It tells two things: what the function returns, and that it has left the world, as all are to."""
    run, rank, size, path, payload = pickle.loads(connection.recv_bytes())
    sys.path[:] = path
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        function, args = pickle.loads(payload)
        backend = "gloo" if device == "cpu" else "nccl"
        if backend == "nccl":
            torch.cuda.set_device(rank)
        where = torch.device("cuda", rank) if backend == "nccl" else None
        prefixed = dist.PrefixStore(f"run{run}", store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=size, device_id=where)
        try:
            result = pickle.dumps(("ok", function(*args)))
        except Parallel3DError:
            result = pickle.dumps(("refused", traceback.format_exc()))
        connection.send_bytes(result)
        connection.recv_bytes()  # all are through; before that, another rank may still be connecting to this one
        destroy_process_group()
        result = ("ok", None)
    except BaseException:
        result = ("error", traceback.format_exc())
    connection.send_bytes(pickle.dumps(result))


class RankPool:
    """`run(n, function, *args)` runs function(*args) on n ranks of one world and returns their results in rank order.

    The function must be importable (defined at the top of a test module). device: "cpu" (gloo) or "cuda" (NCCL).
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._workers: list[tuple[Any, Connection]] = []
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._runs = 0
        self._folder = TemporaryDirectory(prefix="parallel3d_ranks_")
        self._context = warm_context()

    def run(
        self, n: int, function: Callable[..., Any], *args: Any, timeout: float = 120, patience: float = 5
    ) -> list[Any]:
        """patience: seconds that the others are given once a rank has raised, for their own results.

        The processes of ranks that the package has refused something, by an error of its own, serve the next run too.
        """
        while len(self._workers) < n:
            self._start()
        self._runs += 1
        payload = pickle.dumps((function, args))
        for rank in range(n):
            self._workers[rank][1].send_bytes(pickle.dumps((self._runs, rank, n, sys.path, payload)))
        results = self._collect(n, timeout, patience, ("ok", "refused"))
        for rank in range(n):
            with suppress(ConnectionError):  # one that has died since is an error of the next line
                self._workers[rank][1].send_bytes(b"all are through")
        self._collect(n, timeout, patience, ("ok",))
        refused = {rank: value for rank, (status, value) in results.items() if status == "refused"}
        if refused:
            raise RankError(refused)
        return [results[rank][1] for rank in range(n)]

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        args = (theirs, self._store.port, self._device, self._folder.name, os.getpid())
        process = self._context.Process(target=_worker, args=args, daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, n: int, timeout: float, patience: float, good: Sequence[str]) -> dict[int, tuple[str, Any]]:
        """Return each rank's next result, of these statuses. Raises RankError."""
        told = self._wait(n, timeout, patience)
        if any(status not in good for status, _ in told.values()):
            self._stop_workers()
            raise RankError({rank: value for rank, (status, value) in told.items() if status != "ok"})
        return told

    def _wait(self, n: int, timeout: float, patience: float) -> dict[int, tuple[str, Any]]:
        """Return the ranks' results; once one has failed, the others may wait for it forever."""
        results: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < n:
            pending = {self._workers[r][1]: r for r in range(n) if r not in results}
            for ready in wait(list(pending), max(0.0, deadline - time.monotonic())) or [None]:
                if ready is None:
                    self._show_stacks(pending.values())
                    missing = dict.fromkeys(pending.values(), ("error", "still running: stopped by the test pool"))
                    return {**results, **missing}
                rank = pending[ready]
                try:
                    results[rank] = pickle.loads(ready.recv_bytes())
                except EOFError:
                    results[rank] = ("error", "the process died")
                if results[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + patience)
        return results

    def _show_stacks(self, ranks: Iterable[int]) -> None:
        """Where these workers hang goes to stderr."""
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(1)

    def _stop_workers(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def close(self) -> None:
        self._stop_workers()
        self._folder.cleanup()


class RankPools:
    """A pool for each number of ranks.

    torch counts the rendezvous of symmetric memory in each process, and ranks whose counts differ wait for each other forever:
    a rank that has served worlds of two can't meet one that hasn't.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._pools: dict[int, RankPool] = {}

    def run(self, n: int, function: Callable[..., Any], *args: Any, **limits: float) -> list[Any]:
        """RankPool.run."""
        if n not in self._pools:
            self._pools[n] = RankPool(self._device)
        return self._pools[n].run(n, function, *args, **limits)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
