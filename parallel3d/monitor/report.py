"""Tables of what a run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def memory_table(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """A line a rank, in MiB: predicted/measured bytes of each component."""
    names = list(ranks[0])
    head = "rank  " + "".join(f"{name:>22}" for name in names) + "   (MiB, predicted / measured)"
    lines = [
        f"{rank:>4}  " + "".join(f"{f'{row[n][0] / 2**20:.1f} / {row[n][1] / 2**20:.1f}':>22}" for n in names)
        for rank, row in enumerate(ranks)
    ]
    return "\n".join([head, *lines])
