"""Membership of a job: a token that its ranks share, by which each proves that it belongs to the job.

The launcher gives its ranks a random token. Jobs that are started otherwise may set the variable TOKEN on all hosts. Without a
token nothing is proved, and the network must be trusted.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket

import torch
import torch.distributed as dist

from parallel3d.errors import CommunicationError

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


def prove_membership(handle: dist.ProcessGroup) -> None:
    """Prove to the members of a new group over gloo that this rank is of the job, and check their proofs. Collective.

    Each rank signs random numbers of all members, so that no earlier proof can be repeated. Raises CommunicationError, on ranks
    with a token, if a member's proof is wrong: before anything else that it sends is used.
    """
    rank, size = dist.get_rank(handle), dist.get_world_size(handle)
    numbers = _gather(secrets.token_bytes(PROOF_BYTES), handle, size)
    proofs = _gather(_proof_of(rank, numbers), handle, size)
    if not os.environ.get(TOKEN):
        return
    for other, found in enumerate(proofs):
        if not hmac.compare_digest(found, _proof_of(other, numbers)):
            raise CommunicationError(
                f"rank {dist.get_global_rank(handle, other)} can't prove that it belongs to this job: another process has "
                f"taken its place, or {TOKEN} differs between hosts; start the job on a network that strangers can't reach"
            )


def _proof_of(rank: int, numbers: list[bytes]) -> bytes:
    return proof(b"member", rank.to_bytes(8, "big"), *numbers)


def _gather(value: bytes, handle: dist.ProcessGroup, size: int) -> list[bytes]:
    """Return the bytes of all members, of one length."""
    mine = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=handle)
    return [bytes(tensor.tolist()) for tensor in gathered]
