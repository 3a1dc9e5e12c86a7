"""Executor: runs a rank's list of instructions, with one small method for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.activity import POSITION
from parallel3d.autograd.entry import Entry
from parallel3d.comm.structures import Structure, describe
from parallel3d.errors import execution_error, first_line_of, note_place
from parallel3d.optim.precision import Precision
from parallel3d.pipe.blocks import BlockUnits
from parallel3d.pipe.messages import Messages, Receipt
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.units import LayerUnits
from parallel3d.rng import EnterLayer, same_stream
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program, reduces_after
from parallel3d.schedule.lifetimes import lifetimes_before
from parallel3d.zero.reducer import GradientReducer

# A micro-batch on a chunk: (chunk, micro-batch)
Cell = tuple[int, int]
# Makes the context in which an instruction runs
Recorder = Callable[[Instruction], AbstractContextManager[None]]
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one step on this rank.

    - micro_batches: (inputs, labels) of each; empty on a rank that holds neither the first nor the last chunk.
    - signatures: one for each micro-batch, the same on all ranks of the pipeline.
    - loss_weight: the weight of one micro-batch in the batch's mean. loss_scale: the factor of all gradients.
    - streams: for each micro-batch, the function that enters the random stream of a layer; empty in evaluation.
    - replays: whether CUDA graphs are replayed, if there are any; captures: whether they may be captured.
    """

    micro_batches: Sequence[tuple[Any, Any]]
    signatures: Sequence[int]
    training: bool
    loss_weight: float = 1.0
    loss_scale: float = 1.0
    keep_outputs: bool = False
    compute_loss: bool = True
    streams: Sequence[EnterLayer] = ()
    replays: bool = False
    captures: bool = False


@dataclass
class BatchResult:
    """Results by micro-batch, on the stage of the last chunk; empty elsewhere.

    - losses: detached from the graph. outputs: empty unless Batch.keep_outputs.
    - counts: empty unless the loss function returned (sum, count).
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass
class InFlight:
    """State saved by a forward for its backward.

    - entry: receives the gradients of the inputs; None on the first chunk.
    - edges: where the backward begins, for the output's tensors that require grad; structure: the output's, None on the last
      chunk. The tensors themselves are freed once they are sent, unless the backward needs them.
    - kept: an output that the next chunk, of this rank, uses: it counts for this one.
    """

    entry: Entry | None
    edges: list[GradientEdge]
    structure: Structure | None
    kept: list[Tensor] = field(default_factory=list)


class _Task(NamedTuple):
    """An instruction at its position in the list, with the methods that wait for its inputs and that run it."""

    position: int
    instruction: Instruction
    wait: Callable[[Instruction], None] | None
    run: Callable[[Instruction], None]


class Executor:
    """Runs batches by this rank's list of instructions. It holds one batch's activations and gradients in flight.

    - gather: launches the gather of a chunk's weights.
    - precision: floating-point inputs of the model are cast to the dtype of its weights.
    - on_loss: called with the loss of each micro-batch.
    - units: gathers and releases sharded weights; None if there are none.
    """

    def __init__(
        self,
        module: PipelineModule,
        messages: Messages,
        reducer: GradientReducer,
        gather: Callable[[int], None],
        precision: Precision,
        on_loss: Callable[[Tensor], None] | None = None,
        units: LayerUnits | BlockUnits | None = None,
    ):
        self._module, self._units = module, units
        self._messages = messages
        self._reducer = reducer
        self._precision = precision
        self._on_loss = on_loss
        self._last_chunk = len(module.placement) - 1
        self._run: dict[Op, Callable[..., None]] = {
            Op.LOAD_MICRO_BATCH: self._load_micro_batch,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._receive_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECV_GRADIENT: self._receive_gradient,
            Op.GATHER_PARAMS: lambda i: gather(i.chunk),
            Op.REDUCE_REPLICAS: self._reduce_replicas,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
        }
        # Waiting is timed separately from running.
        self._wait: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._wait_for_inputs,
            Op.BACKWARD: self._wait_for_gradients,
            Op.BACKWARD_INPUT: self._wait_for_gradients,
        }
        self._task_list: tuple[Program | None, list[_Task]] = (None, [])
        self._clear()

    def _clear(self) -> None:
        """Forget everything in flight."""
        self._inputs: dict[Cell, tuple[Any, Entry | None]] = {}
        self._labels: dict[int, Any] = {}
        self._arriving: dict[Cell, Receipt] = {}
        self._outputs: dict[Cell, tuple[Structure, list[Tensor]]] = {}
        self._in_flight: dict[Cell, InFlight] = {}
        self._arriving_gradients: dict[Cell, Receipt] = {}
        self._gradients: dict[Cell, list[Tensor]] = {}

    def run(
        self, program: Program, owners: Sequence[tuple[int, ...]], batch: Batch, record: Recorder, wait: Recorder
    ) -> BatchResult:
        """Run this rank's list.

        - owners: the owners of each REDUCE_REPLICAS bucket.
        - record: wraps the run of each instruction; wait: wraps the wait for its inputs.

        Raises ExecutionError with one line that names rank, stage, micro-batch and instruction. The error is also an instance
        of the type of the exception that caused it.
        """
        self._batch, self._result, self._owners = batch, BatchResult(), owners
        tasks = self._tasks(program)
        now = self._module.groups.activity.start_program(program.num_micro_batches, batch.training)
        self._messages.begin(batch.signatures, batch.training)
        try:
            if self._units is not None:
                self._units.begin(program.instructions[self._module.stage_id])
            with torch.set_grad_enabled(batch.training):
                for position, i, wait_for, run in tasks:
                    now[POSITION] = position
                    if wait_for is not None:
                        with wait(i):
                            wait_for(i)
                    with record(i):
                        run(i)
        except Exception as error:
            self._clear()
            self._messages.abort()
            if self._units is not None:
                # A gather may fail because a peer is gone: the error that is raised here says more.
                with suppress(Exception):
                    self._units.abort()
            i = program.instructions[self._module.stage_id][now[POSITION]]
            place = f"rank {self._module.groups.rank}, stage {self._module.stage_id}, micro-batch {i.micro_batch}"
            raise execution_error(f"{place}, instruction {i}: {first_line_of(error)}", error) from error
        self._messages.finish()
        self._clear()
        return self._result

    def _tasks(self, program: Program) -> list[_Task]:
        """Return this rank's tasks; they are made again only for another program."""
        if self._task_list[0] is not program:
            instructions = program.instructions[self._module.stage_id]
            tasks, layers = [], 0
            for k, i in enumerate(instructions):
                if i.op is Op.REDUCE_GRADS or i.run is not None:
                    continue  # launched by the backward before it, or by the compute after it
                run = self._run[i.op]
                if i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                    run = partial(run, reduces=reduces_after(instructions, k))
                if self._units is not None and i.op in COMPUTE_OPS:
                    run = partial(self._units.run, run, lifetimes_before(instructions, k), layers)
                    layers += len(self._module.calls.runs(i.chunk, i.op))
                tasks.append(_Task(k, i, self._wait.get(i.op), run))
            self._task_list = program, tasks
        return self._task_list[1]

    def _key(self, chunk: int, micro_batch: int) -> tuple[int, int, bool]:
        return chunk, self._batch.signatures[micro_batch], self._batch.training

    def _stage(self, chunk: int) -> int:
        return self._module.placement[chunk]

    def _is_local(self, chunk: int) -> bool:
        return self._stage(chunk) == self._module.stage_id

    def _load_micro_batch(self, i: Instruction) -> None:
        inputs, labels = self._batch.micro_batches[i.micro_batch]
        place = partial(_to_device, device=self._module.device)
        if i.chunk == 0:
            self._inputs[0, i.micro_batch] = self._precision.cast(tree_map(place, inputs)), None
        if i.chunk == self._last_chunk:
            self._labels[i.micro_batch] = tree_map(place, labels)

    def _receive_activation(self, i: Instruction) -> None:
        source = i.chunk - 1
        key = self._key(source, i.micro_batch)
        receipt = self._messages.receive_activation(key, self._stage(source))
        self._arriving[i.chunk, i.micro_batch] = receipt

    def _forward(self, i: Instruction) -> None:
        cell = (i.chunk, i.micro_batch)
        inputs, entry = self._inputs.pop(cell)
        with self._precision.autocasting(self._module.device):
            stream = self._batch.streams[i.micro_batch] if self._batch.streams else same_stream
            output = self._module.forward_chunk(i.chunk, inputs, stream)
        if i.chunk == self._last_chunk:
            self._finish_micro_batch(i, output, entry)
            return
        structure, tensors = describe(output)
        self._outputs[cell] = (structure, [t.detach() for t in tensors])
        if self._batch.training:
            edges = [get_gradient_edge(t) for t in tensors if t.requires_grad]
            self._in_flight[cell] = InFlight(entry, edges, structure, tensors if self._is_local(i.chunk + 1) else [])

    def _wait_for_inputs(self, i: Instruction) -> None:
        """Receive the chunk's input, the output of the chunk before."""
        cell, source = (i.chunk, i.micro_batch), i.chunk - 1
        if i.chunk == 0:
            return  # loaded by LOAD_MICRO_BATCH
        if self._is_local(source):
            structure, tensors = self._outputs.pop((source, i.micro_batch))
        else:
            structure, tensors = self._messages.input_of(self._arriving.pop(cell), self._stage(source))
        self._enter(cell, structure, tensors)

    def _enter(self, cell: Cell, structure: Structure, tensors: list[Tensor]) -> None:
        """Build a chunk's input, and the entry of its tensors that require grad."""
        specs = zip(tensors, structure.tensors, strict=True)
        entry = Entry([tensor for tensor, spec in specs if spec.requires_grad])
        self._inputs[cell] = structure.rebuild(tensors), entry

    def _finish_micro_batch(self, i: Instruction, output: Any, entry: Entry | None) -> None:
        m = i.micro_batch
        if self._batch.keep_outputs:
            self._result.outputs[m] = output
        if not self._batch.compute_loss:
            return
        loss, count = self._loss(output, self._labels.pop(m))
        if self._on_loss is not None:
            self._on_loss(loss)
        self._result.losses[m] = loss.detach()
        if count is not None:
            self._result.counts[m] = count
        if self._batch.training:
            if not loss.requires_grad and any(p.requires_grad for p in self._module.parameters()):
                raise ValueError("the loss requires no gradient; look for detach and no_grad in layers and loss_fn")
            edges = [get_gradient_edge(loss)] if loss.requires_grad else []
            factor = self._batch.loss_weight * self._batch.loss_scale
            self._in_flight[i.chunk, m] = InFlight(entry, edges, None)
            self._gradients[i.chunk, m] = [loss_gradient(loss, factor) for _ in edges]

    def _loss(self, output: Any, labels: Any) -> tuple[Tensor, Tensor | None]:
        """Return (loss, count), see split_loss."""
        loss_fn = self._module.loss_fn
        if loss_fn is None:
            return split_loss(output, "it is the last layer's output, as PipelineModule has no loss_fn: give it one")
        try:
            with self._precision.autocasting(self._module.device):
                return split_loss(loss_fn(output, labels))
        except Exception as error:
            other = next((leaf for leaf in tree_leaves(labels) if not isinstance(leaf, Tensor)), None)
            hint = "" if other is None else f", whose labels hold a {type(other).__name__}, no tensor"
            if isinstance(output, Tensor) and isinstance(labels, Tensor):
                hint = f" of an output {list(output.shape)} and labels {list(labels.shape)}"
            note_place(error, f"loss_fn {getattr(loss_fn, '__name__', type(loss_fn).__name__)}{hint}")
            raise

    def _send_activation(self, i: Instruction) -> None:
        structure, tensors = self._outputs.pop((i.chunk, i.micro_batch))
        self._messages.send_activation(self._key(i.chunk, i.micro_batch), structure, tensors, self._stage(i.chunk + 1))

    def _receive_gradient(self, i: Instruction) -> None:
        cell, key = (i.chunk, i.micro_batch), self._key(i.chunk, i.micro_batch)

        def structure() -> Structure | None:
            done = self._in_flight.get(cell)
            return done.structure if done is not None else self._messages.known_structure(key)

        receipt = self._messages.receive_gradient(structure, self._stage(i.chunk + 1))
        self._arriving_gradients[cell] = receipt

    def _wait_for_gradients(self, i: Instruction) -> None:
        receipt = self._arriving_gradients.pop((i.chunk, i.micro_batch), None)
        if receipt is not None:
            self._gradients[i.chunk, i.micro_batch] = self._messages.wait(receipt, self._stage(i.chunk + 1))

    def _backward(self, i: Instruction, reduces: Sequence[Instruction]) -> None:
        with self._reducer.backward(reduces):
            self._run_autograd(i)

    def _backward_input(self, i: Instruction) -> None:
        with self._reducer.backward_input((i.chunk, i.micro_batch)):
            self._run_autograd(i)

    def _backward_weight(self, i: Instruction, reduces: Sequence[Instruction]) -> None:
        self._reducer.backward_weight((i.chunk, i.micro_batch), reduces)

    def _run_autograd(self, i: Instruction) -> None:
        cell = (i.chunk, i.micro_batch)
        gradients = self._gradients.pop(cell)
        done = self._in_flight.pop(cell)
        if done.edges:
            torch.autograd.backward(done.edges, gradients)
        if done.entry is not None:
            self._gradients[i.chunk - 1, i.micro_batch] = done.entry.gradients()

    def _send_gradient(self, i: Instruction) -> None:
        gradients = self._gradients.pop((i.chunk - 1, i.micro_batch))
        self._messages.send_gradient(gradients, self._stage(i.chunk - 1))

    def _reduce_replicas(self, i: Instruction) -> None:
        assert i.bucket is not None
        owners = self._owners[i.bucket]
        self._reducer.reduce_replicas(owners, i.bucket - self._owners.index(owners))


def _to_device(leaf: Any, device: torch.device) -> Any:
    """Copy a tensor to `device` without making the host wait for the work enqueued before; return anything else as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    if device.type == "cuda" and leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.is_pinned():
        # A copy from pageable memory makes the host wait until the stream reaches it. PyTorch caches pinned memory.
        leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    return leaf.to(device, non_blocking=True)


def loss_gradient(loss: Tensor, factor: float) -> Tensor:
    """Return the gradient with which a backward begins; inf, like any overflow, if `factor` exceeds the loss's dtype."""
    return torch.full_like(loss, factor, dtype=torch.promote_types(loss.dtype, torch.float32)).to(loss.dtype)


def split_loss(loss: Any, remedy: str = "average it in loss_fn") -> tuple[Tensor, Tensor | None]:
    """Split the result of a loss function into (loss, count): a mean, whose count is None, or (sum, count).

    Raises ValueError unless each is a tensor of one element (the count may be a number).
    """
    total, count = loss if isinstance(loss, (tuple, list)) and len(loss) == 2 else (loss, None)
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(f"the loss must be a tensor with one element, or (sum, count), not {shape}; {remedy}")
    if count is None:
        return total, None
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"the count of a loss (sum, count) must be one number, not {list(count.shape)}")
    if isinstance(count, Tensor) and count.device == total.device:
        return total, count.detach().to(torch.float64).reshape(())
    # A kernel writes a number of the host: a copy would make the host wait for everything that is enqueued.
    return total, torch.full((), float(count), dtype=torch.float64, device=total.device)


def nest(outer: Recorder, inner: Recorder) -> Recorder:
    """Nest two recorders."""

    @contextmanager
    def record(i: Instruction) -> Iterator[None]:
        with outer(i), inner(i):
            yield

    return record


def no_record(_: Instruction) -> AbstractContextManager[None]:
    """Record nothing."""
    return _NOTHING
