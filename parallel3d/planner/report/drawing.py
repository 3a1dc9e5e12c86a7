"""Numbers, names, colours, templates and geometry that the report's drawings share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parallel3d.planner.formats import duration, memory

# In a chart's order. Two neighbours differ in lightness too, for readers who see few colours and for grey print.
PART_COLOURS = {
    "weights": "#2f69b4",
    "gradients": "#6fb1c9",
    "masters": "#6b4ea3",
    "optimizer": "#b39ad9",
    "activations": "#b8671a",
    "workspace": "#e0b44c",
    "transient": "#8b5e4b",
    "messages": "#d98880",
    "update": "#2e8752",
    "forward": "#2f69b4",
    "backward": "#2e8752",
    "exposed communication": "#c8413b",
    "host": "#d4a017",
    "bubble": "#9aa5b1",
}
_FURTHER_COLOURS = ("#93c58f", "#5c6b7a", "#c77fb5", "#4d9a94", "#a8a03c", "#7f8fd0")


def colours_of(parts: Iterable[str]) -> dict[str, str]:
    """Return part -> colour in a chart's order: the parts known above, then others by name, whose colours repeat after six."""
    given = set(parts)
    further = sorted(given - PART_COLOURS.keys())
    known = {part: colour for part, colour in PART_COLOURS.items() if part in given}
    return known | {part: _FURTHER_COLOURS[k % len(_FURTHER_COLOURS)] for k, part in enumerate(further)}


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
        "memory": memory,
        "duration": duration,
        "percent": "{:.1%}".format,
        "count": "{:,.0f}".format,
        "px": lambda value: f"{value:.2f}".rstrip("0").rstrip("."),
    }
    return environment


def prepare() -> None:
    """Compile all templates in advance, while this process would otherwise wait."""
    for name in _environment().list_templates(["html", "jinja"]):
        _environment().get_template(name)


def render(template: str, **values: object) -> Markup:
    """Render a file of the folder `page`; all values but Markup are escaped."""
    return Markup(_environment().get_template(template).render(values))  # noqa: S704 (escaped by the template)


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
