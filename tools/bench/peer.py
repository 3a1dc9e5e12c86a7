"""One process of a peer's script, with the number of warm-up and timed steps that its `report.measure` has by default changed.

torchrun --nproc_per_node 4 tools/bench/peer.py --warmup 3 --steps 6 PEERS/ds_pipe.py --size 7b --pp 4
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the script as if it had been started itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.path.insert(0, str(args.script.parent))
    report: Any = importlib.import_module("report")
    report.measure = partial(report.measure, warmup=args.warmup, steps=args.steps)
    sys.argv = [str(args.script), *args.arguments]
    runpy.run_path(str(args.script), run_name="__main__")


if __name__ == "__main__":
    main()
