"""The report's files, without a browser: what they hold against the plan that they were made from."""

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import GIB, Shape, plan

from parallel3d.planner.report import drawing as words
from parallel3d.planner.report import drawings, html_page, write_report
from parallel3d.planner.report.scripts import launch_scripts
from parallel3d.planner.report.timeline import columns
from parallel3d.planner.search.result import LinkLoad, PlanResult
from parallel3d.schedule.instructions import COMPUTE_OPS
from parallel3d.schedule.timing import Timeline

SVG = "{http://www.w3.org/2000/svg}"
LARGE = Shape(64, 16, 8, 512, "zb-h1", 1, "loop")
HOSTILE = "</script><script>alert('&\"')</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return plan()


@pytest.fixture(scope="module")
def large() -> PlanResult:
    return plan(LARGE)


class Tags(HTMLParser):
    """Start tags with their attributes, and the text of scripts by id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags and self.tags[-1] == ("script", {"type": "text/plain", "id": "data"}):
            self.data += data


def page_data(html: str) -> dict:
    return json.loads(zlib.decompress(base64.b64decode(Tags(html).data)))


def spans_of(timeline: dict) -> list[tuple[str, int, float, float]]:
    """(instruction, stage, start, end) of what the page draws, in seconds."""
    tick = timeline["seconds"] / timeline["ticks"]
    out = []
    for stage, lane in enumerate(timeline["lanes"]):
        at = 0
        for start, length, op, chunk, micro, bucket in zip(*lane.values(), strict=True):
            at += start
            name = f"{timeline['ops'][op]['short']}{micro}@{chunk}" + (f"#{bucket}" if bucket >= 0 else "")
            out.append((name, stage, at * tick, (at + length) * tick))
    return out


@pytest.mark.parametrize("shape", [Shape(), Shape(1, 1, 1, 4, "1f1b", 1, "loop"), LARGE], ids=lambda s: s.layout)
def test_page_holds_every_instruction_and_stays_small(shape, large):
    given_plan = large if shape == LARGE else plan(shape)
    html = html_page(given_plan)
    assert len(html.encode()) < 3_000_000
    timeline = page_data(html)["timelines"]["time"]
    assert timeline["left_out"] is None
    drawn = {(name, stage): (start, end) for name, stage, start, end in spans_of(timeline)}
    assert len(drawn) == len(given_plan.timeline)
    step = max(s.end for s in given_plan.timeline)
    first = min(s.start for s in given_plan.timeline)
    for s in given_plan.timeline:
        start, end = drawn[str(s.instruction), s.rank]
        assert max(abs(start - s.start + first), abs(end - s.end + first)) <= 2e-7 * step


@pytest.mark.parametrize("limit", [1, 50, 400])
def test_of_a_longer_step_the_page_draws_both_ends_and_says_what_it_leaves_out(result, limit):
    timeline = columns(Timeline.of(result.timeline, 4), limit)
    kept = {(name, stage) for name, stage, _, _ in spans_of(timeline)}
    tick = timeline["seconds"] / timeline["ticks"]
    begin, end, number = timeline["left_out"]
    assert len(kept) == limit
    assert number == len(result.timeline) - limit
    first = min(s.start for s in result.timeline)
    for s in result.timeline:
        inside = s.end - first >= (begin - 1) * tick and s.start - first <= (end + 1) * tick
        assert inside or (str(s.instruction), s.rank) in kept


def test_same_plan_same_bytes_and_json_holds_all(result):
    again = PlanResult.model_validate_json(result.model_dump_json())
    assert again == result
    assert html_page(again) == html_page(result)


def test_page_needs_nothing_beside_itself(result):
    for tag, attributes in Tags(html_page(result)).tags:
        if tag in ("link", "img", "iframe", "script"):
            assert "src" not in attributes
            assert "href" not in attributes
        if tag == "a":
            assert attributes["href"].startswith("#")
    assert "@import" not in html_page(result)
    assert "url(" not in html_page(result)


def test_names_are_escaped(result):
    hostile = result.best[0].model_copy(update={"layout": HOSTILE, "schedule": HOSTILE})
    memory = hostile.memory[0].model_copy(update={"parts": {HOSTILE: GIB}})
    hostile = hostile.model_copy(update={"memory": (memory, *hostile.memory[1:])})
    bad = result.model_copy(
        update={
            "model": HOSTILE,
            "cluster": HOSTILE,
            "best": (hostile,),
            "rejected": (result.rejected[0].model_copy(update={"why": HOSTILE, "layout": HOSTILE}),),
            "trade_off": ((GIB, 1.0, HOSTILE),),
            "links": (LinkLoad(a=HOSTILE, b="b", kind=HOSTILE, nbytes=1, seconds=1, by_axis={HOSTILE: 1}),),
            "map": (result.map[0].model_copy(update={"host": HOSTILE}),),
            "config": {HOSTILE: HOSTILE},
            "layers": (HOSTILE,) * len(result.layers),
            "remedy": HOSTILE,
        }
    )
    html = html_page(bad)
    tags = Tags(html).tags
    assert sum(tag == "script" for tag, _ in tags) == 2
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in tags)
    for fragment in page_data(html)["details"]:
        assert not any(tag in ("script", "img") for tag, _ in Tags(fragment).tags)
    for drawing in drawings(bad).values():
        assert {node.tag for node in ElementTree.fromstring(drawing).iter()}.isdisjoint({f"{SVG}script", f"{SVG}img"})


def test_memory_bars_are_in_proportion_to_bytes(result):
    """Bars start where the capacity's line starts: the width of a part is the line's width times its share."""
    drawing = ElementTree.fromstring(drawings(result)["memory.svg"])
    bars: dict[int, list[tuple[str, float, float]]] = {}
    capacity: dict[int, float] = {}
    for node in drawing.iter():
        title = node.find(f"{SVG}title")
        if title is None:
            continue
        head, _, what = title.text.partition("\n")
        stage = int(re.match(r"stage (\d+) · ranks", head)[1])
        if node.tag == f"{SVG}rect":
            bars.setdefault(stage, []).append((what.partition(":")[0], float(node.get("x")), float(node.get("width"))))
        else:
            capacity[stage] = float(re.match(r"M([\d.]+) ", node.get("d"))[1])
    for stage in result.best[0].memory:
        zero = min(x for _, x, _ in bars[stage.stage])
        pixels = capacity[stage.stage] - zero
        drawn = {name: width for name, _, width in bars[stage.stage]}
        for name, nbytes in stage.parts.items():
            assert drawn[name] == pytest.approx(pixels * nbytes / stage.capacity, abs=0.1)
        assert sum(drawn.values()) == pytest.approx(pixels * stage.reserved / stage.capacity, abs=0.1)


def test_trade_off_places_points_by_memory_and_time(result):
    drawing = ElementTree.fromstring(drawings(result)["trade_off.svg"])
    points = {n.get("data-layout"): (float(n.get("cx")), float(n.get("cy"))) for n in drawing.iter(f"{SVG}circle")}
    assert {layout for _, _, layout in result.trade_off} | {p.layout for p in result.best} <= points.keys()
    (peak0, seconds0, first), *_, (peak1, seconds1, last) = result.trade_off
    (x0, y0), (x1, y1) = points[first], points[last]
    for p in result.best:
        x = x0 + (p.peak - peak0) / (peak1 - peak0) * (x1 - x0)
        y = y0 + (p.seconds - seconds0) / (seconds1 - seconds0) * (y1 - y0)
        assert points[p.layout] == pytest.approx((x, y), abs=0.5)
    assert x0 < x1
    assert y0 < y1, "the faster one is lower"


def test_timeline_svg_draws_all_compute_of_any_size(result, large):
    small = ElementTree.fromstring(drawings(result)["timeline.svg"])
    boxes = [n for n in small.iter(f"{SVG}rect") if n.get("class", "").startswith("box")]
    assert len(boxes) == sum(s.instruction.op in COMPUTE_OPS for s in result.timeline)
    text = drawings(large)["timeline.svg"]
    assert len(text) < 3_000_000
    bars = sum(n.get("d").count("h") for n in ElementTree.fromstring(text).iter(f"{SVG}path") if n.get("transform"))
    assert bars == sum(s.instruction.op in COMPUTE_OPS for s in large.timeline)


def test_where_nothing_fits_the_page_says_what_would(result, tmp_path):
    remedy = "stage 0 needs 190 GiB of 80: recompute every layer, or use 16 GPUs"
    empty = result.model_copy(
        update={"best": (), "timeline": (), "map": (), "links": (), "config": {}, "trade_off": (), "remedy": remedy}
    )
    assert remedy in html_page(empty)
    assert [path.name for path in write_report(empty, tmp_path / "new")] == ["plan.html", "plan.json"]
    assert sorted(path.name for path in write_report(result, tmp_path)) == [
        "memory.svg", "plan.html", "plan.json", "timeline.svg", "trade_off.svg"
    ]  # fmt: skip


def test_slurm_deals_ranks_over_hosts_as_the_plan_places_them(result):
    """Each host is named once, also if its ranks don't follow each other; without a distribution there is no script."""
    hosts = list(dict.fromkeys(place.host for place in result.map))
    size = len(result.map) // len(hosts)

    def script(block: int, unused: int = 0) -> str | None:
        places = [
            place.model_copy(update={"host": hosts[k // block % len(hosts)]}) for k, place in enumerate(result.map)
        ]
        return launch_scripts(result.model_copy(update={"map": places[unused:]}), Path()).get("run.sbatch")

    whole, halves = script(size), script(size // 2)
    assert f"--nodes={len(hosts)}\n#SBATCH --ntasks-per-node={size}\n#SBATCH --gpus" in whole
    assert (
        f"--nodes={len(hosts)}\n#SBATCH --ntasks-per-node={size}\n#SBATCH --distribution=plane={size // 2}\n" in halves
    )
    assert script(size // 2, unused=1) is None


def test_an_unknown_instruction_is_refused(result):
    text = result.model_dump_json()
    assert PlanResult.model_validate_json(text) == result
    with pytest.raises(ValueError, match="'X'"):
        PlanResult.model_validate_json(text.replace('["F",', '["X",', 1))


@settings(deadline=None)
@given(st.integers(0, 1 << 50), st.floats(0, 1e5, allow_nan=False))
def test_numbers_are_within_half_a_percent_of_what_they_show(nbytes, seconds):
    number, unit = words.memory(nbytes).split()
    assert float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit) == pytest.approx(nbytes, rel=0.005)
    number, unit = words.duration(seconds).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit] == pytest.approx(seconds, rel=0.005, abs=5e-9)
