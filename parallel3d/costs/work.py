"""What layers ask of a device and of the links: the words between the model's profile and the time model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One over a slice group. nbytes: of the whole tensor, reduced, gathered or to be scattered."""

    kind: CollectiveKind
    nbytes: float

    def times(self, samples: int) -> Collective:
        """Of a tensor of so many samples, of one's."""
        return self if samples == 1 else Collective(self.kind, samples * self.nbytes)


@dataclass(frozen=True, slots=True)
class Work:
    """What a device does, and a host for it.

    gemm_flops: of products of matrices; attention_flops: of fused attention; moved: bytes that all other kernels read and
    write; kernels: how many are launched; operands: bytes that products of matrices read and write, but for weights: those of
    weights and their gradients, the same for any number of samples; operators: that the host calls, fused ones each;
    exchanges: over the slice group.
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    operands: float = 0.0
    weights: float = 0.0
    operators: float = 0.0
    exchanges: tuple[Exchange, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(
            self.gemm_flops + other.gemm_flops,
            self.attention_flops + other.attention_flops,
            self.moved + other.moved,
            self.kernels + other.kernels,
            self.operands + other.operands,
            self.weights + other.weights,
            self.operators + other.operators,
            self.exchanges + other.exchanges,
        )

    def beyond(self, before: Work) -> Work:
        """What is more than `before`, exchanges aside."""
        return Work(
            self.gemm_flops - before.gemm_flops,
            self.attention_flops - before.attention_flops,
            self.moved - before.moved,
            self.kernels - before.kernels,
            self.operands - before.operands,
            self.weights - before.weights,
            self.operators - before.operators,
        )

    @property
    def flops(self) -> float:
        """Of all matrix products."""
        return self.gemm_flops + self.attention_flops

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Of all exchanges."""
        return tuple(collective for exchange in self.exchanges for collective, _ in exchange.parts)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives under way, from the first one's start until the last of them is waited for.

    parts: each collective, one after the other on the links, with what of the device's work goes on behind its start, until
    the next one's or the end. It is part of the Work that the exchange belongs to.
    """

    parts: tuple[tuple[Collective, Work], ...]
