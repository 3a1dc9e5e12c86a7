"""What the instructions of a batch hold of memory: the allocator's count on CUDA, live storages on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.schedule.instructions import Instruction, Program
from parallel3d.schedule.memory import bytes_in_flight, learn_chunks


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside made and that are still alive. For the CPU.

    Storages that were there before, such as those of weights, don't count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
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
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class MemoryRecorder:
    """Records how much memory is held beyond what was there at its start: by instructions, or at most.

    in_transit: bytes that sent messages still hold, which leave at no certain instruction and count for none. held:
    (instruction, bytes it added with what was waited for just before, bytes held after it); peak: the most at any time,
    with what operations need for themselves, and what is in transit.
    """

    def __init__(self, device: torch.device, in_transit: Callable[[], int] = lambda: 0):
        self._in_transit = in_transit
        self.held: list[tuple[Instruction, int, int]] = []
        self.peak = 0
        self._device = device
        self._storages = LiveStorages()
        self.start = self._before = 0

    @property
    def most_held(self) -> int:
        """The most after any instruction."""
        return max((held for _, _, held in self.held), default=0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside."""
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
        """Measure what runs inside as `instruction`."""
        yield
        now = self._now()
        self.held.append((instruction, now - self._before, now))
        self._before = now

    def _now(self) -> int:
        on_cuda = self._device.type == "cuda"
        held = torch.cuda.memory_allocated(self._device) - self.start if on_cuda else self._storages.nbytes
        return held - self._in_transit()


@dataclass(frozen=True)
class MemoryProfile:
    """One training batch: its program, what its instructions hold, and what the optimizer's step needs."""

    program: Program
    batch: MemoryRecorder
    step: MemoryRecorder

    def activations(self, stage: int) -> tuple[int, int]:
        """The most bytes that this stage holds of activations and messages: as the program has it, and as measured."""
        chunks = learn_chunks([(i, change) for i, change, _ in self.batch.held])
        return max(bytes_in_flight(self.program, stage, chunks), default=0), self.batch.most_held
