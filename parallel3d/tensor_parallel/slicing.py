"""Which rank holds which part of a dim: even parts, fused segments, attention heads. Pure arithmetic.

Sizes that the number of parts does not divide give parts that differ by one unit. Nothing is padded in a weight, so no
padding can show in a loss, a norm, an optimizer or a checkpoint; the collectives pad what they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from parallel3d.errors import PartitionError
from parallel3d.parameters import Range, Slicing


def even_part(size: int, parts: int, index: int) -> Range:
    """(start, stop) of part `index` of `size` things in a row: the first size % parts parts are one longer."""
    quotient, remainder = divmod(size, parts)
    start = index * quotient + min(index, remainder)
    return start, start + quotient + (index < remainder)


class Segment(Protocol):
    """A run of rows that is sliced by itself."""

    @property
    def size(self) -> int:
        """Rows in the whole."""

    def part(self, parts: int, index: int) -> Range:
        """Those of one rank."""


@dataclass(frozen=True)
class Even:
    """`size` rows in even parts."""

    size: int

    def part(self, parts: int, index: int) -> Range:
        """Those of one rank."""
        return even_part(self.size, parts, index)


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention layer, num_heads / num_kv_heads query heads to each key and value head.

    With at least as many kv heads as ranks, each rank has some of them, and their query heads. With fewer, several ranks
    share a kv head and divide its query heads. So on every rank equally many query heads go to each kv head, as
    scaled_dot_product_attention(enable_gqa=True) wants. Raises PartitionError where the numbers don't fit.
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
        """The rows of the query projection, which are the columns of the output projection."""
        return _Heads(self, of_queries=True)

    @property
    def key_value(self) -> Segment:
        """The rows of the key projection, or of the value projection."""
        return _Heads(self, of_queries=False)

    def kv_heads(self, parts: int, index: int) -> Range:
        """The kv heads that a rank uses; those of two ranks overlap where there are fewer heads than ranks."""
        self._check(parts)
        if self.num_kv_heads >= parts:
            return even_part(self.num_kv_heads, parts, index)
        head, _, _ = self._sharers(parts, index)
        return head, head + 1

    def query_heads(self, parts: int, index: int) -> Range:
        """The query heads of a rank."""
        ratio = self.num_heads // self.num_kv_heads
        start, stop = self.kv_heads(parts, index)
        if self.num_kv_heads >= parts:
            return start * ratio, stop * ratio
        head, number, place = self._sharers(parts, index)
        first, last = even_part(ratio, number, place)
        return head * ratio + first, head * ratio + last

    def _sharers(self, parts: int, index: int) -> tuple[int, int, int]:
        """The kv head of a rank, how many ranks share it, and the rank's place among them."""
        for head in range(self.num_kv_heads):
            start, stop = even_part(parts, self.num_kv_heads, head)
            if start <= index < stop:
                return head, stop - start, index - start
        raise AssertionError(f"no part {index} of {parts}")

    def _check(self, parts: int) -> None:
        if parts > self.num_heads:
            raise PartitionError(
                f"{self.num_heads} attention heads can't be split over {parts} ranks; set tensor_parallel.size to "
                f"{self.num_heads} or less"
            )


@dataclass(frozen=True)
class _Heads:
    heads: AttentionHeads
    of_queries: bool

    @property
    def size(self) -> int:
        return self.heads.head_dim * (self.heads.num_heads if self.of_queries else self.heads.num_kv_heads)

    def part(self, parts: int, index: int) -> Range:
        start, stop = (self.heads.query_heads if self.of_queries else self.heads.kv_heads)(parts, index)
        return start * self.heads.head_dim, stop * self.heads.head_dim


@dataclass(frozen=True)
class Cut:
    """A dim of `size` in parts: `ranges[r]` are rank r's, which it holds one behind the other."""

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
        """Whether the parts, equally long, one behind the other are the whole."""
        return len(set(self.lengths)) == 1 and not self.shared and all(len(ranges) == 1 for ranges in self.ranges)

    def slicing(self, dim: int, index: int) -> Slicing:
        """Rank `index`'s part of a tensor that is cut along `dim`."""
        return Slicing(dim, self.size, self.ranges[index])

    def sources(self) -> list[tuple[int, int, int]]:
        """Where the whole is found, in its order: (rank, start in the rank's part, length), each range once."""
        found: dict[int, tuple[int, int, int]] = {}
        for rank, ranges in enumerate(self.ranges):
            place = 0
            for start, stop in ranges:
                if stop > start:
                    found.setdefault(start, (rank, place, stop - start))
                place += stop - start
        return [source for _, source in sorted(found.items())]


Segments = Sequence["int | Segment"]


def cut(size: int, segments: Segments | None, parts: int) -> Cut:
    """`size` rows over `parts` ranks: evenly, or each of the segments by itself.

    segments: sizes, or Segments such as AttentionHeads(...).query. Raises PartitionError unless they add up to `size`.
    """
    pieces = [Even(s) if isinstance(s, int) else s for s in ([size] if segments is None else segments)]
    sizes = [piece.size for piece in pieces]
    if sum(sizes) != size:
        raise PartitionError(
            f"segments of {' + '.join(map(str, sizes))} = {sum(sizes)} rows don't make up {size}; give the size of each fused "
            "part, in order"
        )
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]

    def ranges(index: int) -> tuple[Range, ...]:
        parts_of = [(offset, piece.part(parts, index)) for offset, piece in zip(offsets, pieces, strict=True)]
        return tuple((offset + start, offset + stop) for offset, (start, stop) in parts_of)

    return Cut(size, tuple(ranges(index) for index in range(parts)))
