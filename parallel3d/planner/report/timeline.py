"""Timeline of the best layout: as columns of integers that the page's script draws, and as an SVG."""

from __future__ import annotations

from parallel3d.planner.formats import duration
from parallel3d.planner.search.result import Prediction
from parallel3d.schedule import draw
from parallel3d.schedule.instructions import Op
from parallel3d.schedule.timing import Span, Timeline

# Ticks of a step, in the page. A window of a thousandth of a step still shows times to three digits.
_TICKS = 10_000_000
_COLUMNS = ("start", "length", "op", "chunk", "micro", "bucket")


def columns(timeline: Timeline, limit: int = 250_000, seconds: float | None = None) -> dict[str, object]:
    """Return the columns that the page draws and names instructions from, each lane's spans in the order of their starts.

    seconds: length of the time axis, if it is longer than the timeline.

    If there are more than `limit` spans, those in the middle of the step, where a schedule repeats itself, are left out:
    "left_out" is then (tick from, tick to, number). Starts are differences to the span before.
    """
    full = seconds or timeline.makespan or 1.0
    spans, gap = _both_ends(timeline, limit)
    shades, colours = _colours(timeline)
    ops = sorted({s.instruction.op for s in timeline.spans}, key=list(Op).index)
    lanes: list[dict[str, list[int]]] = [{name: [] for name in _COLUMNS} for _ in range(timeline.num_ranks)]
    ends = [0] * timeline.num_ranks
    for s in spans:
        op, chunk, micro_batch, bucket, _ = s.instruction
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
        "ops": [_op(op, colours) for op in ops],
        "left_out": None if gap is None else [round(gap[0] / full * _TICKS), round(gap[1] / full * _TICKS), gap[2]],
        "lanes": lanes,
    }


def _colours(timeline: Timeline) -> tuple[dict[int, int], dict[Op, list[str]]]:
    """Return each chunk's place among the chunks of its stage, and the colours of each compute operation by that place."""
    shades, depth = draw.chunk_shades(timeline)
    used = [op for op in draw.BOX_COLOURS if any(s.instruction.op is op for s in timeline.spans)]
    return shades, {op: [draw.box_colour(op, k, depth) for k in range(depth)] for op in used}


def _op(op: Op, colours: dict[Op, list[str]]) -> dict[str, object]:
    name = draw.NAMES[op]
    shown = colours[op] if op in colours else [draw.MARK_COLOURS[name]]
    return {"short": op.value, "name": name, "colours": shown, "row": draw.MARK_ROWS.get(name)}


def _both_ends(timeline: Timeline, limit: int) -> tuple[list[Span], tuple[float, float, int] | None]:
    """Return the `limit` spans nearest to the step's begin and end, and (from, to, number) of those left out between."""
    if len(timeline.spans) <= limit:
        return list(timeline.spans), None
    full = timeline.makespan
    kept = sorted(timeline.spans, key=lambda s: min(s.end, full - s.start))[:limit]
    edge = max(min(s.end, full - s.start) for s in kept)
    kept.sort(key=lambda s: (s.rank, s.start, s.end))
    return kept, (edge, full - edge, len(timeline.spans) - limit)


def what_is_drawn(timeline: Timeline, prediction: Prediction) -> str:
    """Say which part of the predicted step the timeline is: all of its pipeline, or the first micro-batches."""
    drawn = 1 + max((s.instruction.micro_batch for s in timeline.spans), default=-1)
    shown, step = duration(timeline.makespan), duration(prediction.seconds)
    if drawn < prediction.micro_batches:
        return f"the first {drawn} of {prediction.micro_batches} micro-batches, {shown}; the step takes {step}"
    return f"{shown} of the step's {step}; the optimizer's {duration(prediction.breakdown['optimizer'])} follow"


def timeline_chart(timeline: Timeline, prediction: Prediction) -> str:
    """Draw the timeline of a prediction."""
    name = prediction.layout
    return draw.svg({name: timeline}, {name: "s"}, notes={name: what_is_drawn(timeline, prediction)})
