"""Partition of a dim over ranks: even parts, fused segments, attention heads. Pure arithmetic.

Sizes that the number of parts does not divide give parts that differ by one unit. Nothing is padded in a weight, so no
padding can show in a loss, a norm, an optimizer or a checkpoint; the collectives pad what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel3d.errors import PartitionError
from parallel3d.parameters import Range, Slicing


def even_part(size: int, parts: int, index: int) -> Range:
    """Return (start, stop) of part `index` of `size` rows; the first size % parts parts are one row longer."""
    quotient, remainder = divmod(size, parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of an attention layer, with num_heads / num_kv_heads query heads for each key and value head.

    With at least as many kv heads as ranks, each rank has some of them, and their query heads. With fewer, several ranks
    share a kv head and divide its query heads. So on every rank each kv head serves the same number of query heads, as
    scaled_dot_product_attention(enable_gqa=True) requires. Raises PartitionError if the numbers don't fit.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise PartitionError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} key and value heads equally; num_heads must be "
                "a multiple of num_kv_heads"
            )

    @property
    def query(self) -> Segment:
        """Rows of the query projection, which are the columns of the output projection."""
        return Segment(self, of_queries=True)

    @property
    def key_value(self) -> Segment:
        """Rows of the key projection, or of the value projection."""
        return Segment(self, of_queries=False)

    def kv_heads(self, parts: int, index: int) -> Range:
        """Return the kv heads that a rank uses; those of two ranks overlap if there are fewer heads than ranks."""
        if parts > self.num_heads:
            raise PartitionError(
                f"{self.num_heads} attention heads can't be split over {parts} ranks; set tensor_parallel.size to "
                f"{self.num_heads} or less"
            )
        if self.num_kv_heads >= parts:
            return even_part(self.num_kv_heads, parts, index)
        head, _, _ = self._sharers(parts, index)
        return head, head + 1

    def query_heads(self, parts: int, index: int) -> Range:
        """Return the query heads of a rank."""
        ratio = self.num_heads // self.num_kv_heads
        start, stop = self.kv_heads(parts, index)
        if self.num_kv_heads >= parts:
            return start * ratio, stop * ratio
        head, number, place = self._sharers(parts, index)
        first, last = even_part(ratio, number, place)
        return head * ratio + first, head * ratio + last

    def _sharers(self, parts: int, index: int) -> tuple[int, int, int]:
        """Return the kv head of a rank, the number of ranks that share it, and the rank's position among them."""
        for head in range(self.num_kv_heads):
            start, stop = even_part(parts, self.num_kv_heads, head)
            if start <= index < stop:
                return head, stop - start, index - start
        raise AssertionError(f"no part {index} of {parts}")


@dataclass(frozen=True)
class Segment:
    """Rows of attention heads, which are sharded by whole heads."""

    heads: AttentionHeads
    of_queries: bool

    @property
    def size(self) -> int:
        """Number of rows in the whole."""
        return self.heads.head_dim * (self.heads.num_heads if self.of_queries else self.heads.num_kv_heads)

    def part(self, parts: int, index: int) -> Range:
        """Return the rows of one rank."""
        start, stop = (self.heads.query_heads if self.of_queries else self.heads.kv_heads)(parts, index)
        return start * self.heads.head_dim, stop * self.heads.head_dim


@dataclass(frozen=True)
class Cut:
    """Partition of a dim of `size`: rank r holds `ranges[r]`, one after the other."""

    size: int
    ranges: tuple[tuple[Range, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each rank's part."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def shared(self) -> bool:
        """Whether several ranks use the same range."""
        return sum(self.lengths) > self.size

    @property
    def plain(self) -> bool:
        """Whether the parts are equally long and their concatenation is the whole."""
        return len(set(self.lengths)) == 1 and not self.shared and all(len(ranges) == 1 for ranges in self.ranges)

    def slicing(self, dim: int, index: int) -> Slicing:
        """Return rank `index`'s part of a tensor that is cut along `dim`."""
        return Slicing(dim, self.size, self.ranges[index])

    def sources(self) -> list[tuple[int, int, int]]:
        """Return where each range of the whole is found, in order: (rank, start in the rank's part, length)."""
        found: dict[int, tuple[int, int, int]] = {}
        for rank, ranges in enumerate(self.ranges):
            place = 0
            for start, stop in ranges:
                if stop > start:
                    found.setdefault(start, (rank, place, stop - start))
                place += stop - start
        return [source for _, source in sorted(found.items())]


# Sizes, each sharded evenly, or Segments.
Segments = Sequence[int | Segment]


def cut(size: int, segments: Segments | None, parts: int) -> Cut:
    """Cut `size` rows for `parts` ranks: evenly, or each of the segments by itself.

    segments: sizes, or Segments such as AttentionHeads(...).query. Raises PartitionError unless they add up to `size`.
    """
    segments = [size] if segments is None else segments
    sizes = [segment if isinstance(segment, int) else segment.size for segment in segments]
    if sum(sizes) != size:
        raise PartitionError(
            f"segments of {' + '.join(map(str, sizes))} = {sum(sizes)} rows don't make up {size}; give the size of each fused "
            "part, in order"
        )
    ranges: list[list[Range]] = [[] for _ in range(parts)]
    offset = 0
    for segment, length in zip(segments, sizes, strict=True):
        for index, own in enumerate(ranges):
            if isinstance(segment, int):
                start, stop = even_part(segment, parts, index)
            else:
                start, stop = segment.part(parts, index)
            own.append((offset + start, offset + stop))
        offset += length
    return Cut(size, tuple(map(tuple, ranges)))
