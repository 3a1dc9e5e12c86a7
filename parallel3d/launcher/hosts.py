"""Hosts and devices of a job, as DeepSpeed's hostfile and its options --include and --exclude describe them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from parallel3d.errors import ConfigError, nearest

# Host -> the indices of its devices.
Slots = Mapping[str, list[int]]


def parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """Return the number of devices of each host, from lines such as "worker-0 slots=4". Raises ConfigError."""
    hosts: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if match is None:
            raise ConfigError(f"hostfile: {line!r} is no host; write a line as: worker-0 slots=4")
        if match[1] in hosts:
            raise ConfigError(f"hostfile: {match[1]} is there twice; give it one line with all its slots")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise ConfigError("hostfile: no host is in it; write lines as: worker-0 slots=4")
    return hosts


def parse_resource_filter(host_info: Slots, include_str: str = "", exclude_str: str = "") -> dict[str, list[int]]:
    """Return the devices that --include names, or those that --exclude does not. Raises ConfigError.

    include_str, exclude_str: NAME[:SLOT[,SLOT ...]][@NAME ...], such as "worker-0@worker-1:0,2"; without slots all of a host.
    """
    if include_str and exclude_str:
        raise ConfigError(f"--include {include_str} and --exclude {exclude_str} are given; give one of them")
    named: dict[str, set[int]] = {}
    for word in filter(None, (include_str or exclude_str).split("@")):
        match = re.fullmatch(r"([^:]+)(?::(\d+(?:,\d+)*))?", word)
        if match is None:
            raise ConfigError(f"{word!r} is no host with slots; write it as worker-0:0,2")
        host, slots = match[1], match[2]
        if host not in host_info:
            raise ConfigError(
                f"there is no host {host!r} among {', '.join(host_info)}.{nearest(host, list(host_info))}"
            )
        chosen = set(host_info[host]) if slots is None else set(map(int, slots.split(",")))
        if unknown := sorted(chosen - set(host_info[host])):
            raise ConfigError(f"host {host} has the slots {host_info[host]}, and not {unknown}")
        named.setdefault(host, set()).update(chosen)
    if include_str:
        return {host: sorted(slots) for host, slots in named.items()}
    left = {host: [slot for slot in slots if slot not in named.get(host, ())] for host, slots in host_info.items()}
    return {host: slots for host, slots in left.items() if slots}


def parse_range_list(text: str) -> list[int]:
    """Return the numbers of a list of cores such as "0,2-4,6". Raises ConfigError unless they ascend."""
    numbers: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if match is None:
            raise ConfigError(f"{word!r} is no core and no range of cores; write a list as 0,2-4,6")
        found = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not found or (numbers and found[0] <= numbers[-1]):
            raise ConfigError(f"{text!r} does not ascend at {word!r}; give each core once, in order")
        numbers += found
    return numbers
