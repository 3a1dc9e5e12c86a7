"""SVG in strings. Colours stand as attributes, which the page's style sheet overrides by class where it is dark."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import ceil

from parallel3d.schedule.draw import tick_step

WIDTH = 1100
INK, FAINT, LINE, LANE = "#24292f", "#57606a", "#d8dee4", "#eef1f4"
_FONT = "Helvetica, Arial, DejaVu Sans, sans-serif"


def element(tag: str, inside: str = "", **attributes: object) -> str:
    """<tag ...>inside</tag>. `inside` is markup; attributes are escaped, `font_size` becomes font-size, `class_` class."""
    pairs = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    head = f"<{tag}" + "".join(f' {name}="{_written(value)}"' for name, value in pairs)
    return f"{head}>{inside}</{tag}>" if inside else f"{head}/>"


def _written(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else escape(str(value))


def title(text: str) -> str:
    """What shows where the mouse rests on the element that holds it."""
    return element("title", escape(text))


def text(x: float, y: float, words: str, colour: str = INK, **attributes: object) -> str:
    """One line of words, which are escaped."""
    named = {INK: "ink", FAINT: "faint"}.get(colour)
    return element("text", escape(words), x=float(x), y=float(y), fill=colour, class_=named, **attributes)


def drawing(body: list[str], height: float, label: str, width: int = WIDTH) -> str:
    """A whole SVG of `body`; `label` is what a screen reader says of it."""
    return element(
        "svg", "\n" + "\n".join(body) + "\n", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {ceil(height)}",
        width=width, height=ceil(height), role="img", aria_label=label, font_family=_FONT, font_size=12,
    )  # fmt: skip


def standalone(svg: str) -> str:
    """The same on a white ground, as a file of its own."""
    head, _, rest = svg.partition("\n")
    return f'{head}\n<rect width="100%" height="100%" fill="#ffffff"/>\n{rest}\n'


def ticks(low: float, high: float, number: int = 8) -> Iterator[float]:
    """Round values of [low, high], about `number` of them."""
    step = tick_step((high - low) or abs(high) or 1.0, number)
    for k in range(ceil(low / step * 0.9999), int(high / step * 1.0001) + 1):
        yield k * step


def legend(entries: dict[str, str], x: float, y: float, right: float = WIDTH) -> tuple[list[str], float]:
    """name -> colour in lines from the baseline (x, y) down, none past `right`; also the height that they take."""
    out, at, line = [], x, y
    for name, colour in entries.items():
        wide = 34 + 6.6 * len(name)
        if at > x and at + wide > right:
            at, line = x, line + 18
        out.append(element("rect", x=at, y=line - 10, width=12, height=12, rx=2, fill=colour))
        out.append(text(at + 17, line, name))
        at += wide
    return out, line - y + 18
