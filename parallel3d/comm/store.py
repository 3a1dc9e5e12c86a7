"""The store by which ranks exchange words when collectives no longer work, over a connection of its own."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_ANSWER_TIMEOUT = timedelta(seconds=5)
_PREFIX = "parallel3d/failures"


def attempt() -> int:
    """How often the launcher has restarted the workers."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def failure_store() -> dist.Store:
    """The elastic agent's store, which outlives every rank, where one started this process; else the world's own.

    That one is gone with rank 0. Its operations raise torch's DistError when it is.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return agents_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), attempt())
    default: Any = dist.distributed_c10d._get_default_store()
    store = default.clone()
    store.set_timeout(_ANSWER_TIMEOUT)
    return dist.PrefixStore(_PREFIX, store)


def agents_store(address: str, port: int, attempt: int) -> dist.Store:
    """The same for the agent itself, whose store listens there. attempt: how often it has restarted the workers."""
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_ANSWER_TIMEOUT)
    return dist.PrefixStore(f"{_PREFIX}/{attempt}", store)


def exit_key(rank: int) -> str:
    """Where the agent notes how a rank's process ended."""
    return f"exit/{rank}"


VERDICT_KEY = "verdict"
"""Where the ranks leave their verdict for the agent."""

# What gloo says, as a RuntimeError, of a peer that is gone or of a collective that was given up.
_GLOO_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "Timed out waiting",
    "Application timeout",
    "Read error",
    "Write error",
    "ECONNRESET",
    "no connected peer",
)


def follows_from_peer(error: BaseException) -> bool:
    """Whether the exception is what communication makes of the end of another rank."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    if isinstance(error, kinds):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO_LOST)
