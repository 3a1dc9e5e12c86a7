"""`p3d trace`: one trace for Perfetto of what engine.profile has recorded on all ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from parallel3d.monitor.traces import MERGED, merge_traces


def run(options: argparse.Namespace) -> int:
    """Merge the traces of a run, and print where the result is."""
    out: Path = options.out or options.run_directory / MERGED
    ranks = merge_traces(options.run_directory, out)
    print(f"{out}: {ranks} ranks; open it at https://ui.perfetto.dev")
    return 0
