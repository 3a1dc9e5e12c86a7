"""Draws the schedules as SVG, by simulation: python tools/draw_schedules.py docs/schedules.svg --stages 4."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.schedule.builders import gpipe, interleaved, one_f_one_b
from parallel3d.schedule.draw import svg
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.simulate import simulate, unit_cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro_batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2, help="chunks a stage of the interleaved schedule")
    args = parser.parse_args()
    p, m, v = args.stages, args.micro_batches, args.chunks

    def chunk_cost(i: Instruction) -> float:
        return unit_cost(i) / v

    timelines = {
        "GPipe": simulate(gpipe(p, m)),
        "1F1B": simulate(one_f_one_b(p, m)),
        f"interleaved 1F1B, {v} chunks a stage": simulate(interleaved(p, m, v), chunk_cost),
    }
    args.picture.write_text(svg(timelines, units=dict.fromkeys(timelines, "units")), encoding="utf-8")


if __name__ == "__main__":
    main()
