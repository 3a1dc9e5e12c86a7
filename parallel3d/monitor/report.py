"""Tables of what a run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel3d.monitor.breakdown import PARTS, Breakdown, combined

# A table of more ranks than this shows what they have in common alone.
_MOST_RANKS = 16


def memory_table(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """A line a rank, in MiB: predicted/measured bytes of each component."""
    names = list(ranks[0])
    head = "rank  " + "".join(f"{name:>22}" for name in names) + "   (MiB, predicted / measured)"
    lines = [
        f"{rank:>4}  " + "".join(f"{f'{row[n][0] / 2**20:.1f} / {row[n][1] / 2**20:.1f}':>22}" for n in names)
        for rank, row in enumerate(ranks)
    ]
    return "\n".join([head, *lines])


def step_line(
    step: int,
    loss: float,
    grad_norm: float | None,
    lr: Sequence[float],
    momentum: Sequence[object],
    skipped: int,
    seconds: float,
    samples: float,
) -> str:
    """One line. lr, momentum: of each parameter group; skipped: steps, so far; seconds: a step; samples: a second."""
    norm = "-" if grad_norm is None else f"{grad_norm:.4g}"
    rates = " ".join(f"{rate:.4g}" for rate in lr)
    moments = f", mom {' '.join(str(m) for m in momentum)}" if momentum else ""
    return (
        f"step {step}: loss {loss:.4f}, grad norm {norm}, lr {rates}{moments}, skipped {skipped}, "
        f"{seconds:.4g} s/step, {samples:.4g} samples/s"
    )


def breakdown_table(step: int, ranks: Sequence[Breakdown]) -> str:
    """Seconds of a step by part: mean and max over ranks, the mean's share of the step, and each rank where they are few."""
    columns = [*PARTS, "total"]

    def row(name: str, cells: Sequence[str]) -> str:
        return f"{name:<12}" + "".join(f"{cell:>14}" for cell in cells)

    mean, most = combined(ranks, "mean"), combined(ranks, "max")
    whole = mean.total or 1.0
    lines = [row(f"step {step}, s", columns)]
    lines += [row("mean", [f"{getattr(mean, c):.4g}" for c in columns])]
    lines += [row("share", [f"{getattr(mean, c) / whole:.1%}" for c in columns])]
    highest = {**{c: getattr(most, c) for c in PARTS}, "total": max(rank.total for rank in ranks)}
    lines += [row("max", [f"{highest[c]:.4g}" for c in columns])]
    if 1 < len(ranks) <= _MOST_RANKS:
        lines += [row(f"rank {r}", [f"{getattr(rank, c):.4g}" for c in columns]) for r, rank in enumerate(ranks)]
    return "\n".join(lines)


def phase_table(step: int, ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> str:
    """A line a phase of a step, in MiB: mean and max over ranks of each kind of memory, at the phase's end."""
    kinds = list(next(iter(ranks[0].values())))
    lines = [f"step {step}, MiB".ljust(20) + "".join(f"{kind:>22}" for kind in kinds) + "   (mean / max over ranks)"]
    for phase in ranks[0]:
        cells = []
        for kind in kinds:
            values = [rank[phase][kind] / 2**20 for rank in ranks]
            cells.append(f"{sum(values) / len(values):.1f} / {max(values):.1f}")
        lines.append(phase.ljust(20) + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)
