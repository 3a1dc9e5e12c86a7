"""What kernels among the GPUs of one host have in common (csrc/peers.cuh): dtypes, numbers of ranks, pads, their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch

# As the launchers number them.
DTYPES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WORLD_SIZES = (2, 4, 8)
VECTOR_BYTES = 16
# A word of 8 bytes for each block and peer.
MOST_BLOCKS = 256
PAD_BYTES = MOST_BLOCKS * max(WORLD_SIZES) * 8

_registered: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count(1)


def register(calls: object) -> int:
    """The number by which torch's operators, whose schemas take no objects, know who communicates, as long as it lives."""
    number = next(_numbers)
    _registered[number] = calls
    return number


def registered(number: int) -> Any:
    """What has the number. Raises KeyError."""
    return _registered[number]
