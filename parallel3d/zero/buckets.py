"""Flat gradient buckets: which parameter lies where, decided from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.parameters import ParameterInfo

# Every parameter starts on a 128-byte boundary of fp32, so that kernels keep their vectorized paths.
ALIGNMENT = 32
# A chunk's gradients are cut in about 16, so that most of them travel while the backward still runs...
_PARTS = 16
# ...but latency, not bandwidth, is the cost of a bucket smaller than this many elements.
_SMALLEST = 1 << 20


@dataclass(frozen=True)
class BucketLayout:
    """Places of consecutive parameters in one flat buffer: parameter `first + k` starts at `offsets[k]`."""

    first: int
    offsets: tuple[int, ...]
    numel: int


def cut_buckets(sizes: Sequence[int], bucket_size: int) -> list[BucketLayout]:
    """Cut parameters of these numbers of elements, in order, into buckets of at most `bucket_size` elements.

    A parameter is never cut: one that is larger than a bucket has its own. Sizes are padded to ALIGNMENT.
    """
    total = sum(sizes)
    limit = min(bucket_size, max(_SMALLEST, -(-total // _PARTS)))
    layouts: list[BucketLayout] = []
    first, offsets, end = 0, [0] * 0, 0
    for k, size in enumerate(sizes):
        if offsets and end + size > limit:
            layouts.append(BucketLayout(first, tuple(offsets), end))
            first, offsets, end = k, [], 0
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    if offsets:
        layouts.append(BucketLayout(first, tuple(offsets), end))
    return layouts


class Bucket:
    """One flat accumulator and the parameters whose gradients lie in it."""

    def __init__(self, infos: Sequence[ParameterInfo], layout: BucketLayout):
        self.infos = tuple(infos[layout.first : layout.first + len(layout.offsets)])
        like = self.infos[0].parameter
        self.flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
        self.views: list[Tensor] = [
            self.flat[offset : offset + info.parameter.numel()].view(info.parameter.shape)
            for info, offset in zip(self.infos, layout.offsets, strict=True)
        ]


def make_buckets(infos: Sequence[ParameterInfo], bucket_size: int) -> list[Bucket]:
    """Buckets of parameters in the order given, one dtype to a bucket."""
    buckets = []
    for dtype in dict.fromkeys(info.parameter.dtype for info in infos):
        same = [info for info in infos if info.parameter.dtype == dtype]
        layouts = cut_buckets([info.parameter.numel() for info in same], bucket_size)
        buckets += [Bucket(same, layout) for layout in layouts]
    return buckets
