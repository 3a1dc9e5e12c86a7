"""Templates of the report rendered, and the geometry that its charts share."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parallel3d.planner.report import words

WIDTH = 1100
"""Width of every chart, in pixels."""


@cache
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
        "percent": "{:.1%}".format,
        "count": "{:,.0f}".format,
        "px": lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
    }
    return environment


def render(template: str, **values: object) -> Markup:
    """Render a file of the folder `page`; all values but Markup are escaped."""
    return Markup(_environment().get_template(template).render(values))


def place_legend(
    colours: dict[str, str], x: float, y: float, right: float = WIDTH
) -> tuple[list[tuple[float, float, str, str]], float]:
    """Lay out name -> colour in lines from the baseline (x, y) down, none past `right`.

    Returns (x, y, name, colour) of each, and the height that they take.
    """
    places, at, line = [], x, y
    for name, colour in colours.items():
        wide = 34 + 6.6 * len(name)
        if at > x and at + wide > right:
            at, line = x, line + 18
        places.append((at, line, name, colour))
        at += wide
    return places, line - y + 18
