"""The report as files: one self-contained HTML page (it needs no other file, network or server), drawings and JSON."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from markupsafe import Markup

from parallel3d.planner.cluster.cluster import natural
from parallel3d.planner.formats import duration, memory
from parallel3d.planner.report.charts import breakdown_chart, memory_chart, topology_chart, trade_off_chart
from parallel3d.planner.report.drawing import render
from parallel3d.planner.report.scripts import launch_scripts
from parallel3d.planner.report.timeline import columns, timeline_chart, what_is_drawn
from parallel3d.planner.search.result import FULL, PlanResult, Prediction, fullness_of
from parallel3d.schedule.builders import placement_of
from parallel3d.schedule.timing import Timeline

# Rows of the page's tables; JSON has all. A browser is still quick with them, and the page small.
_MOST_RANKED, _MOST_REJECTED, _MOST_PLACES, _MOST_LINKS = 60, 1_000, 16_384, 200


def write_report(result: PlanResult, directory: str | Path) -> tuple[Path, ...]:
    """Write plan.html, plan.json and the drawings that there are; return their paths.

    The directory is made if it is missing; files of these names are replaced. PlanResult.model_validate_json reads plan.json.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    contents = {"plan.html": html_page(result), "plan.json": result.model_dump_json() + "\n", **drawings(result)}
    for name, text in contents.items():
        (directory / name).write_text(text, encoding="utf-8")
    return tuple(directory / name for name in contents)


def drawings(result: PlanResult) -> dict[str, str]:
    """Return the SVG files by name: of the winner timeline.svg and memory.svg, and trade_off.svg of all layouts.

    Where nothing fits, or no layout has a time, those that would be empty are left out.
    """
    found: dict[str, str] = {}
    for winner in result.best[:1]:
        if result.timeline:
            found["timeline.svg"] = timeline_chart(Timeline.of(result.timeline, winner.stages), winner)
        found["memory.svg"] = memory_chart(winner.memory, _stage_names(result, winner), winner.layout, standalone=True)
    trade_off = trade_off_chart(result, standalone=True)
    return found if trade_off is None else {**found, "trade_off.svg": trade_off}


def html_page(result: PlanResult) -> str:
    """Return the page of a plan; the same result gives the same bytes. Names are escaped.

    Under 3 MB for 64 stages x 512 micro-batches: of the largest plans it shows the first rows of tables and the two ends of
    the timeline, and says so.
    """
    ranked = result.best[:_MOST_RANKED]
    details = [_details(result, prediction) for prediction in ranked]
    timeline = Timeline.of(result.timeline, ranked[0].stages) if ranked and result.timeline else None
    drawn = {} if timeline is None else {"time": columns(timeline)}
    places = sorted(result.map[:_MOST_PLACES], key=lambda place: natural(place.host))
    links = sorted(result.links, key=lambda link: -link.seconds)
    return render(
        "page.html",
        plan=result,
        ranked=ranked,
        rejected=result.rejected[:_MOST_REJECTED],
        hosts={host: {place.gpu: place for place in own} for host, own in groupby(places, key=attrgetter("host"))},
        gpus=sorted({place.gpu for place in result.map}),
        cut_places=_MOST_PLACES if len(result.map) > _MOST_PLACES else None,
        details=details[0] if details else None,
        drawn="" if timeline is None else what_is_drawn(timeline, ranked[0]),
        full=[p for p in ranked if fullness_of(p.memory) * (1.0 - result.reserve) > FULL],
        trade_off=trade_off_chart(result),
        topology=topology_chart(links, ranked[0].seconds) if links and ranked else None,
        links=links[:_MOST_LINKS],
        config=_indented(result.config),
        scripts=launch_scripts(result, Path()),
        data=packed({"details": details, "timelines": drawn}),
    )


def packed(data: Mapping[str, object]) -> str:
    """Return a page's data in letters that HTML leaves alone: 200,000 instructions of a timeline in under 2 MB."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def _details(result: PlanResult, prediction: Prediction) -> Markup:
    """Return the part of the page about one ranked layout: its breakdown, memory and partition."""
    names = _stage_names(result, prediction)
    return render(
        "layout.html",
        prediction=prediction,
        names=names,
        breakdown=breakdown_chart(prediction.breakdown, prediction.layout),
        memory=memory_chart(prediction.memory, names, prediction.layout),
        placement=placement_of(prediction.placement, prediction.stages, prediction.chunks),
        layers=result.halves if prediction.units == "half" else result.layers,
        differences=[] if prediction is result.best[0] else list(differences(prediction, result.best[0])),
    )


def differences(this: Prediction, winner: Prediction) -> Iterator[tuple[str, str, str, str]]:
    """Yield (what, of this layout, of the winner, difference) for the step, its parts and the peak memory."""
    rows: list[tuple[str, Callable[[float], str], float, float]] = [("step", duration, this.seconds, winner.seconds)]
    rows += [(name, duration, this.breakdown[name], winner.breakdown[name]) for name in this.breakdown]
    for name, shown, mine, its in (*rows, ("peak memory", memory, this.peak, winner.peak)):
        yield name, shown(mine), shown(its), ("-" if mine < its else "+") + shown(abs(mine - its))


def _stage_names(result: PlanResult, prediction: Prediction) -> list[str]:
    """Name the stages, with their ranks where the layout has the winner's shape, whose places the page lists below."""
    names = [f"stage {stage}" for stage in range(prediction.stages)]
    if prediction.shape != result.best[0].shape:
        return names
    size = prediction.replicas * prediction.tensor_ranks
    ranks = [f"ranks {k * size}–{(k + 1) * size - 1}" if size > 1 else f"rank {k}" for k in range(len(names))]
    return [f"{name} · {own}" for name, own in zip(names, ranks, strict=True)]


def _indented(config: dict[str, object]) -> str:
    """Return JSON with indents, but a list of numbers, such as a partition's bounds, on one line."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    numbers = re.compile(r"\[\s*\n\s*(\d+(?:,\s*\n\s*\d+)*)\s*\n\s*\]")  # a string holds no line break
    return numbers.sub(lambda found: f"[{', '.join(re.findall(r'[0-9]+', found[1]))}]", text)
