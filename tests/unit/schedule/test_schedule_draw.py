"""Drawings: the papers' figures as text, the grid around a failure, SVG and traces that hold every instruction."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_emulator import programs, unhurried

from parallel3d.schedule.builders import from_lists, gpipe, inference, interleaved, one_f_one_b
from parallel3d.schedule.draw import chrome_trace, neighbourhood, svg, text_grid, ticks
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Program
from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, lower
from parallel3d.schedule.timing import Span, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def with_transfers(program: Program, gathers: bool = False) -> Timeline:
    """Simulated with transfers and reductions that take time, as they do when measured; gathers: as under ZeRO, too."""
    cost = {"F": 1.0, "B": 2.0, "SA": 0.25, "SG": 0.25, "RED": 0.5, "L": 0.1, "AG": 0.4}
    reduced = add_gradient_reduction(lower(program), [2] * program.num_chunks)
    return simulate(add_parameter_gather(reduced) if gathers else reduced, lambda i: cost[i.op.value])


# ------------------------------------------------------------------------------------------------------- text grid


def test_gpipe_as_text_is_its_papers_figure() -> None:
    assert text_grid(gpipe(4, 4)).splitlines() == [
        "gpipe: 4 stages, 4 micro-batches, makespan 21, bubble 42.9%",
        "stage 0 | 0 1 2 3 . . . . . . . . . [3] [2] [1] [0]",
        "stage 1 | . 0 1 2 3 . . . . . . [3] [2] [1] [0] . .",
        "stage 2 | . . 0 1 2 3 . . . [3] [2] [1] [0] . . . .",
        "stage 3 | . . . 0 1 2 3 [3] [2] [1] [0] . . . . . .",
    ]


def test_1f1b_as_text() -> None:
    assert text_grid(one_f_one_b(4, 4)).splitlines()[1:] == [
        "stage 0 | 0 1 2 3 . . . . . . [0] . [1] . [2] . [3]",
        "stage 1 | . 0 1 2 . . . . [0] 3 [1] . [2] . [3] . .",
        "stage 2 | . . 0 1 . . [0] 2 [1] 3 [2] . [3] . . . .",
        "stage 3 | . . . 0 [0] 1 [1] 2 [2] 3 [3] . . . . . .",
    ]


def test_chunks_are_letters_and_halves_of_a_backward_have_brackets_of_their_own() -> None:
    assert text_grid(interleaved(2, 2, 2)).splitlines()[1:] == [
        "stage 0 | 0a 1a 0b 1b  .  .  [0b]  .  [1b]  [0a]  [1a]",
        "stage 1 |  . 0a 1a 0b  [0b] 1b  [1b]  [0a]  [1a]  .  .",
    ]
    split = from_lists([["F0@0", "F1@0", "I0@0", "W0@0", "B1@0"], ["F0@1", "I0@1", "W0@1", "F1@1", "B1@1"]], (0, 1))
    assert text_grid(split).splitlines()[1:] == [
        "stage 0 |   0   1   . (0) <0>   .   .     [1]",
        "stage 1 |   .   0 (0) <0>   1     [1]   .   .",
    ]


def test_uneven_costs_are_rounded_to_slots_of_the_shortest() -> None:
    grid = text_grid(one_f_one_b(2, 2), cost=lambda i: {"F": 1.0, "B": 2.1}.get(i.op.value, 0.0))
    assert grid.splitlines()[1:] == ["stage 0 | 0 1 . . [0] . [1]", "stage 1 | . 0 [0] 1 [1] . ."]


@pytest.mark.parametrize("program", [one_f_one_b(4, 16), interleaved(3, 12, 4), inference(12, 40)])
def test_long_rows_go_on_in_further_blocks_without_cutting_a_label(program: Program) -> None:
    title, *blocks = re.split(r"\n\n|(?<=%)\n", text_grid(program, max_width=79))
    assert program.name in title
    assert len(blocks) > 1
    rows = [""] * program.num_ranks
    for block in blocks:
        lines = block.splitlines()
        assert max(map(len, lines)) <= 79
        rows = [row + " " + line.split("|", 1)[1] for row, line in zip(rows, lines, strict=True)]
    for row, instructions in zip(rows, program.instructions, strict=True):
        numbers = [re.sub(r"[^0-9]", "", word) for word in row.split() if word != "."]
        assert numbers == [str(i.micro_batch) for i in instructions]


def test_a_block_has_one_slot_where_a_line_has_room_for_less() -> None:
    """1F1B of one stage: a backward takes two slots, and its label is at their end."""
    _, *blocks = re.split(r"\n\n|(?<=%)\n", text_grid(one_f_one_b(1, 2), max_width=1))
    assert [block.split("|")[1].strip() for block in blocks] == ["0", "", "[0]", "1", "", "[1]"]


# --------------------------------------------------------------------------------------------------- neighbourhood


def test_neighbourhood_of_an_instruction() -> None:
    program = lower(one_f_one_b(3, 6))
    position = program.instructions[1].index(Instruction.parse("B2@1"))
    assert neighbourhood(program, 1, position, radius=2).splitlines() == [
        "stage 0 | ... B0@0 F3@0  B1@0  F4@0 B2@0 ...",
        "stage 1 | ... B1@1 F3@1 >B2@1< F4@1 B3@1 ...",
        "stage 2 | ... F2@2 B2@2  F3@2  B3@2 F4@2 ...",
    ]


def test_neighbourhood_marks_a_transfer_too_and_shows_who_idles() -> None:
    program = lower(one_f_one_b(2, 2))
    assert neighbourhood(program, 1, 0).splitlines() == [
        "stage 0 | F0@0  F1@0   B0@0 B1@0",
        "stage 1 |      >RA0@1< F0@1 B0@1 F1@1 ...",
    ]
    program = lower(one_f_one_b(2, 1))
    assert neighbourhood(program, 0, len(program.instructions[0]) - 1).splitlines() == [
        "stage 0 |      F0@0 >B0@0<",
        "stage 1 | F0@1 B0@1  -",
    ]


@settings(unhurried, max_examples=50)
@given(programs(), st.integers(0, 3))
def test_neighbourhood_has_a_line_a_stage_and_one_mark(program: Program, radius: int) -> None:
    program = lower(program)
    for rank, instructions in enumerate(program.instructions):
        for position in range(0, len(instructions), 5):
            lines = neighbourhood(program, rank, position, radius).splitlines()
            assert [line.split(" |")[0] for line in lines] == [f"stage {r}" for r in range(program.num_ranks)]
            assert [r for r, line in enumerate(lines) if ">" in line] == [rank]
            assert f">{instructions[position]}<" in lines[rank]
            assert all(len(line.split("|")[1].replace("...", "").split()) <= 2 * radius + 1 for line in lines)


def test_neighbourhood_of_a_program_that_deadlocks_is_drawn_all_the_same() -> None:
    program = from_lists([["F0@0", "B0@0", "F1@0", "B1@0"], ["F1@1", "F0@1", "B0@1", "B1@1"]], (0, 1))
    assert ">F1@1<" in neighbourhood(program, 1, 0)


# ------------------------------------------------------------------------------------------------------------- SVG


def boxes(root: ElementTree.Element, kind: str = "box") -> list[ElementTree.Element]:
    return [e for e in root.iter(f"{SVG}rect") if kind in (e.get("class") or "").split()]


def words(root: ElementTree.Element) -> list[str]:
    return ["".join(e.itertext()) for e in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("program", [gpipe(2, 2), one_f_one_b(4, 8), interleaved(4, 6, 3), inference(3, 5)])
def test_svg_has_a_box_with_its_micro_batch_for_each_compute_instruction(program: Program) -> None:
    root = ElementTree.fromstring(svg({"simulated": simulate(program)}, width=4000))
    instructions = [(rank, i) for rank, instructions in enumerate(program.instructions) for i in instructions]
    titles = [box.findtext(f"{SVG}title") or "" for box in boxes(root)]
    assert Counter(t.split(":")[0] for t in titles) == Counter(
        f"{i} {i.op.name.lower()}, stage {rank}" for rank, i in instructions
    )
    labels = [e.text for e in root.iter(f"{SVG}text") if e.get("pointer-events") == "none"]
    assert labels == [str(i.micro_batch) for _, i in instructions]
    assert not boxes(root, "mark"), "what takes no time is not drawn"


def test_svg_boxes_are_where_and_as_long_as_the_spans() -> None:
    timeline = with_transfers(one_f_one_b(2, 3))
    root = ElementTree.fromstring(svg({"measured": timeline}))
    computes = [s for s in timeline.spans if s.instruction.op in COMPUTE_OPS]
    drawn = [(float(b.get("x", 0)), float(b.get("width", 0)), float(b.get("y", 0))) for b in boxes(root)]
    left, right = min(x for x, _, _ in drawn), max(x + w for x, w, _ in drawn)
    last = max(s.end for s in computes)
    for s, (x, width, y) in zip(computes, drawn, strict=True):
        assert x == pytest.approx(left + (s.start - 0.1) / (last - 0.1) * (right - left), abs=0.1)
        assert width == pytest.approx((s.end - s.start) / (last - 0.1) * (right - left), abs=0.1)
        assert (y == drawn[0][2]) == (s.rank == 0)


def test_svg_draws_transfers_collectives_and_loads_as_thin_marks_below_the_lane() -> None:
    timeline = with_transfers(one_f_one_b(2, 3), gathers=True)
    root = ElementTree.fromstring(svg({"measured": timeline}))
    kinds = Counter((mark.get("class") or "").split()[1] for mark in boxes(root, "mark"))
    assert kinds == {"send": 6, "receive": 6, "reduce": 4, "load": 6, "gather": 2}
    lanes = {(b.findtext(f"{SVG}title") or "").split("stage ")[1][0]: float(b.get("y", 0)) for b in boxes(root)}
    for mark in boxes(root, "mark"):
        below = float(mark.get("y", 0)) - lanes[(mark.findtext(f"{SVG}title") or "").split("stage ")[1][0]]
        assert 24 < below < 40
        assert float(mark.get("height", 0)) < 5


def test_svg_titles_give_makespan_and_bubble_in_the_panels_unit() -> None:
    timeline = simulate(one_f_one_b(4, 8), lambda i: {"F": 0.01, "B": 0.02}.get(i.op.value, 0.0))
    drawing = svg(
        {"measured": timeline, "simulated": simulate(one_f_one_b(4, 8)), "a <b> & c": timeline}, {"a <b> & c": "h"}
    )
    text = words(ElementTree.fromstring(drawing))
    assert "measured: 330 ms, bubble 27.3%" in text
    assert "simulated: 33 units, bubble 27.3%" in text
    assert "a <b> & c: 0.33 h, bubble 27.3%" in text
    assert {"forward", "backward", "ms", "units", "h"} <= set(text)
    assert {"0", "100", "200", "300"} <= set(text)


def test_svg_panels_of_one_unit_share_a_scale_and_others_fill_the_width() -> None:
    short, long = simulate(gpipe(2, 1)), simulate(gpipe(2, 5))

    def ends(units: dict[str, str]) -> list[float]:
        root = ElementTree.fromstring(svg({"short": short, "long": long}, units))
        rights = [float(box.get("x", 0)) + float(box.get("width", 0)) for box in boxes(root)]
        in_short = sum(s.instruction.op in COMPUTE_OPS for s in short.spans)
        return [max(rights[:in_short]), max(rights[in_short:])]

    apart = ends({"short": "a", "long": "b"})
    assert apart[0] == pytest.approx(apart[1], abs=0.1)
    together = ends({})
    assert together[1] == pytest.approx(apart[1], abs=0.1)
    left = 62
    assert (together[0] - left) / (together[1] - left) == pytest.approx(short.makespan / long.makespan, abs=0.001)


def test_svg_shades_chunks() -> None:
    root = ElementTree.fromstring(svg({"simulated": simulate(interleaved(2, 4, 3))}))
    fills = defaultdict(set)
    for box in boxes(root):
        text = box.findtext(f"{SVG}title") or ""
        fills[text[0], int(re.findall(r"@(\d+)", text)[0]) // 2].add(box.get("fill"))
    assert len(fills) == 6
    assert all(len(colours) == 1 for colours in fills.values())
    assert len({colour for colours in fills.values() for colour in colours}) == 6


@pytest.mark.parametrize("spans", [[], [Span(0, Instruction.parse("F0@0"), 5.0, 5.0)]])
def test_drawings_of_a_timeline_without_length(spans: list[Span]) -> None:
    timeline = Timeline.of(spans, num_ranks=1)
    ElementTree.fromstring(svg({"measured": timeline}))
    json.dumps(chrome_trace({"measured": timeline}))


# ----------------------------------------------------------------------------------------------------------- trace


def test_trace_holds_every_span_once_in_the_fields_of_the_format() -> None:
    timeline = with_transfers(interleaved(2, 4, 2))
    trace = json.loads(json.dumps(chrome_trace({"measured": timeline, "simulated": timeline})))
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"X", "M"}
    (measured, simulated) = [
        e["pid"]
        for e in trace["traceEvents"]
        if e["name"] == "process_name" and e["args"]["name"] in ("measured", "simulated")
    ]
    assert measured != simulated
    for pid in (measured, simulated):
        got = Counter((e["name"], round(e["ts"], 3), round(e["dur"], 3)) for e in complete if e["pid"] == pid)
        assert got == Counter(
            (str(s.instruction), round(s.start * 1e6, 3), round((s.end - s.start) * 1e6, 3)) for s in timeline.spans
        )
    for e in complete:
        i = Instruction.parse(e["name"])
        assert (e["args"]["chunk"], e["args"]["micro_batch"]) == (i.chunk, i.micro_batch)
        assert e["args"].get("bucket") == i.bucket


def test_trace_has_a_thread_for_each_stage_and_others_for_its_communication() -> None:
    timeline = with_transfers(interleaved(2, 4, 2))
    events = chrome_trace({"measured": timeline}, scale_to_us=1.0)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert Counter(names.values())["stage 0"] == Counter(names.values())["stage 1"] == 1
    threads = defaultdict(list)
    for e in (e for e in events if e["ph"] == "X"):
        threads[e["pid"], e["tid"]].append(e)
    assert set(threads) == set(names)
    rank_of = {(str(s.instruction), s.start): s.rank for s in timeline.spans if s.instruction.op in COMPUTE_OPS}
    for thread, inside in threads.items():
        computes = {Instruction.parse(e["name"]).op.value in "FBL" for e in inside}
        assert computes == {"communication" not in names[thread]}
        for e in inside:
            if (e["name"], e["ts"]) in rank_of:
                assert names[thread] == f"stage {rank_of[e['name'], e['ts']]}"
        inside.sort(key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in pairwise(inside)), "viewers nest what overlaps"


@pytest.mark.parametrize(
    ("low", "high", "number", "wanted"),
    [
        (0.0, 37.0, 5, [0.0, 10.0, 20.0, 30.0]),
        (0.0, 8.0, 8, [float(k) for k in range(9)]),
        (-0.3, 0.3, 3, [-0.2, 0.0, 0.2]),
        (2.0, 2.0, 8, [2.0]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, number: int, wanted: list[float]) -> None:
    assert list(ticks(low, high, number)) == pytest.approx(wanted)
