"""Draws the schedules as SVG, by simulation: python tools/draw_schedules.py docs/schedules.svg --stages 4."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.schedule.builders import gpipe, interleaved, one_f_one_b
from parallel3d.schedule.draw import svg
from parallel3d.schedule.timing import Cost, simulate, unit_cost
from parallel3d.schedule.zero_bubble import looped_zero_bubble, zb_h1, zbv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="chunks a stage of the schedules in loops")
    args = parser.parse_args()
    p, m, v = args.stages, args.micro_batches, args.chunks

    def split_in(chunks: int) -> Cost:
        """Return the cost of a chunk: a stage's work is the same for any number of chunks."""
        return lambda i: unit_cost(i) / chunks

    timelines = {
        "GPipe": simulate(gpipe(p, m)),
        "1F1B": simulate(one_f_one_b(p, m)),
        f"interleaved 1F1B, {v} chunks a stage": simulate(interleaved(p, m, v), split_in(v)),
        "ZB-H1": simulate(zb_h1(p, m)),
        "ZBV, 2 chunks a stage": simulate(zbv(p, m), split_in(2)),
        f"zero-bubble in loops, {v} chunks a stage": simulate(looped_zero_bubble(p, m, v), split_in(v)),
    }
    args.picture.write_text(svg(timelines, units=dict.fromkeys(timelines, "units")), encoding="utf-8")


if __name__ == "__main__":
    main()
