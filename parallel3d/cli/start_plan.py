"""Start of `p3d plan`: a second process imports torch's compiler, which traces need, while this one imports the planner."""

from __future__ import annotations

import argparse
import os
from importlib import import_module

from parallel3d.costs.forked import ForkedCalls
from parallel3d.planner import rare_collections


@rare_collections()
def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    for name in ("models", "planner.predict.profile"):  # before the fork: all processes need them
        import_module(f"parallel3d.{name}")
    process, target = None, options.model
    # Layers of a user's function may hold weights, and be of classes that other processes haven't imported.
    if len(os.sched_getaffinity(0)) > 1 and target and ":" not in target and not options.compare:
        process = ForkedCalls(["torch._dynamo"])
    from parallel3d.cli import plan  # it takes as long as those imports

    return plan.run(options, process)
