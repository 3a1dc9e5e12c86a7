"""Named random streams: what a seed decides, and that no layout does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

# numpy's legacy generator takes seeds of 32 bits.
_NUMPY_SEEDS = 2**32


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy (by the seed's lower 32 bits) and torch on every device."""
    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Run with torch's generators (CPU, and `device` if it is CUDA) seeded; their states are put back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def layer_seed(base_seed: int, layer: int) -> int:
    """Seed of a layer's initial weights, from its place in the list alone."""
    return base_seed + layer
