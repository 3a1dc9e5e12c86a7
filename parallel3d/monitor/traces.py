"""Traces of steps by torch.profiler, a file for each rank, and their union for Perfetto."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from parallel3d.atomic_write import atomic_path
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import ConfigError
from parallel3d.monitor.steps import clock_offset

MERGED = "trace.json.gz"
_OWN_KEY = "parallel3d"  # entry of a trace with rank, stage, host, and the microseconds to add to get rank 0's time


class StepTracer:
    """Tracer of this rank's next steps. memory: whether allocations are recorded, too. Collective over all ranks."""

    def __init__(self, steps: int, directory: Path, memory: bool, groups: ProcessGroups, device: torch.device):
        self._left, self._directory, self._rank = steps, directory, groups.rank
        self._history = memory and device.type == "cuda"
        directory.mkdir(parents=True, exist_ok=True)
        offset = clock_offset(groups.control, time.time)
        place = {"rank": groups.rank, "stage": groups.coordinate("pipe"), "host": socket.gethostname()}
        self._profiler: Any = torch.profiler.profile(profile_memory=memory)
        if self._history:
            torch.cuda.memory._record_memory_history()
        self._profiler.start()
        self._profiler.add_metadata_json(_OWN_KEY, json.dumps({**place, "offset_us": 1e6 * offset}))

    def after_step(self) -> bool:
        """Count a step. After the last one, write the files and return True."""
        self._left -= 1
        if self._left > 0:
            return False
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._directory / f"trace-{self._rank}.json.gz"))
        if self._history:
            torch.cuda.memory._dump_snapshot(str(self._directory / f"memory-{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        return True


def merge_traces(directory: Path, out: Path) -> int:
    """Write the traces of all ranks in a directory as one, its times those of rank 0's clock; return the number of ranks.

    Raises ConfigError if there is none, or one that can't be read.
    """
    files = sorted(directory.glob("trace-*.json.gz"))
    if not files:
        raise ConfigError(
            f"there is no trace-RANK.json.gz in '{directory}'; record some steps by engine.profile(steps)"
        )
    traces = sorted(map(_read, files), key=lambda trace: trace[_OWN_KEY]["rank"])
    base, numbers = min(trace["baseTimeNanoseconds"] for trace in traces), count(1)
    events = [event for trace in traces for event in _moved(trace, base, numbers)]
    with atomic_path(out) as part, gzip.open(part, "wt", encoding="utf-8", compresslevel=3) as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    return len(traces)


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace: dict[str, Any] = json.load(file)
        return {"baseTimeNanoseconds": 0, **trace, _OWN_KEY: trace[_OWN_KEY]}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"'{path}' is not a trace of engine.profile ({type(error).__name__}: {error}); remove it"
        ) from error


def _moved(trace: dict[str, Any], base: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield a rank's events with process and flow numbers that no other rank has, on the common clock."""
    place, pids, flows = trace[_OWN_KEY], dict[Any, int](), dict[Any, int]()
    shift = place["offset_us"] + (trace["baseTimeNanoseconds"] - base) / 1e3
    for event in trace["traceEvents"]:
        if event.get("pid") not in pids:
            pids[event.get("pid")] = next(numbers)
        moved = {**event, "pid": pids[event.get("pid")]}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        if "id" in event:
            if event["id"] not in flows:
                flows[event["id"]] = next(numbers)
            moved["id"] = flows[event["id"]]
        if event.get("name") == "process_name":
            where = f"rank {place['rank']} (stage {place['stage']}, {place['host']})"
            moved["args"] = {"name": f"{where}: {event['args']['name']}"}
        elif event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": moved["pid"]}
        yield moved
