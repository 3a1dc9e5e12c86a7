"""Chart of memory against time: the layouts that no other beats in both, and those that lost."""

from __future__ import annotations

from markupsafe import Markup

from parallel3d.planner.report.drawing import WIDTH, place_legend, render, ticks
from parallel3d.planner.report.words import duration, memory, memory_unit
from parallel3d.planner.search.result import PlanResult

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, WIDTH - 40, 24, 330
_ON, _OFF, _WINNER = "#2f69b4", "#8c959f", "#c8413b"


class _Axis:
    """Numbers -> pixels from `start` to `end`, over the range of `numbers` with a margin."""

    def __init__(self, numbers: list[float], start: float, end: float) -> None:
        low, high = min(numbers), max(numbers)
        margin = 0.06 * (high - low) or 0.1 * high or 1.0
        self.low, self.high = max(low - margin, 0.0), high + margin
        self._start, self._pixels = start, (end - start) / (self.high - self.low)

    def at(self, number: float) -> float:
        return self._start + self._pixels * (number - self.low)

    def holds(self, number: float) -> bool:
        return self.low <= number <= self.high


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
    x = _Axis([peak for peak, _, _ in shown], _LEFT, _RIGHT)
    y = _Axis([seconds for _, seconds, _ in shown], _BOTTOM, _TOP)

    def point(radius: int, colour: str, peak: int, seconds: float, layout: str) -> dict[str, object]:
        at = {"x": x.at(peak), "y": y.at(seconds), "radius": radius, "colour": colour}
        return {**at, "peak": peak, "seconds": seconds, "layout": layout}

    lost = [(r.peak, r.seconds, r.layout) for r in result.rejected if r.peak is not None and r.seconds is not None]
    inside = [one for one in [*lost, *ranked] if x.holds(one[0]) and y.holds(one[1])]
    on = {layout for _, _, layout in frontier}
    points = [point(3, _OFF, *one) for one in inside if one[2] not in on]
    points += [point(5, _ON, *one) for one in frontier if one[2] not in [p.layout for p in result.best[:1]]]
    points += [point(7, _WINNER, *one) for one in ranked[:1]]
    corners = [(f"{x.at(peak):.1f}", f"{y.at(seconds):.1f}") for peak, seconds, _ in frontier]
    unit, unit_name = memory_unit(x.high)
    words = "; ".join(f"{layout}: {memory(peak)}, {duration(seconds)}" for peak, seconds, layout in frontier)
    return render(
        "trade_off.jinja",
        peaks=[(x.at(tick * unit), f"{tick:g} {unit_name}") for tick in ticks(x.low / unit, x.high / unit)],
        times=[(y.at(tick), duration(tick)) for tick in ticks(y.low, y.high, 6)],
        points=points,
        winner=points[-1] if ranked else None,
        frontier=corners,
        legend=place_legend({"not beaten in both": _ON, "beaten": _OFF, "the winner": _WINNER}, _LEFT, _BOTTOM + 38)[0],
        label=f"Peak memory against the time of a step. {words}",
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        bottom=_BOTTOM,
        standalone=standalone,
    )
