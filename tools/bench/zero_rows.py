"""Rows of the comparisons of zero_tables.py, and their tables. Pure functions; results are described in zero_tables.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

_GIB = 2**30
FRAMEWORKS = ("parallel3d", "deepspeed")
TITLES = {
    1: "Offload, ZeRO-3",
    2: "Stages, sequences an eighth as long",
    3: "Precision, ZeRO-3 with optimizer and parameters offloaded",
    4: "Links, ZeRO-3",
    5: "Memory by parts, GiB of the rank that needs most: predicted / measured",
}
STEPS = {1: 20, 2: 50, 3: 20, 4: 50, 5: 3}  # timed steps
SWITCHES = ("NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")
# Column -> rows of engine.reports.memory_report() that it adds up.
PARTS = {
    "weights": ("weights",),
    "optimizer": ("masters", "optimizer", "update"),
    "gradients": ("gradients",),
    "activations": ("activations",),
    "communication": ("transient", "gathered", "window"),
    "total": (),
    "in host memory": ("host",),
}


@dataclass(frozen=True)
class Row:
    """One training: a name, zero_optimization's keys, other keys of the configuration, the environment.

    - nvme: whether it needs a directory for state on disk.
    - only: the framework whose keys it uses.
    """

    table: int
    name: str
    zero: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    nvme: bool = False
    only: str = ""


@dataclass(frozen=True)
class Host:
    """What rows may use: processes, one a GPU if there are any; a directory for state on disk, or ""; InfiniBand."""

    processes: int
    has_gpus: bool
    nvme_path: str
    has_infiniband: bool


def _offload(stage: int, optimizer: Mapping[str, Any] | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {"offload_optimizer": optimizer, "offload_param": parameters}
    return {"stage": stage, **{key: value for key, value in given.items() if value is not None}}


def _all_offload(stage: int) -> dict[str, Any]:
    memory = {"device": "cpu", "pin_memory": True}
    return _offload(stage, memory, memory if stage == 3 else None)


def rows(nvme_path: str = "") -> Iterator[Row]:
    """Yield the rows of all tables, in order."""
    yield Row(1, "none", {"stage": 3})
    for pinned in (True, False):
        memory, suffix = {"device": "cpu", "pin_memory": pinned}, "" if pinned else ", not pinned"
        yield Row(1, f"optimizer{suffix}", _offload(3, memory, None))
        yield Row(1, f"optimizer + parameters{suffix}", _offload(3, memory, memory))
    disk = {"device": "nvme", "nvme_path": nvme_path, "pin_memory": True}
    yield Row(1, "optimizer on nvme", _offload(3, disk, None), nvme=True)
    yield Row(1, "optimizer + parameters on nvme", _offload(3, disk, disk), nvme=True)
    yield Row(
        1,
        "auto: what the GPU has no room for",
        _offload(3, {"device": "cpu", "ratio": "auto"}, None),
        only="parallel3d",
    )
    for stage in (0, 1, 2, 3):
        yield Row(2, f"stage {stage}", {"stage": stage})
    for stage in (1, 2, 3):
        yield Row(2, f"stage {stage}, offload", _all_offload(stage))
    for name in ("bf16", "fp16"):
        yield Row(3, name, _all_offload(3), {"bf16": {"enabled": name == "bf16"}, "fp16": {"enabled": name == "fp16"}})
    fp8 = {"bf16": {"enabled": True}, "fp8": {"enabled": True}}
    yield Row(3, "bf16 with fp8 linears", _all_offload(3), fp8, only="parallel3d")
    yield Row(4, "all on", {"stage": 3})
    for number in (1, 2, 3):
        for switches in combinations(SWITCHES, number):
            name = " + ".join(switch.removeprefix("NCCL_").removesuffix("_DISABLE") for switch in switches)
            yield Row(4, f"{name} off", {"stage": 3}, environment=dict.fromkeys(switches, "1"))
    for stage in (1, 2, 3):
        yield Row(5, f"stage {stage}", {"stage": stage})
        yield Row(5, f"stage {stage}, offload", _all_offload(stage))


def obstacle(row: Row, framework: str, host: Host) -> str:
    """Return why a row can't run on this host, or ""."""
    if row.only not in ("", framework):
        return f"{framework} has no such setting"
    if row.nvme and not host.nvme_path:
        return "no directory on a fast disk; give --nvme_path"
    if row.environment and not host.has_gpus:
        return "the variables are NCCL's, and the CPU uses gloo"
    if row.environment and host.processes == 1:
        return "1 GPU has no link to another"
    if set(row.environment) == {"NCCL_IB_DISABLE"} and not host.has_infiniband:
        return "no InfiniBand on this host: the same as all on"
    return ""


def table(records: Sequence[Mapping[str, Any]], number: int) -> list[list[str]]:
    """Return the headers and a row of text for each record of a table. What has no figures has its reason last."""
    columns = ["s/step", "min-max"]
    if number != 4:
        columns += ["samples/s", "peak GPU GiB", "host GiB"]
    if number == 3:
        columns += ["skipped steps"]
    if number == 5:
        columns = [*PARTS, "peak GPU GiB"]
    lines = [["row", "framework", *columns, "no figures because"]]
    for record in records:
        if record["table"] == number:
            cells, reason = {}, ""
            if "result" in record:
                cells = _cells(record["result"]) | (_parts(record["result"]) if number == 5 else {})
            else:
                reason = f"{record['status']}: {next(iter(record['error']), 'without a message')[:200]}"
            lines.append([record["row"], record["framework"], *(cells.get(column, "") for column in columns), reason])
    return lines if any(line[-1] for line in lines[1:]) else [line[:-1] for line in lines]


def _cells(result: Mapping[str, Any]) -> dict[str, str]:
    peak, pinned = max(result["peak_gib"]), max(result["pinned_gib"])
    return {
        "s/step": f"{result['step_s']:.3f}",
        "min-max": f"{result['min_s']:.3f}-{result['max_s']:.3f}",
        "samples/s": f"{result['samples_s']:.2f}",
        "peak GPU GiB": f"{peak:.2f}" if peak else "",
        "host GiB": f"{max(result['host_gib']):.2f}" + (f" + {pinned:.2f} pinned" if pinned else ""),
        "skipped steps": str(result["skipped"]),
    }


def _parts(result: Mapping[str, Any]) -> dict[str, str]:
    if "memory" not in result:  # DeepSpeed doesn't say
        return {}
    memory = result["memory"]
    sums = {name: [sum(memory.get(key, (0, 0))[k] for key in keys) for k in (0, 1)] for name, keys in PARTS.items()}
    sums["total"] = [max(memory["backward"][k], memory["step"][k]) for k in (0, 1)]
    return {name: " / ".join(f"{value / _GIB:.3g}" for value in pair) for name, pair in sums.items()}
