"""Executor that launches each compute instruction of a rank with one call, by a CUDA graph.

Every forward, backward, BACKWARD_INPUT and BACKWARD_WEIGHT of a program is captured by itself, in the program's order, into one
pool of memory. Replays keep that order, so tensors share memory over instructions as they do without graphs. What enters or
leaves an instruction (inputs, labels, gradients, losses) is copied; messages, reductions and casts of weights run between the
graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.structures import Structure, describe
from parallel3d.errors import ExecutionError, first_line_of, note_place
from parallel3d.pipe.cuda_graphs import REMEDY, CudaGraphs
from parallel3d.pipe.executor import Batch, BatchResult, Cell, Executor, InFlight, Recorder, loss_gradient
from parallel3d.schedule.instructions import Instruction, Op, Program

# Times that a program runs before it is captured.
WARM_UP = 2
# Number of shapes after which a warm-up starts over: inputs with a value that always changes have a new signature each time.
_MOST_SHAPES = 4096


@dataclass
class _WarmUp:
    """Runs of one program in a row, in which layers are compiled, and kernels loaded and tuned, before it is captured.

    shapes: signatures of the micro-batches that have run.
    """

    program: Program | None = None
    runs: int = 0
    shapes: set[int] = field(default_factory=set)


class _Mode(Enum):
    """How a batch runs: without graphs, with those that fit, or capturing all."""

    EAGER = auto()
    REPLAY = auto()
    CAPTURE = auto()


@dataclass
class _CapturedWork:
    """Captured work of an instruction.

    - inputs, outputs: tensors at the addresses where the graph reads and writes. They don't keep this memory, which graphs
      that are captured later use, too.
    - given: structures of a forward's inputs and labels. structure: of its output.
    - held: parameters whose accumulators hold a gradient before it; arrives: those that hold one from then on.
    - drawing: layers that draw random numbers; None before the first replay.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: list[Tensor]
    held: set[nn.Parameter]
    arrives: set[nn.Parameter]
    given: Any = None
    structure: Structure | None = None
    drawing: Sequence[int] | None = None


class GraphedExecutor(Executor):
    """Executor that captures a training program at its third run, and replays it from then on.

    A micro-batch of other shapes runs without graphs, and so does a program of another number of micro-batches until it runs
    three times in a row. If no micro-batch has the shapes that were captured at its place any more, or parameters are frozen,
    or trained again, it is captured again. Only shapes that have run before are captured: for others, layers may still have to
    be compiled.

    prepare: called with the modules of a chunk in each step, outside of graphs: it computes from weights what stays in a step.
    """

    def __init__(self, graphs: CudaGraphs, prepare: Callable[[Iterable[nn.Module]], None], *args: Any, **kwargs: Any):
        self._graphs, self._prepare = graphs, prepare
        self._mode, self._warm_up, self._has_released = _Mode.EAGER, _WarmUp(), False
        self.forget()
        super().__init__(*args, **kwargs)
        for op in (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
            self._run[op] = partial(self._graphed_backward, self._run[op])

    def forget(self) -> None:
        """Drop the graphs, because the memory that they read or write is about to move, or other work is to be captured."""
        self._works: dict[Instruction, _CapturedWork] = {}
        self._captured: Program | None = None
        self._shapes: Sequence[int] = ()  # signatures of the micro-batches that were captured
        self._trained: list[tuple[nn.Parameter, bool]] = []  # whether each parameter was when it was captured

    def _clear(self) -> None:
        super()._clear()
        self._has_others = False  # whether a micro-batch of other shapes has run in this batch
        self._received: dict[Cell, tuple[Structure, list[Tensor]]] = {}
        self._graphed: set[Cell] = set()
        self._prepared: set[int] = set()

    def run(
        self, program: Program, owners: Sequence[tuple[int, ...]], batch: Batch, record: Recorder, wait: Recorder
    ) -> BatchResult:
        """Run this rank's list, see Executor.run."""
        self._mode = self._mode_of(program, batch)
        if self._mode is _Mode.CAPTURE:
            self.forget()
            self._trained = [(p, p.requires_grad) for p in self._module.parameters()]
            self._graphs.begin()
        try:
            result = super().run(program, owners, batch, record, wait)
        except Exception:
            self.forget()
            raise
        if self._mode is _Mode.CAPTURE:
            self._captured, self._shapes = program, batch.signatures
        elif batch.captures and not self._has_released:
            self._graphs.release()  # the optimizer is about to allocate its state
            self._has_released = True
        return result

    def _mode_of(self, program: Program, batch: Batch) -> _Mode:
        if not batch.replays:
            return _Mode.EAGER
        if any(p.requires_grad is not trained for p, trained in self._trained):
            self.forget()
        shapes = set(batch.signatures)
        if program is self._captured and any(map(eq, batch.signatures, self._shapes)):
            self._warm_up = _WarmUp()
            return _Mode.REPLAY
        if not batch.captures:
            return _Mode.EAGER
        if program is not self._warm_up.program or len(self._warm_up.shapes) > _MOST_SHAPES:
            self._warm_up = _WarmUp(program)
        if self._warm_up.runs >= WARM_UP and shapes <= self._warm_up.shapes:
            self._warm_up = _WarmUp()
            return _Mode.CAPTURE
        self._warm_up.runs += 1
        self._warm_up.shapes |= shapes
        return _Mode.EAGER

    def _enter(self, cell: Cell, structure: Structure, tensors: list[Tensor]) -> None:
        if self._mode is _Mode.EAGER:
            super()._enter(cell, structure, tensors)
        else:
            self._received[cell] = structure, tensors

    def _forward(self, i: Instruction) -> None:
        if self._mode is _Mode.EAGER:
            return super()._forward(i)
        cell, is_last = (i.chunk, i.micro_batch), i.chunk == self._last_chunk
        self._wait_for_weights(i.chunk)
        inputs = self._received.pop(cell) if i.chunk else describe(self._inputs.pop(cell)[0])
        labels = describe(self._labels.pop(i.micro_batch) if is_last else None)
        work = self._works.get(i)
        if self._mode is _Mode.CAPTURE:
            work = self._capture_forward(i, inputs, labels)
        elif work is None or work.given != (inputs[0], labels[0]):
            self._has_others = True
            self._give(cell, inputs, labels)
            return super()._forward(i)
        self._graphed.add(cell)
        results = self._replay(i, work, [*inputs[1], *labels[1]])
        if self._mode is _Mode.REPLAY:
            self._in_flight[cell] = InFlight(None, [], work.structure)
        if not is_last:
            assert work.structure is not None
            self._outputs[cell] = work.structure, results
            return None
        loss, *count = results
        self._result.losses[i.micro_batch] = loss
        if count:
            self._result.counts[i.micro_batch] = count[0]
        # Outside of the graph, because the loss scale changes.
        self._gradients[cell] = [loss_gradient(loss, self._batch.loss_weight * self._batch.loss_scale)]
        return None

    def _wait_for_weights(self, chunk: int) -> None:
        for calls, _ in self._module.calls.groups(chunk):
            for call in calls:
                if call.module is not None:
                    self._module.wait_for_weights(call.module)
                    if chunk not in self._prepared:
                        self._prepare(call.module.modules())
        self._prepared.add(chunk)

    def _give(self, cell: Cell, inputs: tuple[Structure, list[Tensor]], labels: tuple[Structure, list[Tensor]]) -> None:
        """Put a forward's inputs and labels where `_forward` takes them from."""
        if cell[0] == 0:
            self._inputs[cell] = inputs[0].rebuild(inputs[1]), None
        else:
            super()._enter(cell, *inputs)
        if cell[0] == self._last_chunk:
            self._labels[cell[1]] = labels[0].rebuild(labels[1])

    def _capture_forward(
        self, i: Instruction, inputs: tuple[Structure, list[Tensor]], labels: tuple[Structure, list[Tensor]]
    ) -> _CapturedWork:
        cell, number, m = (i.chunk, i.micro_batch), len(inputs[1]), i.micro_batch
        structure: Structure | None = None

        def run(static: list[Tensor]) -> list[Tensor]:
            nonlocal structure
            self._give(cell, (inputs[0], static[:number]), (labels[0], static[number:]))
            super(GraphedExecutor, self)._forward(i)
            if i.chunk == self._last_chunk:
                return [self._result.losses[m], *([self._result.counts[m]] if m in self._result.counts else [])]
            structure, outputs = self._outputs.pop(cell)
            return outputs

        work = self._capture(i, [*inputs[1], *labels[1]], run)
        work.given, work.structure = (inputs[0], labels[0]), structure
        return work

    def _graphed_backward(self, run: Callable[..., None], i: Instruction, **reduces: Sequence[Instruction]) -> None:
        """Run a backward by a graph, if the forward was one.

        run: runs it without a graph. reduces: the argument of that name, which `run` takes unless it is a BACKWARD_INPUT.
        """
        cell, before = (i.chunk, i.micro_batch), (i.chunk - 1, i.micro_batch)
        if cell not in self._graphed:
            return run(i, **reduces)
        passes_on = i.op is not Op.BACKWARD_WEIGHT  # gradients of the next chunk to the previous one
        tensors = self._gradients.pop(cell) if passes_on else []

        def backward(static: list[Tensor]) -> list[Tensor]:
            if passes_on:
                self._gradients[cell] = static
            run(i, **dict.fromkeys(reduces, ()))
            return self._gradients.pop(before, []) if passes_on else []

        work = self._capture(i, tensors, backward) if self._mode is _Mode.CAPTURE else self._works[i]
        self._in_flight.pop(cell, None)
        results = self._replay(i, work, tensors)
        if passes_on and i.chunk:
            self._gradients[before] = results
        for launched in reduces.values():
            self._reducer.launch(launched)
        return None

    def _layers(self, chunk: int) -> list[int]:
        return [call.layer for calls, _ in self._module.calls.groups(chunk) for call in calls]

    def _capture(
        self, i: Instruction, tensors: Sequence[Tensor], run: Callable[[list[Tensor]], list[Tensor]]
    ) -> _CapturedWork:
        """Capture `run`, which gets tensors like these at addresses of the graph, and returns its results."""
        sink, batch, layers = self._reducer.sink, self._batch, self._layers(i.chunk)
        touched = sink.touched()
        self._batch = replace(batch, streams=[self._graphs.enter] * len(batch.streams))
        try:
            with self._graphs.capture(layers) as graph:
                static = [torch.empty_like(tensor.detach()) for tensor in tensors]
                outputs = run(static)
        except Exception as error:
            raise ExecutionError(f"it can't be captured as a CUDA graph: {first_line_of(error)}; {REMEDY}") from error
        finally:
            self._batch = batch
        # Borrowed also because autograd watches the version counters of the tensors that it saves: replays change them.
        inputs, outputs = (list(map(_borrowed, tensors)) for tensors in (static, outputs))
        work = self._works[i] = _CapturedWork(graph, inputs, outputs, touched, sink.touched() - touched)
        return work

    def _replay(self, i: Instruction, work: _CapturedWork, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run captured work on these tensors, and return copies of its outputs: the next graphs reuse their memory.

        Raises ExecutionError if micro-batches of other shapes have given gradients to other parameters than those it was
        captured after: a graph always adds to an accumulator, or always overwrites it.
        """
        sink = self._reducer.sink
        if self._has_others and sink.touched() != work.held:
            raise ExecutionError(
                f"a micro-batch of other shapes has given gradients to other parameters than a CUDA graph expects; {REMEDY}"
            )
        with torch.no_grad():
            if work.inputs:
                torch._foreach_copy_(work.inputs, list(tensors))
        drawing = self._layers(i.chunk) if work.drawing is None else work.drawing
        for layer in drawing:
            self._batch.streams[i.micro_batch](layer)
            self._graphs.seed(layer)
        try:
            if (kernel := self._module.groups.model.all_reduce_kernel) is not None:
                kernel.raise_if_failed()
            work.graph.replay()
        except Exception as error:
            note_place(error, f"the CUDA graph of layers {', '.join(map(str, self._layers(i.chunk)))}")
            raise
        if work.drawing is None:
            work.drawing = self._graphs.drew(drawing)
        sink.replayed(work.arrives)
        return [output.clone() for output in work.outputs]


def _borrowed(tensor: Tensor) -> Tensor:
    """Return a tensor at the same memory, which does not keep it."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return tensor.new_empty(0).set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
