"""What ranks agree on before a batch, on the host: how many micro-batches, and the signature of each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from parallel3d.comm.collectives import all_gather_integers
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import PeerDataError
from parallel3d.pipe.messages import describe

_NO_DATA_NEEDED = -1
_FAILED = -2


def signature(inputs: Any) -> int:
    """63 bits of a micro-batch's input structure: tree, shapes, dtypes and the values that are no tensors."""
    structure, _ = describe(inputs)
    text = f"{structure.tree}|{structure.leaves}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def agree(
    micro_batches: Sequence[tuple[Any, Any]] | None, failed: bool, most: int, groups: ProcessGroups, first_stage: int
) -> list[int]:
    """Signatures of the batch's micro-batches, of this rank's pipeline; their number is the same on every rank.

    micro_batches: what this rank could load, at most `most`; None on a rank that needs no data; failed: it raised.
    The smallest number that a loading rank has is the batch's. Raises PeerDataError on all ranks when one failed.
    """
    signatures = [signature(inputs) for inputs, _ in micro_batches or ()]
    count = _FAILED if failed else _NO_DATA_NEEDED if micro_batches is None else len(micro_batches)
    rows = all_gather_integers([count, *signatures, *[0] * (most - len(signatures))], groups.control)
    broken = [rank for rank, row in enumerate(rows) if row[0] == _FAILED]
    if broken:
        raise PeerDataError(f"ranks {broken} could not load their micro-batches; their own errors say why", broken[0])
    number = min(row[0] for row in rows if row[0] != _NO_DATA_NEEDED)
    return rows[groups.pipe.ranks[first_stage]][1 : 1 + number]
