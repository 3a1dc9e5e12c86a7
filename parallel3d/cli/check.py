"""`p3d check`: check that layouts compute what one process computes."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.config.layout import parse_layout
from parallel3d.errors import ConfigError
from parallel3d.parity import Report, Settings, check


def run(options: argparse.Namespace) -> int:
    """Run `p3d check`; return 1 if a layout differs. Raises ConfigError for options or layouts that can't be checked."""
    if options.tolerance is not None and not options.tolerance > 0:
        raise ConfigError(f"--tolerance is {options.tolerance}; give a number above 0")
    layouts = [parse_layout(text) for text in options.layouts]
    settings = Settings(options.steps, options.seed, options.dtype, options.tolerance)
    passed = True
    for report in check(options.target, layouts, settings):
        show(report)
        passed = passed and report.passed
    return 0 if passed else 1


def show(report: Report) -> None:
    """Print a report as a table, and below it the layers that differ.

    Columns: alone, the values of one process; norm, the gradient's before clipping; weights, the largest relative difference.
    """
    names = ("step", "loss", "alone", "", "norm", "alone", "", "weights", "")
    title = escape(f"{report.layout}: {_verdict(report.passed)}")
    table = Table(*(Column(name, no_wrap=True) for name in names), title=title, title_justify="left", box=None)
    for k, step in enumerate(report.steps, 1):
        loss, norm = ([f"{number:.7g}" for number in pair] for pair in (step.loss, step.norm))
        passed = [_verdict(report.agrees(difference)) for difference in step.differences]
        table.add_row(str(k), *loss, passed[0], *norm, passed[1], f"{step.differences[2]:.1e}", passed[2])
    Console().print(table)
    print("".join(f"{line}\n" for line in findings(report)), end="")


def _verdict(passed: bool) -> str:
    return "pass" if passed else "FAIL"


def findings(report: Report) -> list[str]:
    """Return lines that name the first layers that differ, in model order; none where all agree."""
    lines = []
    tensors = (("gradients of step 1", report.gradients), (f"weights after step {len(report.steps)}", report.weights))
    for name, found in tensors:
        names = report.differing(found)
        if not names:
            continue
        places = dict.fromkeys(int(n.split(".")[1]) for n in names)  # of "layers.2.down.weight", 2
        layers = [f"layers.{place} {report.classes[place]}" for place in places]
        first = f"first layer whose {name} differ: {layers[0]} ({names[0]} by {found[names[0]]:.1e})"
        last = f"; {len(layers)} layers differ, the last is {layers[-1]}" if len(layers) > 1 else ""
        lines.append(f"{first}{last}; tolerance {report.tolerance:g}")
    if report.differing(report.gradients) and report.agrees(report.steps[0].differences[0]):
        lines.append(
            "the loss of step 1 agrees: the difference arises in a backward, which runs from the last layer on"
        )
    return lines
