"""Hosts and devices of a job, as DeepSpeed's hostfile and its options --include and --exclude describe them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.errors import ConfigError, nearest

HOSTFILE = "/job/hostfile"
"""DeepSpeed's default."""

# Host -> the indices of its devices.
Slots = Mapping[str, list[int]]

# No character that means something to a shell, and no "-" in front, which ssh would take for an option.
_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


class WorldSize(int):
    """Number of processes of all hosts together, given by a layout."""


@dataclass(frozen=True)
class Node:
    """One of several hosts of a job.

    - hosts: names of all hosts, in the order of their ranks; index: this one's.
    - address, port: address of the store where the hosts meet, in the first host's launcher.
    - ranks: ranks of this host's processes, if a plan gives them; by default the ranks of a host are consecutive.
    """

    hosts: Sequence[str]
    index: int
    address: str
    port: int
    ranks: Sequence[int] = ()


def parse_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """Return the number of devices of each host, from lines such as "worker-0 slots=4". Raises ConfigError."""
    hosts: dict[str, int] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        match = re.fullmatch(rf"({_HOST})\s+slots=([0-9]+)", line)
        if match is None:
            raise ConfigError(f"hostfile: {line!r} is not a host; write a line as: worker-0 slots=4")
        if match[1] in hosts:
            raise ConfigError(f"hostfile: {match[1]} is there twice; give it one line with all its slots")
        hosts[match[1]] = int(match[2])
    if not any(hosts.values()):
        raise ConfigError("hostfile: no host with slots is in it; write lines as: worker-0 slots=4")
    return hosts


def parse_named(text: str) -> dict[str, list[int] | None]:
    """Return the hosts and slots of NAME[:SLOT[,SLOT ...]][@NAME ...], None for all of a host. Raises ConfigError."""
    named: dict[str, list[int] | None] = {}
    for word in text.split("@"):
        match = re.fullmatch(rf"({_HOST})(?::([0-9]+(?:,[0-9]+)*))?", word)
        if match is None:
            raise ConfigError(f"{word!r} is not a host with slots; write it as worker-0:0,2")
        host, slots = match[1], match[2]
        before = named.get(host, [])
        named[host] = None if slots is None or before is None else [*before, *map(int, slots.split(","))]
    return named


def parse_resource_filter(host_info: Slots, include_str: str = "", exclude_str: str = "") -> dict[str, list[int]]:
    """Return the devices that --include names, or those that --exclude does not, in host_info's order. Raises ConfigError.

    include_str, exclude_str: NAME[:SLOT[,SLOT ...]][@NAME ...], such as "worker-0@worker-1:0,2"; without slots all of a host.
    """
    if include_str and exclude_str:
        raise ConfigError(f"--include {include_str} and --exclude {exclude_str} are given; give one of them")
    text, named = include_str or exclude_str, dict[str, set[int]]()
    for host, slots in (parse_named(text) if text else {}).items():
        if host not in host_info:
            raise ConfigError(
                f"there is no host {host!r} among {', '.join(host_info)}.{nearest(host, list(host_info))}"
            )
        named[host] = set(host_info[host] if slots is None else slots)
        if unknown := sorted(named[host] - set(host_info[host])):
            raise ConfigError(f"host {host} has the slots {host_info[host]}, and not {unknown}")
    left = {
        host: [slot for slot in slots if (slot in named.get(host, ())) == bool(include_str)]
        for host, slots in host_info.items()
    }
    return {host: slots for host, slots in left.items() if slots}


def read_ranks(path: Path) -> dict[str, dict[int, int]]:
    """Return rank -> device of each host, in the order of the ranks, from a plan's ranks.json. Raises ConfigError."""
    found: dict[str, dict[int, int]] = {}
    try:
        places = sorted((place["rank"], place["host"], place["gpu"]) for place in json.loads(path.read_text()))
        for rank, host, gpu in places:
            found.setdefault(host, {})[rank] = gpu
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--ranks {path} is not a ranks.json of `p3d plan`: {error!r}; name that file") from error
    ranks = [rank for rank, _, _ in places]
    if not ranks or ranks != list(range(len(ranks))):
        raise ConfigError(f"--ranks {path}: the ranks are {ranks}; give each rank one place, from 0")
    for host, own in found.items():
        if not (isinstance(host, str) and re.fullmatch(_HOST, host)):
            raise ConfigError(f"--ranks {path}: {host!r} is not a host name; write it as worker-0")
        gpus = list(own.values())
        if not all(isinstance(gpu, int) and gpu >= 0 for gpu in gpus) or len({*gpus}) < len(gpus):
            raise ConfigError(
                f"--ranks {path}: the devices of host {host} are {gpus}; give each rank a device of its own"
            )
    return found


def parse_range_list(text: str) -> list[int]:
    """Return the numbers of a list of cores such as "0,2-4,6". Raises ConfigError unless they ascend."""
    numbers: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if match is None:
            raise ConfigError(f"{word!r} is not a core or a range of cores; write a list as 0,2-4,6")
        found = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not found or (numbers and found[0] <= numbers[-1]):
            raise ConfigError(f"{text!r} does not ascend at {word!r}; give each core once, in order")
        numbers += found
    return numbers
