"""Buffers that gradients pass through on their way to the shards, where every micro-batch reduces them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE
from parallel3d.zero.buckets import Bucket
from parallel3d.zero.layout import BucketLayout


def buffer_sizes(
    buckets: Iterable[Bucket | BucketLayout], whole_layers: bool, early: Collection[nn.Parameter] = ()
) -> list[int]:
    """Return the elements of each of the TransientBuffers of these buckets: as many as fill at once, and one more.

    One has the size of the largest bucket. It takes the next gradients while earlier ones are reduced.

    whole_layers: whether the gradients of a layer come all at once, as compiled layers give them. Otherwise they come bucket
    by bucket.
    early: the parameters that get gradients in a BACKWARD_INPUT; their buckets stay filling until the BACKWARD_WEIGHT.
    """
    buckets = list(buckets)
    largest = max(bucket.numel for bucket in buckets)
    if early or not whole_layers:
        filling = sum(any(info.parameter in early for info in bucket.infos) for bucket in buckets)
        return [largest] * max(2, filling + (filling < len(buckets)))
    of_unit: dict[int, list[int]] = {}
    for bucket in buckets:
        for unit in {info.unit for info in bucket.infos}:
            of_unit.setdefault(unit, []).append(bucket.numel)
    ranked = [sorted(sizes, reverse=True) for sizes in of_unit.values()]
    return [largest, *(max(sizes) for sizes in zip_longest(*ranked, fillvalue=0))]


@dataclass(eq=False)
class _Buffer:
    numel: int
    flat: Tensor | None = None  # allocated at its first use
    wait: Callable[[], object] = DONE.wait  # for the reduction that reads it


class TransientBuffers:
    """Flat buffers of the given `sizes` in elements, used again as soon as the reductions that read them are done."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device):
        self._dtype, self._device, self._largest = dtype, device, max(sizes)
        self._filling: dict[Bucket, _Buffer] = {}
        self._free = [_Buffer(size) for size in sizes]  # those that were given back last come last

    def buffer_of(self, bucket: Bucket) -> Tensor:
        """Return the buffer that the bucket's gradients go to now, [numel], to be overwritten at first.

        It is the smallest that fits, so that those which fill at once all find one. It waits for the reduction that reads it.
        """
        if bucket not in self._filling:
            fitting = [buffer for buffer in self._free if buffer.numel >= bucket.numel]
            if fitting:
                self._free.remove(buffer := min(fitting, key=lambda buffer: buffer.numel))
            else:
                buffer = _Buffer(self._largest)
            if buffer.flat is None:
                buffer.flat = torch.empty(buffer.numel, dtype=self._dtype, device=self._device)
            buffer.wait()
            buffer.wait, self._filling[bucket] = DONE.wait, buffer
        flat = self._filling[bucket].flat
        assert flat is not None
        return flat[: bucket.numel]

    def release(self, bucket: Bucket, wait: Callable[[], object]) -> None:
        """Give back the bucket's buffer; `wait` lets what follows on the current stream come after all that reads it."""
        buffer = self._filling.pop(bucket)
        buffer.wait = wait
        self._free.append(buffer)

    def release_all(self) -> None:
        """Give back the buffers that a failed batch has left in use."""
        for bucket in list(self._filling):
            self.release(bucket, DONE.wait)

    def nbytes(self) -> int:
        """Return the bytes held now, filling buffers included."""
        return sum(b.numel for b in [*self._free, *self._filling.values()] if b.flat is not None) * self._dtype.itemsize
