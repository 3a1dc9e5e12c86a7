"""Timeline of the best layout: as columns of integers that the page's script draws, and as an SVG."""

from __future__ import annotations

from collections import defaultdict

from parallel3d.planner.report.drawing import WIDTH, place_legend, render
from parallel3d.planner.report.words import duration
from parallel3d.planner.search.result import TimelineSpan
from parallel3d.schedule import draw
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op
from parallel3d.schedule.timing import Span, Timeline

# Ticks of a step, in the page. A window of a thousandth of a step still shows times to three digits.
_TICKS = 10_000_000
_LABELLED = 6_000
_COLUMNS = ("start", "length", "op", "chunk", "micro", "bucket")


def as_timeline(spans: tuple[TimelineSpan, ...], num_stages: int) -> Timeline:
    """Return the spans as a schedule's timeline. Raises ValueError for an op that isn't a schedule's."""
    ops = {value: Op(value) for value in {s.op for s in spans}}
    made = (Span(s.stage, Instruction(ops[s.op], s.chunk, s.micro_batch, s.bucket), s.start, s.end) for s in spans)
    return Timeline.of(made, num_stages)


def columns(timeline: Timeline, limit: int = 250_000) -> dict[str, object]:
    """Return the columns that the page draws and names instructions from, each lane's spans in the order of their starts.

    Of more than `limit` spans those in the middle of the step, where a schedule repeats itself, are left out: "left_out"
    is then (tick from, tick to, number). Starts are differences to the span before.
    """
    full = timeline.makespan or 1.0
    spans, gap = _both_ends(timeline, limit)
    shades, depth = draw.chunk_shades(timeline)
    ops = sorted({s.instruction.op for s in timeline.spans}, key=list(Op).index)
    lanes: list[dict[str, list[int]]] = [{name: [] for name in _COLUMNS} for _ in range(timeline.num_ranks)]
    ends = [0] * timeline.num_ranks
    for s in spans:
        op, chunk, micro_batch, bucket = s.instruction
        start = round(s.start / full * _TICKS)
        length = round(s.end / full * _TICKS) - start
        numbers = start - ends[s.rank], length, ops.index(op), chunk, micro_batch, -1 if bucket is None else bucket
        ends[s.rank] = start
        for name, number in zip(_COLUMNS, numbers, strict=True):
            lanes[s.rank][name].append(number)
    return {
        "seconds": full,
        "ticks": _TICKS,
        "shades": [shades.get(chunk, 0) for chunk in range(max(shades, default=-1) + 1)],
        "ops": [_op(op, depth) for op in ops],
        "left_out": None if gap is None else [round(gap[0] / full * _TICKS), round(gap[1] / full * _TICKS), gap[2]],
        "lanes": lanes,
    }


def _op(op: Op, depth: int) -> dict[str, object]:
    name = draw.NAMES[op]
    if op in COMPUTE_OPS:
        colours = [draw.box_colour(op, shade, depth) for shade in range(depth)]
        return {"short": op.value, "name": name, "colours": colours, "row": None}
    return {"short": op.value, "name": name, "colours": [draw.MARK_COLOURS[name]], "row": draw.MARK_ROWS[name]}


def _both_ends(timeline: Timeline, limit: int) -> tuple[list[Span], tuple[float, float, int] | None]:
    """Return the `limit` spans nearest to the step's begin and end, and (from, to, number) of those left out between."""
    if len(timeline.spans) <= limit:
        return list(timeline.spans), None
    full = timeline.makespan
    kept = sorted(timeline.spans, key=lambda s: min(s.end, full - s.start))[:limit]
    edge = max(min(s.end, full - s.start) for s in kept)
    kept.sort(key=lambda s: (s.rank, s.start, s.end))
    return kept, (edge, full - edge, len(timeline.spans) - limit)


def timeline_chart(timeline: Timeline, name: str) -> str:
    """Draw labelled boxes with titles, or, of more than 6,000 spans, the compute alone as bare bars."""
    if len(timeline.spans) <= _LABELLED:
        return draw.svg({name: timeline}, {name: "s"})
    left, lane = 70, max(5.0, min(24.0, 1200 / timeline.num_ranks))
    pixels = (WIDTH - left - 20) / (timeline.makespan or 1.0)
    bottom, thickness = 34 + lane * timeline.num_ranks, 10 * (lane - min(2.0, lane / 5))
    ops = [op for op in draw.BOX_COLOURS if any(s.instruction.op is op for s in timeline.spans)]
    colours = {draw.NAMES[op]: draw.box_colour(op, 0, 1) for op in ops}
    legend, below = place_legend(colours, left, bottom + 42)
    return render(
        "timeline.jinja",
        label=f"{name}: {duration(timeline.makespan)}, bubble {timeline.bubble:.1%}",
        ticks=[(left + pixels * tick, duration(tick)) for tick in draw.ticks(0, timeline.makespan)],
        stages=[(34 + lane * k + 10, k) for k in range(0, timeline.num_ranks, max(1, round(13 / lane)))],
        bars=[
            (path, colour, 34 + lane * stage + thickness / 20)
            for (stage, colour), path in _paths(timeline, 10 * pixels).items()
        ],
        thickness=thickness,
        legend=legend,
        left=left,
        bottom=bottom,
        height=bottom + 42 + below,
    )


def _paths(timeline: Timeline, scale: float) -> dict[tuple[int, str], str]:
    """Return a path for each lane and colour, by differences in tenths of a pixel: eight bytes a span."""
    shades, depth = draw.chunk_shades(timeline)
    moves: dict[tuple[int, str], list[str]] = defaultdict(lambda: ["M0 0"])
    ends: dict[tuple[int, str], int] = defaultdict(int)
    for s in timeline.spans:
        if s.instruction.op in COMPUTE_OPS:
            key = s.rank, draw.box_colour(s.instruction.op, shades[s.instruction.chunk], depth)
            start, end = round(scale * s.start), round(scale * s.end)
            moves[key].append(f"m{start - ends[key]} 0h{end - start}")
            ends[key] = end
    return {key: "".join(parts) for key, parts in moves.items()}
