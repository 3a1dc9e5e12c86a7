"""Memory against time: the layouts that no other beats in both, and those that lost."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.planner.report import svg
from parallel3d.planner.report.words import duration, memory, memory_unit
from parallel3d.planner.search.result import PlanResult

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 380, 80, 40, 24, 330
_ON, _OFF, _WINNER = "#2f69b4", "#8c959f", "#c8413b"


class _Axes:
    """(bytes, seconds) -> pixels; both axes start near the least of the points."""

    def __init__(self, points: list[tuple[int, float, str]]) -> None:
        peaks, seconds = [p[0] for p in points], [p[1] for p in points]
        self.low, self.high = _widened(min(peaks), max(peaks))
        self.fast, self.slow = _widened(min(seconds), max(seconds))

    def x(self, nbytes: float) -> float:
        return _LEFT + (svg.WIDTH - _LEFT - _RIGHT) * (nbytes - self.low) / (self.high - self.low)

    def y(self, seconds: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (seconds - self.fast) / (self.slow - self.fast)

    def holds(self, nbytes: float, seconds: float) -> bool:
        return self.low <= nbytes <= self.high and self.fast <= seconds <= self.slow

    def grid(self) -> Iterator[str]:
        unit, name = memory_unit(self.high)
        for tick in svg.ticks(self.low / unit, self.high / unit):
            x = self.x(tick * unit)
            yield svg.element("path", d=f"M{x:.1f} {_TOP}V{_BOTTOM}", stroke=svg.LINE, class_="grid")
            yield svg.text(x, _BOTTOM + 17, f"{tick:g} {name}", svg.FAINT, text_anchor="middle", font_size=11)
        for tick in svg.ticks(self.fast, self.slow, 6):
            y = self.y(tick)
            yield svg.element("path", d=f"M{_LEFT} {y:.1f}H{svg.WIDTH - _RIGHT}", stroke=svg.LINE, class_="grid")
            yield svg.text(_LEFT - 8, y + 4, duration(tick), svg.FAINT, text_anchor="end", font_size=11)
        yield svg.text(svg.WIDTH - _RIGHT, _BOTTOM + 38, "peak memory of a rank, reserved", text_anchor="end")
        yield svg.text(_LEFT - 60, _TOP - 10, "time of a step")


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    return max(low - margin, 0.0), high + margin


def trade_off_chart(result: PlanResult) -> str | None:
    """Frontier as a stepped line through its points, other layouts paler, the winner marked; None where no layout has a time.

    Points hold their layout as data-layout. Losers beyond the frontier's and the ranked layouts' range are left out.
    """
    ranked = [(p.peak, p.seconds, p.layout) for p in result.best]
    main = [*result.trade_off, *ranked]
    if not main:
        return None
    axes = _Axes(main)
    frontier = sorted(result.trade_off)
    lost = [(r.peak, r.seconds, r.layout) for r in result.rejected if r.peak is not None and r.seconds is not None]
    on = {layout for _, _, layout in frontier}
    winner = ranked[0][2] if ranked else None
    body = list(axes.grid())
    body += [
        _point(axes, point, 3.0, _OFF) for point in [*lost, *ranked] if point[2] not in on and axes.holds(*point[:2])
    ]
    if frontier:
        steps = f"M{axes.x(frontier[0][0]):.1f} {axes.y(frontier[0][1]):.1f}"
        steps += "".join(f"H{axes.x(peak):.1f}V{axes.y(seconds):.1f}" for peak, seconds, _ in frontier[1:])
        body.append(svg.element("path", d=steps, fill="none", stroke=_ON, stroke_width=1.5))
    body += [_point(axes, point, 5.0, _ON) for point in frontier if point[2] != winner]
    if ranked:
        body += [_point(axes, ranked[0], 7.0, _WINNER), _name(axes, ranked[0])]
    entries = {"not beaten in both": _ON, "beaten": _OFF, "the winner": _WINNER}
    legend, _ = svg.legend(entries, _LEFT, _BOTTOM + 38)
    words = "; ".join(f"{layout}: {memory(peak)}, {duration(seconds)}" for peak, seconds, layout in frontier)
    return svg.drawing(body + legend, _HEIGHT, f"Peak memory against the time of a step. {words}")


def _point(axes: _Axes, point: tuple[int, float, str], radius: float, colour: str) -> str:
    peak, seconds, layout = point
    tip = svg.title(f"{layout}\n{memory(peak)}, {duration(seconds)} a step")
    focus = 0 if radius > 3 else None
    return svg.element(
        "circle", tip, cx=axes.x(peak), cy=axes.y(seconds), r=radius, fill=colour, stroke="#ffffff", class_="point",
        data_layout=layout, tabindex=focus,
    )  # fmt: skip


def _name(axes: _Axes, point: tuple[int, float, str]) -> str:
    x = axes.x(point[0])
    end = x > svg.WIDTH - 260
    y = axes.y(point[1]) + 15
    return svg.text(x - 9 if end else x + 9, y, point[2], text_anchor="end" if end else None, font_weight="bold")
