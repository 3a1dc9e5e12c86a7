"""Work of layers for a device and the links, in the quantities that the time model uses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter, sub
from typing import Any, Literal

# A byte moved takes as long as this number of FLOPs: an H200 sustains some 690e12 FLOP/s in bf16 GEMMs and 4.3e12 byte/s, an
# A100 some 260e12 and 1.7e12.
FLOPS_PER_BYTE = 160

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the tensor-parallel group. nbytes: bytes of the whole tensor that is reduced, gathered or scattered."""

    kind: CollectiveKind
    nbytes: float

    def times(self, samples: int) -> Collective:
        """Return the collective of a number of samples, from that of one."""
        return self if samples == 1 else Collective(self.kind, samples * self.nbytes)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a device, and of the host that feeds it.

    - gemm_flops: FLOPs of GEMMs that are not in fp8; fp8_flops: FLOPs of those that are; attention_flops: FLOPs of fused
      attention; fp32_gemm_flops, fp32_attention_flops: the part in float32 or wider, without tensor cores.
    - moved: bytes that all other kernels read and write.
    - kernels: number of kernel launches.
    - operands: bytes that matrix products read and write, without those of weights and their gradients.
    - weights: bytes of weights and their gradients that matrix products read and write; the same for any number of samples.
    - operators: number of operators that the host calls, also those that are fused into one kernel.
    - exchanges: collectives over the tensor-parallel group, with the work that overlaps each.
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    kernels: float = 0.0
    operands: float = 0.0
    weights: float = 0.0
    operators: float = 0.0
    fp8_flops: float = 0.0
    fp32_gemm_flops: float = 0.0
    fp32_attention_flops: float = 0.0
    exchanges: tuple[Exchange, ...] = ()

    def __add__(self, other: Work) -> Work:
        values: list[Any] = [*map(add, _NUMBERS(self), _NUMBERS(other)), self.exchanges + other.exchanges]
        return Work(*values)

    def beyond(self, before: Work) -> Work:
        """Return this work minus `before`, without exchanges."""
        return Work(*map(sub, _NUMBERS(self), _NUMBERS(before)))

    @property
    def flops(self) -> float:
        """FLOPs of all matrix products, those of attention included."""
        return self.gemm_flops + self.fp8_flops + self.attention_flops

    @property
    def flops_and_bytes(self) -> float:
        """FLOPs, with the bytes that other kernels move as FLOPs: the cost of partition method "flops"."""
        return self.flops + FLOPS_PER_BYTE * self.moved

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of all exchanges."""
        return tuple(collective for exchange in self.exchanges for collective, _ in exchange)


_NUMBERS = attrgetter(*(field.name for field in fields(Work) if field.name != "exchanges"))


# Collectives in flight, from the start of the first one until the last of them is waited for: each collective, one after the
# other on the links, with the device's work from its start to the start of the next one, or to the end. That work is part of
# the Work that the exchange belongs to.
Exchange = tuple[tuple[Collective, Work], ...]
