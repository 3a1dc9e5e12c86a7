"""Measure communication between ranks of one host, by this package and by the backend: a JSON file and a table.

python tools/bench/communication.py --worlds 2,4 --out communication.json
python tools/bench/communication.py --what ring,products --worlds 2

all_reduce: among tensor-parallel ranks, by the kernel. ring: every rank sends to the next one, as stages do, by copies.
message: every other rank sends to its neighbour. beside: a matrix product while messages travel round the ring. products:
the matrix products of a decoder layer with sequence parallelism, with the all-gather before them or the reduce-scatter after
them, and alone; by collectives, by copies and by PyTorch's symmetric-memory operators. reduce_scatter: fp32 gradients,
communicated in the dtype. update: AdamW's step of sharded fp32 masters with the all-gather of the weights, by torch, NCCL
and the kernel.

All are called on the current stream, back to back: 100 times, 10 of very large messages, between two CUDA events, `repeats`
times, the ways of one message in turn, after as many calls for warm-up. A time is the median over repeats on the slowest
rank. Bus bandwidth is what each device must send at least by that time. Products are measured "queued" too: 20 times, all in
the devices' queues before those begin, so that what the host needs does not count. With --cpu gloo alone is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from host import cuda_version, find_gpus
from results import as_text
from run import describe_run, environment, error_lines, find_result, run_process, split_names, start_command

if TYPE_CHECKING:
    import torch
    from exchanges import Way

WHAT = ("all_reduce", "ring", "message", "beside", "products", "reduce_scatter", "update")
KIB, MIB = 2**10, 2**20
# 32 MiB are 4096 tokens x 4096 features in bf16.
SIZES = (64 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 1024 * MIB)
DTYPES = ("bfloat16", "float32")
# Calls between two events, of messages below LARGE and of others: what the host needs to begin counts.
SHORT, LONG = 100, 10
QUEUED = 8  # that a device has in its queue: of four devices, 20 calls of a product in parts fill it
LARGE = 64 * MIB
# Of a device that waits for its queue to fill.
FIRST_SLEEP_S, LONGEST_SLEEP_S, CYCLES_PER_S = 0.02, 1.0, 2e9
BACKENDS = ("nccl", "gloo")


@dataclass(frozen=True)
class Workload:
    """Sizes to measure. sizes: bytes of a message, gradients or masters; products: tokens, hidden, feed-forward size."""

    what: tuple[str, ...]
    worlds: tuple[int, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    products: tuple[int, int, int]
    repeats: int


def bus_bandwidth(what: str, num_bytes: int, world: int, seconds: float) -> float:
    """Bytes a second that a device sends at least; 0 for products and updates, which take longer."""
    summed = 2 * (world - 1) / world
    sent = {
        "all_reduce": summed,
        "ring": 1.0,
        "message": 1.0,
        "reduce_scatter": summed / 2,
    }.get(what, 0.0)
    return sent * num_bytes / seconds


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", default="2,4,8", help="numbers of ranks; those that this host has no GPUs for are left out"
    )
    parser.add_argument("--what", default=",".join(WHAT), help=", ".join(WHAT))
    parser.add_argument("--products", default="4096,4096,11008", help="tokens, hidden size, feed-forward size")
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
    if unknown := set(split_names(args.what)) - set(WHAT):
        parser.error(f"--what has no {', '.join(sorted(unknown))}; it has {', '.join(WHAT)}")
    return args


def main() -> int:
    """Measure every number of ranks in processes of its own; 0 if all have results."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    most = len(gpus) or os.cpu_count() or 1
    worlds = tuple(n for n in map(int, split_names(args.worlds)) if n <= most)
    tokens, hidden, ffn = map(int, split_names(args.products))
    sizes, dtypes = tuple(map(int, split_names(args.sizes))), tuple(split_names(args.dtypes))
    work = Workload(tuple(split_names(args.what)), worlds, sizes, dtypes, (tokens, hidden, ffn), args.repeats)
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


HEADERS = ("what", "ranks", "dtype", "bytes", "by", "us", "min-max", "GB/s bus", "time / backend")


def table(measured: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Headers and a row of text for each measurement."""
    base = {_subject(m): m["seconds"] for m in measured if m["by"] in BACKENDS}
    rows = [list(HEADERS)]
    for m in measured:
        compared = m["by"] not in BACKENDS and _subject(m) in base
        ratio = f"{m['seconds'] / base[_subject(m)]:.2f}" if compared else ""
        spread = f"{m['min_s'] * 1e6:,.1f}-{m['max_s'] * 1e6:,.1f}"
        bus = f"{m['bus_bytes_per_s'] / 1e9:,.1f}" if m["bus_bytes_per_s"] else ""
        numbers = [f"{m['seconds'] * 1e6:,.1f}", spread, bus, ratio]
        rows.append([m["what"], str(m["world"]), m["dtype"], f"{m['bytes']:,}", m["by"], *numbers])
    return rows


def _subject(measured: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(measured[key] for key in ("what", "world", "dtype", "bytes"))


def work_as_rank(work: Workload) -> None:
    """One rank of torchrun's; rank 0 prints a line `RESULT {...}`."""
    import torch
    import torch.distributed as dist
    from exchanges import Exchanges
    from updates import Updates

    import parallel3d

    parallel3d.init_distributed()
    exchanges, updates = Exchanges(work.products), Updates()
    measured = []
    for dtype in work.dtypes:
        which = work.what, work.sizes, getattr(torch, dtype)
        compared = (list(ways) for _, ways in groupby(exchanges.ways(*which), lambda way: (way.what, way.num_bytes)))
        for ways in chain(compared, ([way] for way in updates.ways(*which))):  # each of which has a state of its own
            for way, times in zip(ways, time_in_turn(ways, work.repeats, exchanges.device), strict=True):
                figures = [median(times), min(times), max(times)]
                every = torch.tensor(figures, device=exchanges.device, dtype=torch.float64)
                dist.all_reduce(every, op=dist.ReduceOp.MAX)
                seconds, shortest, longest = every.tolist()
                world = dist.get_world_size()
                record = {"what": way.what, "world": world, "dtype": dtype, "bytes": way.num_bytes, "by": way.by}
                record |= {"seconds": seconds, "min_s": shortest, "max_s": longest}
                measured.append(record | {"bus_bytes_per_s": bus_bandwidth(way.what, way.num_bytes, world, seconds)})
    exchanges.finish()
    updates.finish()
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"measured": measured, "off": exchanges.why_off}), flush=True)


def time_in_turn(ways: Sequence[Way], repeats: int, device: torch.device) -> list[list[float]]:
    """Seconds a call of each way, of each repeat: one way after the other, since a device that gets hot gets slower."""
    times: list[list[float]] = [[] for _ in ways]
    for repeat in range(repeats + 1):
        for way, own in zip(ways, times, strict=True):
            if way.queued:
                seconds = time_queued_calls(way.call, QUEUED, device)
            else:
                seconds = time_calls(way.call, SHORT if way.num_bytes < LARGE else LONG, device)
            if repeat:  # the first is to warm up
                own.append(seconds)
    return times


def time_calls(call: Callable[[], object], number: int, device: torch.device) -> float:
    """Seconds a call."""
    import torch

    begin = time.perf_counter()
    if device.type == "cuda":
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
    for _ in range(number):
        call()
    if device.type != "cuda":
        return (time.perf_counter() - begin) / number
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3 / number


def time_queued_calls(call: Callable[[], object], number: int, device: torch.device) -> float:
    """Seconds a call, of devices that begin when all calls are in their queues: the hosts' time does not count."""
    import torch
    import torch.distributed as dist

    sleep_s = FIRST_SLEEP_S
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(sleep_s * CYCLES_PER_S))
        call()  # the devices wait for each other
        begin.record()
        for _ in range(number):
            call()
        begun = begin.query()
        end.record()
        end.synchronize()
        late = torch.tensor(int(begun), device=device)
        dist.all_reduce(late)
        if not late:
            return float(begin.elapsed_time(end)) / 1e3 / number
        sleep_s *= 2
        if sleep_s > LONGEST_SLEEP_S:
            raise RuntimeError(
                f"the host was not ahead of a device that slept {LONGEST_SLEEP_S} s before {number} calls"
            )


if __name__ == "__main__":
    if "RANK" in os.environ:
        given = json.loads(sys.argv[1])
        work_as_rank(Workload(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}))
    else:
        sys.exit(main())
