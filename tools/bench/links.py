"""Measures the links that offloaded state passes through: the device's with pinned host memory, and a disk.

python tools/bench/links.py --nvme_path /local

Prints a line `LINKS {...}` of GB/s: one way each, and both ways at once, which is what `host_bandwidth` of a cluster file
means; of the disk with the requests that offload makes by default.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.zero.disk import ScratchFile

REPEATS = 5


def rate(nbytes: int, move: Callable[[], None]) -> float:
    """Return the median GB/s of a movement of bytes."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - start)
    return round(nbytes / median(seconds) / 1e9, 2)


def host_rates(nbytes: int) -> dict[str, float]:
    """Return the rates of copies between the current device and pinned host memory, {} without a device."""
    if not torch.cuda.is_available():
        return {}
    host = [allocate_slab(nbytes, pin=True) for _ in range(2)]
    device = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def copy(*pairs: tuple[Tensor, Tensor]) -> None:
        for stream, (target, source) in zip(streams, pairs, strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    there, back = (device[0], host[0]), (host[1], device[1])
    return {
        "to device": rate(nbytes, lambda: copy(there)),
        "to host": rate(nbytes, lambda: copy(back)),
        "each way at once": rate(nbytes, lambda: copy(there, back)),
    }


def disk_rates(directory: str, nbytes: int) -> dict[str, float]:
    """Return the rates of a scratch file in a directory."""
    file, memory = ScratchFile(directory, nbytes), allocate_slab(nbytes, torch.cuda.is_available())
    memory.fill_(1)
    rates = {
        "disk written": rate(nbytes, lambda: file.write(0, memory).wait()),
        "disk read": rate(nbytes, lambda: file.read(0, memory).wait()),
    }
    file.close()
    return rates


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme_path", default="", help="a directory on the disk (default: no disk)")
    parser.add_argument("--mib", type=int, default=2048, help="size of a movement")
    args = parser.parse_args()
    nbytes = args.mib << 20
    rates = {**host_rates(nbytes), **(disk_rates(args.nvme_path, nbytes) if args.nvme_path else {})}
    print("LINKS " + json.dumps(rates), flush=True)


if __name__ == "__main__":
    main()
