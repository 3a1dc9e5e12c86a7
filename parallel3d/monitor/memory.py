"""Memory in use by this process, in the phases of a step, and by the instructions of a batch.

On CUDA it is the allocator's count; on the CPU the resident set, or for instructions the storages that are alive.
"""

from __future__ import annotations

import os
import resource
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.schedule.instructions import Instruction, Program
from parallel3d.schedule.memory import bytes_in_flight, learn_chunks

_STATM = Path("/proc/self/statm")


def memory_in_use(device: torch.device) -> Mapping[str, int]:
    """Return the bytes of this process by kind, without waiting for the device.

    On CUDA: allocated, the peak since the last call, and reserved; on the CPU: resident, and the process's peak so far.
    """
    if device.type == "cuda":
        found = {
            "allocated": torch.cuda.memory_allocated(device),
            "peak": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "peak": max(peak, resident)}


def peak_memory(device: torch.device, least: int = 0) -> int:
    """Return the most bytes that this process has had in tensors on CUDA, or resident on the CPU; not less than `least`."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), least)
    return max(memory_in_use(device)["peak"], least)


class LiveStorages(TorchDispatchMode):
    """Context that counts the bytes of the storages made by operations inside and still alive, for the CPU.

    Storages that were there before, such as those of weights, don't count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, tuple(kwargs.values()))):
            self._known.add(storage)  # maybe made outside
        result = function(*args, **kwargs)
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes()).atexit = False
        return result

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.peak = max(self.peak, self.nbytes)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of an operator's arguments or results; pytree's own walk takes ten times as long."""
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree.untyped_storage()
    elif isinstance(tree, (tuple, list)):
        for leaf in tree:
            yield from _storages(leaf)


class MemoryRecorder:
    """Recorder of the memory beyond that at its start: held after each instruction, and the peak.

    - in_transit: returns the bytes that sent messages still hold. They are freed at no fixed instruction, so none counts them.
    - held: (instruction, bytes that it and the wait before it added, bytes held after it).
    - peak: the most at any time, with the workspaces of operations and what is in transit.
    - of_runs: most bytes that each run of layers in a forward left for the backward, their inputs included; see `reach`.
    """

    def __init__(self, device: torch.device, in_transit: Callable[[], int] = lambda: 0):
        self._in_transit = in_transit
        self.held: list[tuple[Instruction, int, int]] = []
        self.peak = 0
        self._device = device
        self._storages = LiveStorages()
        self.start = self._before = 0
        self.of_runs: dict[Any, int] = {}
        self._run: tuple[Any, int] = None, 0

    def _now(self) -> int:
        on_cuda = self._device.type == "cuda"
        held = torch.cuda.memory_allocated(self._device) - self.start if on_cuda else self._storages.nbytes
        return held - self._in_transit()

    def reach(self, run: Any) -> None:
        """Reach the next run of layers in a forward; None at the forward's end."""
        (last, before), now = self._run, self._now()
        if last is not None:
            self.of_runs[last] = max(self.of_runs.get(last, 0), now - before)
        self._run = run, now

    @property
    def most_held(self) -> int:
        """The most bytes held after any instruction."""
        return max((held for _, _, held in self.held), default=0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the block."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.start = torch.cuda.memory_allocated(self._device)
            yield
            self.peak = torch.cuda.max_memory_allocated(self._device) - self.start
        else:
            with self._storages:
                yield
            self.peak = self._storages.peak

    @contextmanager
    def __call__(self, instruction: Instruction) -> Iterator[None]:
        """Measure the block as `instruction`."""
        yield
        now = self._now()
        self.held.append((instruction, now - self._before, now))
        self._before = now


class RunMemory:
    """Peak memory of a CUDA device in each run of a layer. most: bytes of each run that has ended, without `beside`.

    beside: bytes that don't count, such as gathered weights, which change only at the boundaries between runs.
    """

    def __init__(self, device: torch.device, beside: int):
        self._device = device
        self._own = 0
        self.most: list[int] = []
        self.begin(beside)

    @staticmethod
    def can_measure(device: torch.device) -> bool:
        """Return whether the peak of a device's memory can be measured."""
        return device.type == "cuda"

    def _peak(self) -> int:
        """Return the most bytes that were allocated since the last call."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def begin(self, beside: int) -> None:
        """Begin a run, or go on with it after a boundary."""
        self._beside = beside
        self._peak()

    def reach(self, run: int, beside: int) -> None:
        """Reach the boundary before the run of this number. Runs whose boundaries were not reached count as one."""
        self._own = max(self._own, self._peak() - min(self._beside, beside))
        if run > len(self.most):
            self.most += [self._own] * (run - len(self.most))
            self._own = 0


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of one training batch: its program, what its instructions hold, and what the optimizer's step needs."""

    program: Program
    batch: MemoryRecorder
    step: MemoryRecorder

    def activations(self, stage: int) -> tuple[int, int]:
        """Return the most bytes that this stage holds of activations and messages: as the program implies, and as measured."""
        chunks = learn_chunks([(i, change) for i, change, _ in self.batch.held])
        return max(bytes_in_flight(self.program.instructions[stage], chunks), default=0), self.batch.most_held


def memory_table(ranks: Sequence[Mapping[str, tuple[int, int]]]) -> str:
    """Format the predicted and measured bytes of each component in MiB, a line per rank."""
    rows = {"rank": [*ranks[0], "  (MiB, predicted / measured)"]}
    for rank, row in enumerate(ranks):
        rows[str(rank)] = [f"{predicted / 2**20:.1f} / {measured / 2**20:.1f}" for predicted, measured in row.values()]
    return format_table(rows, 22)


def held_lines(ranks: Sequence[Sequence[tuple[tuple[int, ...], str, int]]]) -> list[str]:
    """Format what layers hold of a micro-batch under each policy, a line per rank. ranks: as Reports.layer_memory returns."""
    lines = []
    for rank, runs in enumerate(ranks):
        found: dict[str, list[int]] = {}
        for layers, policy, nbytes in runs:
            number, total = found.setdefault(policy, [0, 0])
            found[policy] = [number + len(layers), total + nbytes]
        parts = [f"{number} layers {policy} {total / 2**20:.1f}" for policy, (number, total) in found.items()]
        lines += [f"rank {rank} holds of a micro-batch, MiB: {', '.join(parts)}"] if parts else []
    return lines


def phase_table(step: int, ranks: Sequence[Mapping[str, Mapping[str, int]]]) -> str:
    """Format each kind of memory at the end of each phase of a step in MiB: mean and max over ranks."""
    kinds = list(next(iter(ranks[0].values())))
    rows = {f"step {step}, MiB": [*kinds, "  (mean / max over ranks)"]}
    for phase in ranks[0]:
        values = {kind: [rank[phase][kind] / 2**20 for rank in ranks] for kind in kinds}
        rows[phase] = [f"{mean(v):.1f} / {max(v):.1f}" for v in values.values()]
    return format_table(rows, 22)


def format_table(rows: Mapping[str, Sequence[str]], width: int) -> str:
    """Format rows of cells, right-aligned in columns of `width` characters, after their names."""
    first = max(map(len, rows)) + 2
    return "\n".join(name.ljust(first) + "".join(cell.rjust(width) for cell in cells) for name, cells in rows.items())
