"""The report as one HTML page that needs nothing beside itself: no file, no network, no server."""

from __future__ import annotations

import base64
import json
import re
import zlib
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parallel3d.planner.report import words
from parallel3d.planner.report.memory import breakdown_chart, memory_chart
from parallel3d.planner.report.timeline import as_timeline, columns
from parallel3d.planner.report.topology import grouped, topology_chart
from parallel3d.planner.report.trade_off import trade_off_chart
from parallel3d.planner.search.result import PlanResult, Prediction, RankPlace
from parallel3d.schedule.builders import placement_of

# Rows of the page's tables; JSON has all. A browser is still quick with them, and the page small.
_MOST_RANKED, _MOST_REJECTED, _MOST_PLACES, _MOST_LINKS = 60, 1_000, 16_384, 200


def html_page(result: PlanResult) -> str:
    """The page of a plan; the same result gives the same bytes. Names are escaped. Raises ValueError for an unknown op.

    Under 3 MB for 64 stages x 512 micro-batches: of the largest plans it shows the first rows of tables and the two ends of
    the timeline, and says so.
    """
    environment = _environment()
    ranked = result.best[:_MOST_RANKED]
    details = [_details(environment, result, prediction) for prediction in ranked]
    drawn = columns(as_timeline(result.timeline, ranked[0].stages)) if ranked and result.timeline else None
    links = sorted(grouped(result.links), key=lambda link: -link.seconds)
    trade_off = trade_off_chart(result)
    return environment.get_template("page.html").render(
        plan=result,
        ranked=ranked,
        rejected=result.rejected[:_MOST_REJECTED],
        places=_hosts(result.map[:_MOST_PLACES]),
        gpus=sorted({place.gpu for place in result.map}),
        cut_places=_MOST_PLACES if len(result.map) > _MOST_PLACES else None,
        details=Markup(details[0]) if details else None,
        trade_off=None if trade_off is None else Markup(trade_off),
        topology=Markup(topology_chart(links, ranked[0].seconds)) if links and ranked else None,
        links=links[:_MOST_LINKS],
        config=_shown(result.config),
        data=_packed({"details": details, "timeline": drawn}),
        style=Markup(_source(environment, "page.css")),
        script=Markup(_source(environment, "page.js")),
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("parallel3d.planner.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "memory": words.memory,
        "duration": words.duration,
        "percent": words.percent,
        "count": words.count,
    }
    return environment


def _source(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _details(environment: Environment, result: PlanResult, prediction: Prediction) -> str:
    """What the page shows of one ranked layout: its breakdown, memory and partition."""
    # The map is the winner's, but ranks of a stage are numbered alike in every layout of its shape.
    winner = result.best[0]
    shared = (prediction.stages, prediction.replicas, prediction.slices) == (
        winner.stages,
        winner.replicas,
        winner.slices,
    )
    names = words.by_stage(((place.pipe, place.rank) for place in result.map if shared), prediction.stages)
    label = f"Memory of each stage of {prediction.layout} against its device"
    return environment.get_template("layout.html").render(
        prediction=prediction,
        names=names,
        breakdown=Markup(breakdown_chart(prediction)),
        memory=Markup(memory_chart(prediction.memory, names, label)),
        partition=_partition(prediction, result.halves if prediction.units == "half" else result.layers),
    )


def _partition(prediction: Prediction, layers: tuple[str, ...]) -> list[tuple[int, int, int, str]]:
    """(chunk, stage, number of layers, what they are) of each chunk."""
    placement = placement_of(prediction.placement, prediction.stages, prediction.chunks)
    rows = []
    for chunk, (start, stop) in enumerate(pairwise(prediction.bounds)):
        names = layers[start:stop]
        shown = " … ".join(dict.fromkeys((names[0], names[-1]))) if names else "none"
        rows.append((chunk, placement[chunk], stop - start, shown))
    return rows


def _hosts(places: tuple[RankPlace, ...]) -> dict[str, dict[int, RankPlace]]:
    """host -> GPU -> its rank; hosts in their natural order."""
    hosts: dict[str, dict[int, RankPlace]] = {}
    for place in sorted(places, key=lambda place: words.natural(place.host)):
        hosts.setdefault(place.host, {})[place.gpu] = place
    return hosts


def _shown(config: dict[str, object]) -> str:
    """JSON with indents, but a list of numbers, such as a partition's bounds, on one line."""
    text = json.dumps(config, indent=2, ensure_ascii=False)
    numbers = re.compile(r"\[\s*\n\s*(\d+(?:,\s*\n\s*\d+)*)\s*\n\s*\]")  # a string holds no line break
    return numbers.sub(lambda found: f"[{', '.join(re.findall(r'[0-9]+', found[1]))}]", text)


def _packed(data: object) -> str:
    """JSON, compressed, in letters that HTML leaves alone: a timeline of 200,000 instructions in under 2 MB."""
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    return base64.b64encode(zlib.compress(plain)).decode()
