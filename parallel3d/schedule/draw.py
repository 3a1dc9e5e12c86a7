"""Drawings of a schedule: a text grid, the grid around one instruction, an SVG, a trace for Perfetto or Chrome."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError
from math import ceil, floor, log10
from typing import Any

from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.order import blocks_host
from parallel3d.schedule.timing import Cost, Span, Timeline, simulate, unit_cost

NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "input gradient",
    Op.BACKWARD_WEIGHT: "weight gradient",
    Op.RECV_ACTIVATION: "receive",
    Op.RECV_GRADIENT: "receive",
    Op.SEND_ACTIVATION: "send",
    Op.SEND_GRADIENT: "send",
    Op.LOAD_MICRO_BATCH: "load",
    Op.GATHER_PARAMS: "gather",
    Op.RELEASE_PARAMS: "release",
    Op.REDUCE_GRADS: "reduce",
    Op.REDUCE_REPLICAS: "reduce",
}


def chunk_shades(timeline: Timeline) -> tuple[dict[int, int], int]:
    """Return chunk -> its index among the chunks of its stage, and the largest number of chunks of a stage."""
    held: dict[int, set[int]] = {}
    for s in _computes(timeline):
        held.setdefault(s.rank, set()).add(s.instruction.chunk)
    shades = {chunk: k for chunks in held.values() for k, chunk in enumerate(sorted(chunks))}
    return shades, 1 + max(shades.values(), default=0)


def _computes(timeline: Timeline) -> list[Span]:
    return [s for s in timeline.spans if s.instruction.op in COMPUTE_OPS]


# ---------------------------------------------------------------------------------------------------------- text

_BRACKETS = {Op.FORWARD: "{}", Op.BACKWARD: "[{}]", Op.BACKWARD_INPUT: "({})", Op.BACKWARD_WEIGHT: "<{}>"}
# A box of the text grid: its first slot in a rank's row, the slot after its last one, its label.
_Cell = tuple[int, int, str]


def text_grid(program: Program, cost: Cost = unit_cost, max_width: int = 160) -> str:
    """Print the program's simulated compute as papers do: a row for each stage, a column for each unit of time.

    3 is a forward of micro-batch 3, [3] its backward, (3) and <3> the halves of a split one, "." an idle slot. Where a
    stage holds several chunks a letter says which: 3a on its first, 3b on its second. A slot is as long as the shortest
    instruction; times between slots are rounded. Rows longer than max_width characters go on in a further block.
    """
    timeline = simulate(program, cost)
    rows = _cells(timeline)
    cells = [c for row in rows for c in row]
    width = max((ceil((len(label) + 1) / (stop - start)) for start, stop, label in cells), default=2)
    num_slots = max((stop for _, stop, _ in cells), default=0)
    if num_slots * width > max_width:
        # Rows will be cut between slots: no label may lie across a cut.
        width = max(width, *(len(label) for *_, label in cells))
    heads = [f"stage {rank}".ljust(len(f"stage {len(rows) - 1}")) + " |" for rank in range(len(rows))]
    lines = [_row(row, num_slots, width) for row in rows]
    block = max(1, (max_width - len(heads[0])) // width) * width
    blocks = [
        "\n".join(head + line[cut : cut + block] for head, line in zip(heads, lines, strict=True))
        for cut in range(0, max(num_slots * width, 1), block)
    ]
    title = (
        f"{program.name}: {program.num_ranks} stages, {program.num_micro_batches} micro-batches, "
        f"makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.1%}"
    )
    return title + "\n" + "\n\n".join(blocks)


def _cells(timeline: Timeline) -> list[list[_Cell]]:
    spans = _computes(timeline)
    slot = min((s.end - s.start for s in spans if s.end > s.start), default=1.0)
    letters, depth = chunk_shades(timeline)
    rows: list[list[_Cell]] = [[] for _ in range(timeline.num_ranks)]
    for s in spans:
        row, i = rows[s.rank], s.instruction
        start = max(floor(s.start / slot + 0.5), row[-1][1] if row else 0)
        letter = string.ascii_letters[letters[i.chunk] % len(string.ascii_letters)] if depth > 1 else ""
        label = _BRACKETS[i.op].format(f"{i.micro_batch}{letter}")
        row.append((start, max(start + 1, floor(s.end / slot + 0.5)), label))
    return rows


def _row(cells: Iterable[_Cell], num_slots: int, width: int) -> str:
    idle, line, at = ".".rjust(width), "", 0
    for start, stop, label in cells:
        line += idle * (start - at) + label.rjust((stop - start) * width)
        at = stop
    return line + idle * (num_slots - at)


def neighbourhood(program: Program, rank: int, position: int, radius: int = 3) -> str:
    """Print the schedule around instruction `position` of `rank`'s list, a line for each stage, for a failure's message.

    The instruction is marked, >F3@1<. Its column shows what each other stage computes at that moment of the simulated
    schedule ("-": idle), with `radius` compute instructions on both sides.
    """
    clock, marked = _clock(program), program.instructions[rank][position]
    moment = clock[rank, marked][0]
    lines = []
    for r, instructions in enumerate(program.instructions):
        if r == rank:
            before = [i for i in instructions[:position] if i.op in COMPUTE_OPS]
            middle = f">{marked}<"
            after = [i for i in instructions[position + 1 :] if i.op in COMPUTE_OPS]
        else:
            computes = [i for i in instructions if i.op in COMPUTE_OPS]
            before = [i for i in computes if clock[r, i][1] <= moment]
            after = computes[len(before) :]
            runs = bool(after) and clock[r, after[0]][0] <= moment
            middle = f" {after.pop(0)} " if runs else " - "
        left = [""] * radius + [str(i) for i in before]
        right = [str(i) for i in after] + [""] * radius
        more = ["..." if len(own) > radius else "" for own in (before, after)]
        shown = [more[0], *left[len(left) - radius :], middle, *right[:radius], more[1]]
        lines.append([f"stage {r}", "|", *shown])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(" ".join(t.ljust(w) for t, w in zip(line, widths, strict=True) if w).rstrip() for line in lines)


def _clock(program: Program) -> dict[tuple[int, Instruction], tuple[float, float]]:
    """Return when each (rank, instruction) starts and ends, in the papers' units; if it deadlocks, by list positions."""
    try:
        return {(s.rank, s.instruction): (s.start, s.end) for s in simulate(program).spans}
    except CycleError:
        lists = enumerate(program.instructions)
        return {(rank, i): (k, k + 1) for rank, instructions in lists for k, i in enumerate(instructions)}


# ----------------------------------------------------------------------------------------------------------- SVG

BOX_COLOURS = {
    Op.FORWARD: (47, 105, 180),
    Op.BACKWARD: (46, 135, 82),
    Op.BACKWARD_INPUT: (24, 138, 141),
    Op.BACKWARD_WEIGHT: (196, 120, 32),
}
MARK_ROWS = {"receive": 0, "send": 1, "reduce": 2, "gather": 2, "release": 2, "load": 2}
MARK_COLOURS = {
    "receive": "#b48ad6",
    "send": "#7a3fa8",
    "reduce": "#c8413b",
    "gather": "#d98c2b",
    "release": "#e8c39a",
    "load": "#7d8590",
}
_LEFT, _RIGHT, _TITLE, _AXIS, _LANE, _MARK, _GAP = 62, 18, 30, 34, 24, 4, 6
_INK, _FAINT = "#24292f", "#6e7781"
_MOST_BOXES = 6_000  # spans of a panel: with more, only compute is drawn, without labels and titles


class _Scale:
    """Time -> x. `shown` is the unit printed on the axis, worth 1 / factor of the timeline's."""

    def __init__(self, full: float, unit: str, pixels: float):
        self.pixels, self.full, self.factor, self.shown = pixels, full or 1.0, 1.0, unit
        if unit == "s" and full < 1:
            self.factor, self.shown = (1e3, "ms") if full >= 1e-3 else (1e6, "µs")

    def x(self, time: float) -> float:
        return _LEFT + self.pixels * time / self.full

    def text(self, time: float) -> str:
        number = time * self.factor
        return f"{number:,.0f} {self.shown}" if number >= 1e4 else f"{number:.4g} {self.shown}"


def ticks(low: float, high: float, number: int = 8) -> Iterator[float]:
    """Yield the multiples of 1, 2 or 5 times a power of ten in [low, high], at most about `number` of them."""
    rough = ((high - low) or abs(high) or 1.0) / number
    power = 10.0 ** floor(log10(rough))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= rough * 0.999)
    for k in range(ceil(low / step * 0.9999), int(high / step * 1.0001) + 1):
        yield k * step


def svg(
    timelines: Mapping[str, Timeline],
    units: Mapping[str, str] | None = None,
    width: int = 1200,
    notes: Mapping[str, str] | None = None,
) -> str:
    """Draw one self-contained SVG, `width` pixels wide: a panel for each named timeline, a lane for each stage.

    Boxes are forwards and backwards with their micro-batch where it fits, coloured by kind, paler for each further
    chunk of the stage; thin marks below a lane are transfers, reductions and loads that take time. Of a timeline with more
    than 6,000 instructions only the compute is drawn, as bare bars. units: panel -> unit
    of its times, "s" for seconds; by default "s" for the panel "measured" and "units" for any other. Panels of one unit
    share one scale. notes: panel -> what is written after its name, by default its makespan and bubble.
    """
    given = units or {}
    unit = {name: given.get(name, "s" if name == "measured" else "units") for name in timelines}
    panels, top = [], 10.0
    for name, timeline in timelines.items():
        full = max(t.makespan for n, t in timelines.items() if unit[n] == unit[name])
        scale = _Scale(full, unit[name], width - _LEFT - _RIGHT)
        note = (notes or {}).get(name, f"{scale.text(timeline.makespan)}, bubble {timeline.bubble:.1%}")
        panels.append({**_panel(name, timeline, scale, top + _TITLE), "note": note})
        top = panels[-1]["bottom"] + _AXIS
    # Imported here: a process that draws only text, for a failure's message, needs no templates.
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("parallel3d.schedule", ""), autoescape=True, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("timelines.jinja").render(
        ticks=ticks,
        names=NAMES,
        panels=panels,
        legend=_legend(timelines.values()),
        legend_y=top + 14,
        left=_LEFT,
        lane=_LANE,
        thin=_MARK - 1,
        ink=_INK,
        faint=_FAINT,
        width=width,
        height=f"{top + 34:.0f}",
    )


# Functions, not macros of the template, which take five times as long.
def _marked(timeline: Timeline) -> list[tuple[Span, str]]:
    """Return (span, kind) of all instructions but compute that take time; a simulation may count them as free."""
    if len(timeline.spans) > _MOST_BOXES:
        return []
    spans = (s for s in timeline.spans if s.instruction.op not in COMPUTE_OPS and s.end > s.start)
    return [(s, NAMES[s.instruction.op]) for s in spans]


def _panel(name: str, timeline: Timeline, scale: _Scale, first: float) -> dict[str, Any]:
    """Return what the template draws for a timeline; first: y of its first lane."""
    shades, depth = chunk_shades(timeline)
    are_few = len(timeline.spans) <= _MOST_BOXES
    marks = [
        (s, max(scale.x(s.end) - scale.x(s.start), 1), MARK_COLOURS[kind], kind, MARK_ROWS[kind])
        for s, kind in _marked(timeline)
    ]
    lane = _LANE + _GAP + (_MARK * (1 + max(row for *_, row in marks)) + 4 if marks else 0)
    return {
        "name": name,
        "timeline": timeline,
        "scale": scale,
        "first": first,
        "lane": lane,
        "bottom": first + lane * timeline.num_ranks,
        "boxes": [_box(s, scale, shades[s.instruction.chunk], depth) for s in _computes(timeline)] if are_few else (),
        "bars": {} if are_few else _bars(timeline, scale),
        "marks": marks,
    }


def _box(s: Span, scale: _Scale, shade: int, depth: int) -> tuple[Span, float, str, int | None, str]:
    """Return (span, width, colour, size of the label if it fits, the label's colour)."""
    width, label = scale.x(s.end) - scale.x(s.start), str(s.instruction.micro_batch)
    size = next((size for size in (12, 10, 8) if width >= 0.6 * size * len(label) + 3), None)
    colour = box_colour(s.instruction.op, shade, depth)
    red, green, blue = bytes.fromhex(colour[1:])
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 160
    return s, width, colour, size, "#ffffff" if is_dark else _INK


def _bars(timeline: Timeline, scale: _Scale) -> dict[tuple[int, str], str]:
    """Return a path for each lane and colour, by differences in tenths of a pixel: eight bytes an instruction."""
    shades, depth = chunk_shades(timeline)
    paths: dict[tuple[int, str], list[str]] = defaultdict(lambda: ["M0 0"])
    ends: dict[tuple[int, str], int] = defaultdict(int)
    for s in _computes(timeline):
        key = s.rank, box_colour(s.instruction.op, shades[s.instruction.chunk], depth)
        start, end = (round(10 * scale.x(time)) for time in (s.start, s.end))
        paths[key].append(f"m{start - ends[key]} 0h{end - start}")
        ends[key] = end
    return {key: "".join(moves) for key, moves in paths.items()}


def box_colour(op: Op, shade: int, depth: int) -> str:
    """Return the kind's colour, mixed with up to 65% white for the last of `depth` chunks, as "#2f69b4"."""
    white = 0.65 * shade / max(depth - 1, 1)
    return "#" + bytes(round(c + (255 - c) * white) for c in BOX_COLOURS[op]).hex()


def _legend(timelines: Iterable[Timeline]) -> list[tuple[float, int, list[str], str]]:
    """Return (x, height of its colours, colours, name) of each entry."""
    drawn = list(timelines)
    depth = max((chunk_shades(t)[1] for t in drawn), default=1)
    ops = {s.instruction.op for t in drawn for s in _computes(t)}
    kinds = {kind for t in drawn for _, kind in _marked(t)}
    shaded = {op: [box_colour(op, shade, depth) for shade in range(depth)] for op in BOX_COLOURS}
    named = [(12, colours, NAMES[op]) for op, colours in shaded.items() if op in ops]
    named += [(_MARK - 1, [colour], kind) for kind, colour in MARK_COLOURS.items() if kind in kinds]
    named.append((0, [], "paler: a later chunk; " * (depth > 1) + "number: micro-batch"))
    entries, x = [], float(_LEFT)
    for height, colours, name in named:
        entries.append((x, height, colours, name))
        x += 12 * len(colours) + 5 + 6.5 * len(name) + 16
    return entries


# --------------------------------------------------------------------------------------------------------- trace


def chrome_trace(timelines: Mapping[str, Timeline], scale_to_us: float = 1e6) -> dict[str, Any]:
    """Make a trace in Chrome's event format, for json.dump; Perfetto (ui.perfetto.dev) and chrome://tracing open it.

    Each timeline is a process. It has a thread for each stage's compute and loads, and as many threads for its transfers
    and reductions as overlap. scale_to_us: microseconds in the timelines' unit of time, 1e6 for seconds.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        events += _titles("process", pid, 0, name, pid)
        tid = 1000 * pid  # Perfetto reserves 0 and treats tid == pid as a process's main thread.
        for rank in range(timeline.num_ranks):
            for title, is_host in ((f"stage {rank}", True), (f"stage {rank} communication", False)):
                own = [s for s in timeline.spans if s.rank == rank and blocks_host(s.instruction.op) is is_host]
                for row in _rows_without_overlap(own):
                    events += _titles("thread", pid, tid, title, tid)
                    events += [_event(s, pid, tid, scale_to_us) for s in row]
                    tid += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows_without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over the fewest rows without overlap: viewers take overlapping events of a thread for nested calls."""
    rows: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: (s.start, s.end)):
        row = next((row for row in rows if row[-1].end <= s.start), None)
        if row is None:
            rows.append(row := [])
        row.append(s)
    return rows


def _titles(kind: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, Any]]:
    """Return the events that name a process or a thread and set its place among the others."""
    settings = {"name": name, "sort_index": place}
    return [
        {"ph": "M", "name": f"{kind}_{key}", "pid": pid, "tid": tid, "args": {key: value}}
        for key, value in settings.items()
    ]


def _event(s: Span, pid: int, tid: int, scale_to_us: float) -> dict[str, Any]:
    i = s.instruction
    args: dict[str, Any] = {"chunk": i.chunk, "micro_batch": i.micro_batch}
    if i.bucket is not None:
        args["bucket"] = i.bucket
    times = {"ts": s.start * scale_to_us, "dur": (s.end - s.start) * scale_to_us}
    return {"ph": "X", "name": str(i), "cat": NAMES[i.op], "pid": pid, "tid": tid, **times, "args": args}
