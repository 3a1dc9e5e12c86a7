"""`p3d doctor`: say which kernels run here, why the others don't, and what to do; `p3d build-kernels`: compile them."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.cli.deepspeed import who_is_deepspeed
from parallel3d.comm.peer.streams import check_copies
from parallel3d.comm.peer.symmetric import Unavailable, check_device, check_hosts, check_peers
from parallel3d.config import Config, load_sections
from parallel3d.kernels.cuda_library import build, find_library, find_nvcc, open_library
from parallel3d.kernels.workspace import check_kernels, check_ranks
from parallel3d.monitor.uncompiled import describe_uncompiled

_SECTIONS = ("kernels", "pipeline", "run_record", "tensor_parallel", "zero_optimization")
_WIDTH = 140  # width of the table without a terminal


@dataclass(frozen=True)
class Finding:
    """A kernel, its fallback, whether the configuration turns it on, and the reasons why it can't run."""

    kernel: str
    fallback: str
    asked: bool
    reasons: list[Unavailable]

    @property
    def missed(self) -> bool:
        """Whether the configuration turns the kernel on, but it can't run."""
        return self.asked and bool(self.reasons)


def build_kernels(options: argparse.Namespace) -> int:
    """Run `p3d build-kernels`. Raises KernelError where they can't be compiled or loaded."""
    path = build(options.out)
    open_library(path)  # raises now if it can't be loaded
    print(path)
    return 0


def diagnose(options: argparse.Namespace) -> int:
    """Run `p3d doctor`; return 1 if a kernel that the configuration turns on can't run."""
    config = load_sections(options.config, *_SECTIONS)
    devices = max(1, torch.cuda.device_count())
    tensor_ranks = options.tensor_parallel or config.tensor_parallel.size or devices
    stages = options.stages or config.pipeline.stages or devices
    findings = examine(config, tensor_ranks, options.replicas or devices, stages)
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(_table(findings))
    print(_describe_host())
    print(f"imports of deepspeed: {who_is_deepspeed()}")
    if config.run_record.directory is not None:
        print(*describe_uncompiled(Path(config.run_record.directory)), sep="\n", end="")
    return 1 if any(finding.missed for finding in findings) else 0


def examine(config: Config, tensor_ranks: int, replicas: int, stages: int) -> list[Finding]:
    """Return a finding for each kernel.

    - tensor_ranks: the number of tensor-parallel ranks.
    - replicas: the number of data-parallel ranks, which share an optimizer's state.
    - stages: the number of pipeline stages.
    """
    kernels, tensor = config.kernels, config.tensor_parallel
    library, triton = check_kernels(), check_device()
    if triton is None and find_spec("triton") is None:
        triton = Unavailable("Triton is not installed", "pip install triton, which PyTorch for CUDA comes with")

    def finding(kernel: str, fallback: str, asked: bool, *reasons: Unavailable | None) -> Finding:
        return Finding(kernel, fallback, asked, [reason for reason in reasons if reason is not None])

    def cuda(kernel: str, fallback: str, *reasons: Unavailable | None) -> Finding:
        asked = getattr(kernels, kernel)
        off = None if asked else Unavailable("off by default", f"set kernels.{kernel} to true, if steps become shorter")
        return finding(f"{kernel} (CUDA)", fallback, asked, off, library, *reasons)

    def copies(kind: str, noun: str, ranks: int, asked: bool, off: Unavailable | None) -> Finding:
        alone = Unavailable(f"the number of {noun} is 1", f"copies need at least 2 {noun}") if ranks == 1 else None
        queues = check_copies(unset_queues=32)  # init_distributed sets 32 if the variable is unset
        group = _check_group(ranks, noun, check_hosts)
        return finding(f"{kind} (copies)", "NCCL", asked, off, alone, queues, *group)

    noun, shared = "tensor-parallel ranks", tensor.copies_shards
    gathered = config.zero_optimization.stage == 3 and config.zero_optimization.peer_copies
    return [
        copies("send/receive of stages", "stages", stages, False, None if config.pipeline.peer_copies else _OFF_STAGES),
        copies("send/receive of shards", noun, tensor_ranks, shared, None if shared else _OFF_SHARDS),
        copies("gathers of weights", "replicas", replicas, gathered, None if gathered else _OFF_WEIGHTS),
        cuda("all_reduce", "NCCL", *_check_group(tensor_ranks, noun, check_ranks)),
        cuda("reduce_scatter", "NCCL", *_check_group(replicas, "replicas", check_ranks)),
        cuda("optimizer_step", "PyTorch"),
        finding("swiglu (Triton)", "PyTorch", False, triton),
        finding("rms_norm (Triton)", "PyTorch", False, triton),
    ]


_OFF_STAGES = Unavailable("the configuration turns it off", "set pipeline.peer_copies to true")
_OFF_SHARDS = Unavailable(
    "tensor_parallel.peer_copies, with sequence_parallel, turns it on", "set both to true, if steps become shorter"
)
_OFF_WEIGHTS = Unavailable(
    "zero_optimization.peer_copies, with stage 3, turns it on", "set it to true, if steps become shorter"
)


def _check_group(
    ranks: int, noun: str, check: Callable[[Sequence[str], str], Unavailable | None]
) -> list[Unavailable | None]:
    """Return why these ranks don't reach each other. check: checks all of them, given their hosts."""
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    # Ranks fill one host after the other.
    across = check([f"host {rank // count}" for rank in range(ranks)], noun)
    reached = [] if across else [check_peers(torch.device("cuda", k), range(ranks)) for k in range(ranks)]
    return [across, next(filter(None, reached), None)]


def _table(findings: Sequence[Finding]) -> Table:
    """Return a table with a line for each reason."""
    columns = (Column(name, overflow="fold") for name in ("kernel", "", "why", "what to do"))
    table = Table(*columns, title="Kernels", title_justify="left")
    for finding in findings:
        if not finding.reasons:
            table.add_row(finding.kernel, "on", "", "")
        for number, reason in enumerate(finding.reasons):
            names = (finding.kernel, f"off: {finding.fallback}") if number == 0 else ("", "")
            table.add_row(*names, escape(reason.reason), escape(reason.remedy))
    return table


def _describe_host() -> str:
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return (
        f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA devices: {devices or 'none'}\n"
        f"nvcc: {find_nvcc() or 'none'}\ncompiled kernels: {find_library() or 'none'}"
    )
