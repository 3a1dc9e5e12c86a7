"""Named random streams: what a seed decides, and that no layout does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
