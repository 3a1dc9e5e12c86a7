"""Runs a rank's list of instructions: one small method for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel3d.activity import POSITION
from parallel3d.autograd.entry import Entry
from parallel3d.errors import execution_error
from parallel3d.optim.precision import Precision
from parallel3d.pipe.data import to_device
from parallel3d.pipe.messages import Messages, Receipt, Structure, describe
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer, same_stream
from parallel3d.schedule.instructions import Instruction, Op, Program, reduces_behind
from parallel3d.zero.reducer import GradientReducer

Place = tuple[int, int]  # (chunk, micro-batch)
Recorder = Callable[[Instruction], AbstractContextManager[None]]
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one step, as this rank sees them.

    micro_batches: (inputs, labels) each, empty on a rank that holds neither the first nor the last chunk; signatures:
    one a micro-batch, the same on all ranks of the pipeline; loss_weight: of one micro-batch in the batch's mean;
    loss_scale: of the gradients; streams: the random stream of each micro-batch's layers, empty in evaluation.
    """

    micro_batches: Sequence[tuple[Any, Any]]
    signatures: Sequence[int]
    training: bool
    loss_weight: float = 1.0
    loss_scale: float = 1.0
    keep_outputs: bool = False
    compute_loss: bool = True
    streams: Sequence[EnterLayer] = ()


@dataclass
class BatchResult:
    """On the stage of the last chunk: each micro-batch's loss, detached, and output where asked for; else empty.

    counts: where the loss function returned (sum, count), these counts.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


@dataclass
class _InFlight:
    """What a forward leaves for its backward: where its inputs' gradients arrive, outputs that give one."""

    entry: Entry | None
    outputs: list[Tensor]
    structure: Structure | None


class _Task(NamedTuple):
    """What is done at one position of a list, settled before it first runs: what to wait for, then what to run."""

    position: int
    instruction: Instruction
    wait: Callable[[Instruction], None] | None
    run: Callable[[Instruction], None]


class Executor:
    """Holds the activations and gradients in flight of one batch, and nothing between batches.

    gather: starts to gather a chunk's weights; precision: its weights' dtype is that of the model's floating-point inputs.
    look_at_loss: called with each micro-batch's.
    """

    def __init__(
        self,
        module: PipelineModule,
        messages: Messages,
        reducer: GradientReducer,
        gather: Callable[[int], None],
        precision: Precision,
    ):
        self._module = module
        self._messages = messages
        self._reducer = reducer
        self._gather = gather
        self._precision = precision
        self.look_at_loss: Callable[[Tensor], None] = lambda loss: None
        self._last_chunk = len(module.placement) - 1
        self._run: dict[Op, Callable[[Instruction], None]] = {
            Op.LOAD_MICRO_BATCH: self._load_micro_batch,
            Op.FORWARD: self._forward,
            Op.SEND_ACTIVATION: self._send_activation,
            Op.RECV_ACTIVATION: self._receive_activation,
            Op.SEND_GRADIENT: self._send_gradient,
            Op.RECV_GRADIENT: self._receive_gradient,
            Op.GATHER_PARAMS: self._gather_params,
            Op.REDUCE_REPLICAS: self._reduce_replicas,
        }
        self._run_backward: dict[Op, Callable[..., None]] = {
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
        }
        # What an instruction waits for is no part of the time it takes.
        self._wait: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self._wait_for_inputs,
            Op.BACKWARD: self._wait_for_gradients,
            Op.BACKWARD_INPUT: self._wait_for_gradients,
        }
        self._planned: tuple[Program | None, list[_Task]] = (None, [])
        self._clear()

    def _clear(self) -> None:
        self._inputs: dict[Place, Any] = {}
        self._entries: dict[Place, Entry] = {}
        self._labels: dict[int, Any] = {}
        self._arriving: dict[Place, Receipt] = {}
        self._outputs: dict[Place, tuple[Structure, list[Tensor]]] = {}
        self._in_flight: dict[Place, _InFlight] = {}
        self._arriving_gradients: dict[Place, Receipt] = {}
        self._gradients: dict[Place, list[Tensor]] = {}

    def run(
        self, program: Program, owners: Sequence[tuple[int, ...]], batch: Batch, record: Recorder, wait: Recorder
    ) -> BatchResult:
        """Run this rank's list. owners: of each REDUCE_REPLICAS bucket; record: wraps each instruction; wait: its wait.

        Raises ExecutionError, in one line with rank, stage, micro-batch and instruction, from whatever was raised, and of
        that type too.
        """
        self._batch, self._result, self._owners = batch, BatchResult(), owners
        tasks = self._plan(program)
        now = self._module.groups.activity.start_program(program.num_micro_batches, batch.training)
        self._messages.begin(batch.signatures, batch.training)
        try:
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
            self._messages.break_off()
            failed = program.instructions[self._module.stage_id][now[POSITION]]
            raise execution_error(self._explain(failed, error), error) from error
        self._messages.finish()
        self._clear()
        return self._result

    def _plan(self, program: Program) -> list[_Task]:
        """This rank's list, settled once for as long as the program stays the same."""
        if self._planned[0] is not program:
            instructions = program.instructions[self._module.stage_id]
            # REDUCE_GRADS are launched by the backward they stand behind.
            places = [(k, i) for k, i in enumerate(instructions) if i.op is not Op.REDUCE_GRADS]
            tasks = [_Task(k, i, self._wait.get(i.op), self._method(i, instructions, k)) for k, i in places]
            self._planned = program, tasks
        return self._planned[1]

    def _method(
        self, i: Instruction, instructions: Sequence[Instruction], position: int
    ) -> Callable[[Instruction], None]:
        if i.op in self._run_backward:
            return partial(self._run_backward[i.op], reduces=reduces_behind(instructions, position))
        return self._run[i.op]

    def _explain(self, i: Instruction, error: Exception) -> str:
        first_line = next(iter(str(error).splitlines()), "")
        return (
            f"rank {self._module.groups.rank}, stage {self._module.stage_id}, micro-batch {i.micro_batch}, "
            f"instruction {i}: {type(error).__name__}: {first_line}"
        )

    def _key(self, chunk: int, micro_batch: int) -> tuple[int, int, bool]:
        return chunk, self._batch.signatures[micro_batch], self._batch.training

    def _stage(self, chunk: int) -> int:
        return self._module.placement[chunk]

    def _is_local(self, chunk: int) -> bool:
        return self._stage(chunk) == self._module.stage_id

    def _load_micro_batch(self, i: Instruction) -> None:
        inputs, labels = self._batch.micro_batches[i.micro_batch]
        if i.chunk == 0:
            self._inputs[0, i.micro_batch] = self._precision.cast(tree_map(self._to_device, inputs))
        if i.chunk == self._last_chunk:
            self._labels[i.micro_batch] = tree_map(self._to_device, labels)

    def _to_device(self, leaf: Any) -> Any:
        return to_device(leaf, self._module.device) if isinstance(leaf, Tensor) else leaf

    def _receive_activation(self, i: Instruction) -> None:
        source = i.chunk - 1
        key = self._key(source, i.micro_batch)
        receipt = self._messages.receive_activation(key, self._stage(source))
        self._arriving[i.chunk, i.micro_batch] = receipt

    def _forward(self, i: Instruction) -> None:
        place = (i.chunk, i.micro_batch)
        inputs, entry = self._inputs.pop(place), self._entries.pop(place, None)
        with self._precision.autocasting(self._module.device):
            stream = self._batch.streams[i.micro_batch] if self._batch.streams else same_stream
            output = self._module.forward_chunk(i.chunk, inputs, stream)
        if i.chunk == self._last_chunk:
            self._finish_micro_batch(i, output, entry)
            return
        structure, tensors = describe(output)
        self._outputs[place] = (structure, [t.detach() for t in tensors])
        if self._batch.training:
            outputs = [t for t in tensors if t.requires_grad]
            self._in_flight[place] = _InFlight(entry, outputs, structure)

    def _wait_for_inputs(self, i: Instruction) -> None:
        """Make the chunk's input, and the entry of its tensors that want a gradient, of what is handed over or received."""
        place, source = (i.chunk, i.micro_batch), i.chunk - 1
        if i.chunk == 0:
            return  # loaded
        if self._is_local(source):
            structure, tensors = self._outputs.pop((source, i.micro_batch))
        else:
            structure, tensors = self._messages.input_of(self._arriving.pop(place), self._stage(source))
        specs = zip(tensors, structure.tensors, strict=True)
        self._entries[place] = Entry([tensor for tensor, spec in specs if spec.requires_grad])
        self._inputs[place] = structure.rebuild(tensors)

    def _finish_micro_batch(self, i: Instruction, output: Any, entry: Entry | None) -> None:
        m = i.micro_batch
        if self._batch.keep_outputs:
            self._result.outputs[m] = output
        labels = self._labels.pop(m)
        if not self._batch.compute_loss:
            return
        with self._precision.autocasting(self._module.device):
            loss = output if self._module.loss_fn is None else self._module.loss_fn(output, labels)
        loss, count = split_loss(loss)
        self.look_at_loss(loss)
        self._result.losses[m] = loss.detach()
        if count is not None:
            self._result.counts[m] = count
        if self._batch.training:
            outputs = [loss] if loss.requires_grad else []
            self._in_flight[i.chunk, m] = _InFlight(entry, outputs, None)
            self._gradients[i.chunk, m] = [
                loss_gradient(loss, self._batch.loss_weight * self._batch.loss_scale) for _ in outputs
            ]

    def _send_activation(self, i: Instruction) -> None:
        structure, tensors = self._outputs.pop((i.chunk, i.micro_batch))
        self._messages.send_activation(self._key(i.chunk, i.micro_batch), structure, tensors, self._stage(i.chunk + 1))

    def _receive_gradient(self, i: Instruction) -> None:
        place, key = (i.chunk, i.micro_batch), self._key(i.chunk, i.micro_batch)

        def structure() -> Structure | None:
            done = self._in_flight.get(place)
            return done.structure if done is not None else self._messages.known_structure(key)

        receipt = self._messages.receive_gradient(structure, self._stage(i.chunk + 1))
        self._arriving_gradients[place] = receipt

    def _wait_for_gradients(self, i: Instruction) -> None:
        receipt = self._arriving_gradients.pop((i.chunk, i.micro_batch), None)
        if receipt is not None:
            self._gradients[i.chunk, i.micro_batch] = self._messages.wait(receipt, self._stage(i.chunk + 1))

    def _backward(self, i: Instruction, reduces: Sequence[Instruction]) -> None:
        with self._reducer.backward(reduces):
            self._run_autograd(i)

    def _backward_input(self, i: Instruction, reduces: Sequence[Instruction]) -> None:
        with self._reducer.backward_input((i.chunk, i.micro_batch)):
            self._run_autograd(i)

    def _backward_weight(self, i: Instruction, reduces: Sequence[Instruction]) -> None:
        self._reducer.backward_weight((i.chunk, i.micro_batch), reduces)

    def _run_autograd(self, i: Instruction) -> None:
        place = (i.chunk, i.micro_batch)
        gradients = self._gradients.pop(place)
        done = self._in_flight.pop(place)
        if done.outputs:
            torch.autograd.backward(done.outputs, gradients)
        if done.entry is not None:
            self._gradients[i.chunk - 1, i.micro_batch] = done.entry.gradients()
        if done.structure is not None and not self._is_local(i.chunk + 1):
            self._messages.let_go(done.outputs)

    def _send_gradient(self, i: Instruction) -> None:
        gradients = self._gradients.pop((i.chunk - 1, i.micro_batch))
        self._messages.send_gradient(gradients, self._stage(i.chunk - 1))

    def _gather_params(self, i: Instruction) -> None:
        self._gather(i.chunk)

    def _reduce_replicas(self, i: Instruction) -> None:
        assert i.bucket is not None
        owners = self._owners[i.bucket]
        self._reducer.reduce_replicas(owners, i.bucket - self._owners.index(owners))


def loss_gradient(loss: Tensor, factor: float) -> Tensor:
    """The gradient that a backward begins with; inf, as of any overflow, where the loss's dtype has no such number."""
    return torch.full_like(loss, factor, dtype=torch.promote_types(loss.dtype, torch.float32)).to(loss.dtype)


def split_loss(loss: Any) -> tuple[Tensor, Tensor | None]:
    """(loss, count): a loss function returns a mean, whose count is None, or (sum, count).

    Raises ValueError for what is no tensor of one element.
    """
    total, count = loss if isinstance(loss, (tuple, list)) and len(loss) == 2 else (loss, None)
    if not isinstance(total, Tensor) or total.numel() != 1:
        shape = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ValueError(
            f"the loss must be a tensor with one element, or (sum, count), not {shape}; average it in loss_fn"
        )
    if count is None:
        return total, None
    if isinstance(count, Tensor) and count.numel() != 1:
        raise ValueError(f"the count of a loss (sum, count) must be one number, not {list(count.shape)}")
    if isinstance(count, Tensor) and count.device == total.device:
        return total, count.detach().to(torch.float64).reshape(())
    # A number of the host's is written by a kernel: a copy would make the host wait for all that is enqueued.
    return total, torch.full((), float(count), dtype=torch.float64, device=total.device)


def both(outer: Recorder, inner: Recorder) -> Recorder:
    """A Recorder that is two."""

    @contextmanager
    def record(i: Instruction) -> Iterator[None]:
        with outer(i), inner(i):
            yield

    return record


def no_record(_: Instruction) -> AbstractContextManager[None]:
    """A Recorder that records nothing."""
    return _NOTHING
