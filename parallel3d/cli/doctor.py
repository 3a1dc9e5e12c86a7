"""`p3d doctor`: which kernels run here, why the others don't, and what to do about it."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parallel3d.comm.peer.streams import check_copies
from parallel3d.comm.peer.symmetric import Unavailable, check_device, check_hosts, check_peers
from parallel3d.config import Config, load_sections
from parallel3d.errors import ConfigError
from parallel3d.kernels.library import find_library, find_nvcc
from parallel3d.kernels.workspace import check_kernels, check_ranks

_WIDTH = 140  # of the table where there is no terminal


@dataclass(frozen=True)
class Finding:
    """A kernel, what runs without it, the reasons why it is off, and whether the configuration turns it on."""

    kernel: str
    instead: str
    reasons: Sequence[Unavailable]
    asked: bool

    @property
    def missed(self) -> bool:
        """Whether it is asked for and off."""
        return self.asked and bool(self.reasons)


def add_command(commands: Any) -> None:
    """Adds `doctor` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "doctor",
        help="say which kernels run here, and why others don't",
        description="Say of each kernel whether it runs on this host, or what is in its way and what to do about that. The "
        "exit code is 1 where one is off that the configuration asks for.",
    )
    parser.add_argument("--config", metavar="FILE", help="the configuration that a training will have")
    parser.add_argument(
        "--slices",
        type=int,
        metavar="N",
        help="tensor-parallel ranks (default: tensor_parallel.size, or this host's GPUs)",
    )
    parser.add_argument(
        "--stages", type=int, metavar="N", help="stages of a pipeline (default: pipeline.stages, or this host's GPUs)"
    )
    parser.add_argument("--replicas", type=int, metavar="N", help="replicas of a stage (default: this host's GPUs)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    for name in ("slices", "stages", "replicas"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ConfigError(f"--{name} is {number}; give a whole number >= 1")
    config = load_sections(options.config, "kernels", "pipeline", "tensor_parallel")
    devices = max(1, torch.cuda.device_count())
    slices = options.slices or config.tensor_parallel.size or devices
    stages = options.stages or config.pipeline.stages or devices
    findings = examine(config, slices, options.replicas or devices, stages)
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(show(findings))
    console.print(_surroundings(), highlight=False, markup=False, soft_wrap=True)
    return 1 if any(finding.missed for finding in findings) else 0


def examine(config: Config, slices: int, replicas: int, stages: int) -> list[Finding]:
    """Every kernel. slices: over how many ranks a layer is sliced; replicas: that share an optimizer's state; stages: of a
    pipeline.
    """
    triton, kernels, pipeline, tensor = _triton(), config.kernels, config.pipeline, config.tensor_parallel
    messages = [None if pipeline.peer_copies else _OFF_STAGES, *_by_copies(stages, "stages")]
    shards = [None if tensor.copies_shards else _OFF_SHARDS, *_by_copies(slices, "tensor-parallel ranks")]
    steps = [_turned_off("optimizer_step", kernels.optimizer_step), check_kernels()]
    among_slices, among_replicas = _calling(slices, "tensor-parallel ranks"), _calling(replicas, "replicas")
    reduces = _turned_off("reduce_scatter", kernels.reduce_scatter)
    sums = _turned_off("all_reduce", kernels.all_reduce)
    return [
        Finding("send/receive of stages (copies)", "NCCL", _found(*messages), False),
        Finding("send/receive of shards (copies)", "NCCL", _found(*shards), tensor.copies_shards),
        Finding("all_reduce (CUDA)", "NCCL", _found(sums, *among_slices), kernels.all_reduce),
        Finding("reduce_scatter (CUDA)", "NCCL", _found(reduces, *among_replicas), kernels.reduce_scatter),
        Finding("optimizer_step (CUDA)", "PyTorch", _found(*steps), kernels.optimizer_step),
        Finding("swiglu (Triton)", "PyTorch", triton, False),
        Finding("rms_norm (Triton)", "PyTorch", triton, False),
    ]


def _found(*reasons: Unavailable | None) -> list[Unavailable]:
    return [reason for reason in reasons if reason is not None]


def _calling(ranks: int, noun: str) -> list[Unavailable | None]:
    """Return why these ranks can't call a kernel together. noun: what each rank holds."""
    return _among(ranks, noun, check_kernels(), check_ranks)


def _among(
    ranks: int, noun: str, own: Unavailable | None, group: Callable[[Sequence[str], str], Unavailable | None]
) -> list[Unavailable | None]:
    """own, what is in the way of each of these ranks; group: of all of them, by their hosts; and whom they don't reach."""
    if not torch.cuda.is_available():
        return [own]
    count = torch.cuda.device_count()
    # Ranks fill one host after the other.
    across = group([f"host {rank // count}" for rank in range(ranks)], noun)
    reached = [] if across else [check_peers(torch.device("cuda", k), range(ranks)) for k in range(ranks)]
    return [own, across, next(filter(None, reached), None)]


_TURNED_OFF = "the configuration turns it off"
_OFF_STAGES = Unavailable(_TURNED_OFF, "set pipeline.peer_copies to true")
_OFF_SHARDS = Unavailable(
    "tensor_parallel.peer_copies, with sequence_parallel, turns it on", "set both to true, if steps become shorter"
)


def _by_copies(ranks: int, noun: str) -> list[Unavailable | None]:
    """Return why these ranks can't send each other messages by copies. noun: what each rank holds."""
    alone = Unavailable(f"there is 1 of the {noun}", f"copies are between 2 {noun} or more") if ranks == 1 else None
    # Unset, the number of queues becomes 32.
    return [alone, *_among(ranks, noun, check_copies(unset_queues=32), check_hosts)]


def _turned_off(kernel: str, value: bool) -> Unavailable | None:
    return None if value else Unavailable("off by default", f"set kernels.{kernel} to true, if steps become shorter")


def _triton() -> list[Unavailable]:
    if (missing := check_device()) is not None:
        return [missing]
    if find_spec("triton") is None:
        return [Unavailable("Triton is not installed", "pip install triton, as PyTorch for CUDA brings it along")]
    return []


def show(findings: Sequence[Finding]) -> Table:
    """Return a table with a line for each reason."""
    table = Table(title="Kernels", title_justify="left")
    for column in ("kernel", "", "why", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        if not finding.reasons:
            table.add_row(finding.kernel, "on", "", "")
        for number, reason in enumerate(finding.reasons):
            names = (finding.kernel, f"off: {finding.instead}") if number == 0 else ("", "")
            table.add_row(*names, escape(reason.reason), escape(reason.remedy))
    return table


def _surroundings() -> str:
    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return (
        f"Python {platform.python_version()}, PyTorch {torch.__version__}, CUDA devices: {devices or 'none'}\n"
        f"nvcc: {find_nvcc() or 'none'}\ncompiled kernels: {find_library() or 'none'}"
    )
