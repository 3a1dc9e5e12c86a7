"""Draws three schedules as SVG at the width of README, by simulation: python tools/draw_schedules.py docs/schedules.svg."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.schedule.builders import interleaved, one_f_one_b, zbv
from parallel3d.schedule.draw import svg
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.timing import simulate, unit_cost


def half_cost(instruction: Instruction) -> float:
    """Return the cost on one of a stage's two chunks: a stage's work is the same for any number of chunks."""
    return unit_cost(instruction) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    args = parser.parse_args()
    p, m = args.stages, args.micro_batches
    timelines = {
        "1F1B": simulate(one_f_one_b(p, m)),
        "interleaved 1F1B, 2 chunks a stage": simulate(interleaved(p, m, 2), half_cost),
        "zero-bubble (ZBV), 2 chunks a stage": simulate(zbv(p, m), half_cost),
    }
    args.picture.write_text(svg(timelines, units=dict.fromkeys(timelines, "units"), width=830), encoding="utf-8")


if __name__ == "__main__":
    main()
