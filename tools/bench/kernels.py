"""A device's time in a step by parts: each moment belongs to one part. Pure functions of a profile's kernels.

Times are integers, nanoseconds of the profiler's clock, so that the parts add up to the step exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import quantiles

Interval = tuple[int, int]


@dataclass(frozen=True)
class Kernel:
    """A kernel that a device ran from `start` to `end` on any stream, with the profiler's name."""

    name: str
    start: int
    end: int


# The first rule that a name matches says what a kernel is: CUDA's kernels, and the operators that stand for them on the CPU.
_RULES = {
    "waiting": r"wait_signal|wait_value|await_count",
    "communication": r"^nccl|^Memcpy PtoP|put_signal|write_value|multimem|(one|two)_shot|::all_reduce<|^gloo:",
    "optimizer": r"multi_tensor_apply|fused_?(adam|adagrad|sgd|lion)|::_foreach",
    "attention": r"flash|fmha|sdpa|attention|mha_|cudnn",
    "GEMM": r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitk|triton_tem|^aten::(mm|addmm|bmm|baddbmm)$",
    "copies": r"^Memcpy|^Memset|^aten::(copy_|_to_copy|clone)$",
}
_PATTERNS = {category: re.compile(pattern, re.IGNORECASE) for category, pattern in _RULES.items()}
_OTHER = "element-wise and other"
_FROM_PEER = re.compile(r"SendRecv|^gloo:(send|recv)", re.IGNORECASE)

# A moment at which kernels of several kinds run belongs to the first of them.
_COMPUTE = ("GEMM", "attention", "optimizer", _OTHER)
EXPOSED = "communication exposed"
IDLE = "idle"
PARTS = (*_COMPUTE, EXPOSED, "copies", IDLE)


@dataclass(frozen=True)
class Attribution:
    """Nanoseconds of a step: `parts`, by PARTS, add up to it; hidden: communication while a compute kernel ran."""

    parts: Mapping[str, int]
    hidden: int


def category(name: str) -> str:
    """Return a kernel's part by its name: a compute part, "communication", "copies", or "waiting" for a peer (idle)."""
    return next((found for found, pattern in _PATTERNS.items() if pattern.search(name)), _OTHER)


def attribute(kernels: Iterable[Kernel], begin: int, end: int) -> Attribution:
    """Attribute each nanosecond of the step from `begin` to `end`; what ran outside of it doesn't count."""
    of: dict[str, list[Interval]] = {}
    for kernel in without_waiting(list(kernels)):
        start, stop = max(kernel.start, begin), min(kernel.end, end)
        if start < stop:
            of.setdefault(category(kernel.name), []).append((start, stop))
    parts: dict[str, int] = {}
    taken: list[Interval] = []
    for part in PARTS[:-1]:
        before = _length(taken)
        taken = union([*taken, *of.get("communication" if part == EXPOSED else part, [])])
        parts[part] = _length(taken) - before
    parts[IDLE] = end - begin - _length(taken)
    return Attribution(parts, hidden=_length(union(of.get("communication", []))) - parts[EXPOSED])


def without_waiting(kernels: Sequence[Kernel]) -> list[Kernel]:
    """The kernels, those that take a message cut to the time that its transfer takes.

    Posted early, such a kernel spins until its peer has made the message, which is the peer's or the schedule's doing. All
    messages of a pipeline are alike, and those sent when their receiver is ready wait for nothing: what a kernel lasts
    longer than the lower quartile of them is taken for waiting, and the transfer for its end.
    """
    lengths = [kernel.end - kernel.start for kernel in kernels if _FROM_PEER.search(kernel.name)]
    if len(lengths) < 2:
        return list(kernels)
    transfer = int(quantiles(lengths, method="inclusive")[0])
    return [
        replace(kernel, start=max(kernel.start, kernel.end - transfer)) if _FROM_PEER.search(kernel.name) else kernel
        for kernel in kernels
    ]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(disjoint: Iterable[Interval]) -> int:
    return sum(end - start for start, end in disjoint)
