"""The host of a benchmark: devices, versions, commit; found without starting CUDA."""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13", "deepspeed", "megatron-core")
_QUERY = ("name", "memory.total", "power.limit", "driver_version", "compute_cap")


def find_gpus() -> list[dict[str, str]]:
    """Return nvidia-smi's name and memory of each GPU; none if there is no nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [dict(zip(_QUERY, row, strict=True)) for row in rows if len(row) == len(_QUERY)]


def describe_hardware(gpus: list[dict[str, str]]) -> dict[str, Any]:
    """The GPUs, taken to be alike, or the CPU where the list is empty."""
    if gpus:
        return {"count": len(gpus), **gpus[0], "cpus": os.cpu_count()}
    return {"count": os.cpu_count(), "name": f"CPU core ({_cpu_name()})"}


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.machine()


def cuda_version() -> str | None:
    """Return the CUDA version of PyTorch's build, None without CUDA."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("PyTorch is not installed for this Python")
    found: str | None = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return found


def find_versions() -> dict[str, str]:
    """Python, PyTorch, CUDA and what of the frameworks is installed."""
    found = {"Python": platform.python_version(), "PyTorch": version("torch"), "CUDA": cuda_version() or "none"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def find_commit() -> str:
    """Return the commit of the imported checkout, with -dirty if files differ from it; "unknown" without git."""
    spec = find_spec("parallel3d")
    if spec is None or spec.origin is None:
        return "unknown"
    root = str(Path(spec.origin).parents[1])
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        status = subprocess.run(["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if status.stdout.strip() else "")
