"""Membership of a job: a token that its ranks share, by which each proves that it belongs to the job.

The launcher gives its ranks a random token. Jobs that are started otherwise may set the variable TOKEN on all hosts. Without a
token nothing is proved, and the network must be trusted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket

TOKEN = "PARALLEL3D_JOB_TOKEN"  # noqa: S105 (the name of a variable)
PROOF_BYTES = 32


def local_job() -> dict[str, str]:
    """Return variables for the ranks of a new job on this host: its token, and the interface that strangers can't reach."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {TOKEN: secrets.token_hex(32), **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})}


def proof(*parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of some bytes under the job's token; of an empty one if there is none."""
    key = os.environ.get(TOKEN, "").encode()
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")
