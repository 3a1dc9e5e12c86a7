"""All-reduces of tensor slices: this package's kernel beside NCCL, on the GPUs of this host. A JSON file and a table.

python tools/bench/communication.py --worlds 2,4,8 --out communication.json

Both sum the same tensor in place, on the current stream, back to back: 100 of them, 10 of large messages, between two CUDA
events, `repeats` times, after as many calls for warm-up. A time is the median over repeats on the slowest rank. Bus bandwidth
is what each device must send at least, 2 (n - 1) / n of the message, by that time. With --cpu gloo alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from host import cuda_version, find_gpus
from results import as_text
from run import describe_run, environment, error_lines, find_result, run_process, split_names, start_command

KERNEL = "kernel"
KIB, MIB = 2**10, 2**20
# 32 MiB are 4096 tokens x 4096 features in bf16.
SIZES = (64 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 1024 * MIB)
DTYPES = ("bfloat16", "float32")
SHORT, LONG = 100, 10  # calls between two events, of messages below LARGE and of others
LARGE = 16 * MIB


@dataclass(frozen=True)
class Workload:
    """What is measured. sizes: bytes of a message."""

    worlds: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    repeats: int


def bus_bandwidth(num_bytes: int, world: int, seconds: float) -> float:
    """Bytes a second that a device sends at least."""
    return 2 * (world - 1) / world * num_bytes / seconds


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", default="2,4,8", help="numbers of ranks; those that this host has no GPUs for are left out"
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a message, separated by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a number of ranks may take")
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("communication.json"))
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats is at least 1")
    return args


def main() -> int:
    """Measure every number of ranks in processes of its own; 0 if all have results."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    most = len(gpus) or os.cpu_count() or 1
    worlds = tuple(n for n in map(int, split_names(args.worlds)) if n <= most)
    work = Workload(worlds, tuple(map(int, split_names(args.sizes))), tuple(split_names(args.dtypes)), args.repeats)
    run = describe_run(args, gpus, work, "communication.py") | {"measured": [], "off": {}}
    good = bool(worlds)
    for world in worlds:
        command = start_command([str(Path(__file__).resolve()), json.dumps(asdict(work))], world)
        status, output = run_process(command, environment(gpus), args.timeout)
        result = find_result(output)
        if result is None:
            good = False
            print(f"{world} ranks: {status}", *error_lines(output), sep="\n    ", flush=True)
            continue
        run["measured"] += result["measured"]
        run["off"] |= {str(world): result["off"]} if result["off"] else {}
        args.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    print(as_text(table(run["measured"])), *(f"{n} ranks: {why}" for n, why in run["off"].items()), sep="\n")
    return 0 if good else 1


HEADERS = ("ranks", "dtype", "bytes", "by", "us", "min-max", "GB/s bus", "time / backend")


def table(measured: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Headers and a row of text for each measurement."""
    base = {(m["world"], m["dtype"], m["bytes"]): m["seconds"] for m in measured if m["by"] != KERNEL}
    rows = [list(HEADERS)]
    for m in measured:
        own = m["by"] == KERNEL
        ratio = f"{m['seconds'] / base[m['world'], m['dtype'], m['bytes']]:.2f}" if own else ""
        spread = f"{m['min_s'] * 1e6:,.1f}-{m['max_s'] * 1e6:,.1f}"
        numbers = [f"{m['seconds'] * 1e6:,.1f}", spread, f"{m['bus_bytes_per_s'] / 1e9:,.1f}", ratio]
        rows.append([str(m["world"]), m["dtype"], f"{m['bytes']:,}", m["by"], *numbers])
    return rows


def work_as_rank(work: Workload) -> None:
    """One rank of torchrun's; rank 0 prints a line `RESULT {...}`."""
    import torch
    import torch.distributed as dist

    import parallel3d
    from parallel3d.comm.all_reduce_kernel import AllReduce, open_all_reduce
    from parallel3d.comm.environment import local_device
    from parallel3d.comm.groups import ProcessGroups
    from parallel3d.comm.obstacles import local_obstacle
    from parallel3d.topology import ProcessTopology

    parallel3d.init_distributed()
    world, device, backend = dist.get_world_size(), local_device(), str(dist.get_backend())
    groups = ProcessGroups(ProcessTopology(["data", "model"], [1, world]))
    open_all_reduce(groups, device, asked=True)
    kernel: Any = groups.model.kernels.all_reduce
    assert kernel is None or isinstance(kernel, AllReduce)
    measured = []
    for name in work.dtypes:
        for num_bytes in work.sizes:
            dtype = getattr(torch, name)
            x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device)
            ways: dict[str, Callable[[], object]] = {backend: lambda x=x: dist.all_reduce(x)}
            if kernel is not None:
                ways[KERNEL] = lambda x=x: kernel.sum_into(x, x)
            for by, call in ways.items():
                times = time_calls(call, num_bytes, work.repeats, device.type == "cuda")
                both = torch.tensor([median(times), min(times), max(times)], device=device, dtype=torch.float64)
                dist.all_reduce(both, op=dist.ReduceOp.MAX)
                seconds, shortest, longest = both.tolist()
                record = {"world": world, "dtype": name, "bytes": num_bytes, "by": by, "seconds": seconds}
                record |= {"min_s": shortest, "max_s": longest}
                measured.append(record | {"bus_bytes_per_s": bus_bandwidth(num_bytes, world, seconds)})
    if kernel is not None:
        torch.cuda.synchronize()
        kernel.raise_if_failed()
    why = "" if kernel is not None else str(local_obstacle(device) or "see the warning of rank 0")
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"measured": measured, "off": why}), flush=True)


def time_calls(call: Callable[[], object], num_bytes: int, repeats: int, on_cuda: bool) -> list[float]:
    """Seconds a call, of each repeat."""
    import torch

    calls = SHORT if num_bytes < LARGE else LONG
    times = []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        if on_cuda:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        for _ in range(calls):
            call()
        if on_cuda:
            events[1].record()
            events[1].synchronize()
            seconds = events[0].elapsed_time(events[1]) / 1e3
        else:
            seconds = time.perf_counter() - begin
        if repeat:  # the first is to warm up
            times.append(seconds / calls)
    return times


if __name__ == "__main__":
    if "RANK" in os.environ:
        given = json.loads(sys.argv[1])
        work_as_rank(Workload(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}))
    else:
        sys.exit(main())
