"""Chart of memory against time: the layouts that no other beats in both, and those that lost."""

from __future__ import annotations

from markupsafe import Markup

from parallel3d.planner.report.drawing import WIDTH, place_legend, render, ticks
from parallel3d.planner.report.words import duration, memory, memory_unit
from parallel3d.planner.search.result import PlanResult

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, WIDTH - 40, 24, 330
_ON, _OFF, _WINNER = "#2f69b4", "#8c959f", "#c8413b"


def trade_off_chart(result: PlanResult, standalone: bool = False) -> Markup | None:
    """Draw the frontier as a stepped line through its points, other layouts paler, the winner marked.

    Points hold their layout as data-layout. Layouts that lost and lie beyond the range of the others are left out. None where
    no layout has a time. standalone: on a white ground.
    """
    ranked = [(p.peak, p.seconds, p.layout) for p in result.best]
    frontier = sorted(result.trade_off)
    shown = [*frontier, *ranked]
    if not shown:
        return None
    # Both axes start near the least of the points.
    low, high = _widened([peak for peak, _, _ in shown])
    fast, slow = _widened([seconds for _, seconds, _ in shown])

    def x(peak: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (peak - low) / (high - low)

    def y(seconds: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (seconds - fast) / (slow - fast)

    def point(radius: int, colour: str, peak: int, seconds: float, layout: str) -> dict[str, object]:
        at = {"x": x(peak), "y": y(seconds), "radius": radius, "colour": colour}
        return {**at, "peak": peak, "seconds": seconds, "layout": layout}

    lost = [(r.peak, r.seconds, r.layout) for r in result.rejected if r.peak is not None and r.seconds is not None]
    inside = [one for one in [*lost, *ranked] if low <= one[0] <= high and fast <= one[1] <= slow]
    on = {layout for _, _, layout in frontier}
    points = [point(3, _OFF, *one) for one in inside if one[2] not in on]
    points += [point(5, _ON, *one) for one in frontier if one[2] not in {layout for _, _, layout in ranked[:1]}]
    points += [point(7, _WINNER, *one) for one in ranked[:1]]
    path = "".join(
        f"{'H' if k else 'M'}{x(p):.1f}{'V' if k else ' '}{y(s):.1f}" for k, (p, s, _) in enumerate(frontier)
    )
    unit, unit_name = memory_unit(high)
    words = "; ".join(f"{layout}: {memory(peak)}, {duration(seconds)}" for peak, seconds, layout in frontier)
    return render(
        "trade_off.jinja",
        peaks=[(x(tick * unit), f"{tick:g} {unit_name}") for tick in ticks(low / unit, high / unit)],
        times=[(y(tick), duration(tick)) for tick in ticks(fast, slow, 6)],
        points=points,
        winner=points[-1] if ranked else None,
        frontier=path,
        legend=place_legend({"not beaten in both": _ON, "beaten": _OFF, "the winner": _WINNER}, _LEFT, _BOTTOM + 38)[0],
        label=f"Peak memory against the time of a step. {words}",
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        standalone=standalone,
    )


def _widened(numbers: list[float] | list[int]) -> tuple[float, float]:
    """Return the range of the numbers with a margin."""
    low, high = min(numbers), max(numbers)
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    return max(low - margin, 0.0), high + margin
