"""What layers ask of a device and of the links: the words between the model's profile and the time model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One over a slice group. nbytes: of the whole tensor, reduced, gathered or to be scattered."""

    kind: CollectiveKind
    nbytes: float


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does.

    gemm_flops: of products of matrices; attention_flops: of fused attention; moved: bytes that all other kernels read and
    write; kernels: how many are launched; collectives: over the slice group, which the work waits for.
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    collectives: tuple[Collective, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.moved + other.moved,
            self.kernels + other.kernels,
            self.collectives + other.collectives,
        )

    def times(self, samples: int) -> Work:
        """About what so many samples at once ask for, of what one does: no more than what grows with them."""
        return replace(
            self,
            gemm_flops=samples * self.gemm_flops,
            attention_flops=samples * self.attention_flops,
            moved=samples * self.moved,
            collectives=tuple(Collective(c.kind, samples * c.nbytes) for c in self.collectives),
        )

    @property
    def flops(self) -> float:
        """Of all matrix products."""
        return self.gemm_flops + self.attention_flops
