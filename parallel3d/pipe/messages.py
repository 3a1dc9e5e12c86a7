"""What travels between stages: any pytree, whose structure both ends know before its tensors move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parallel3d.comm.peer.buffers import TensorKind
from parallel3d.comm.transport import Incoming, Transport
from parallel3d.errors import CommunicationError


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and whether a gradient comes back, of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Structure:
    """A pytree without the contents of its tensors: `leaves` holds a TensorSpec for each, other leaves by value."""

    tree: TreeSpec
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[[Any], Structure], tuple[Any]]:
        # Pickled as the pytree with its specs for tensors: containers pickle in every torch version, TreeSpecs don't.
        return _from_skeleton, (tree_unflatten(self.leaves, self.tree),)

    def __str__(self) -> str:
        return str(tree_unflatten(self.leaves, self.tree))

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        """The tensors that travel forward, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """The tensors whose gradients travel back, in order."""
        return [leaf for leaf in self.tensors if leaf.requires_grad]

    @cached_property
    def _kinds(self) -> dict[tuple[torch.device, bool], list[TensorKind]]:
        return {}

    def kinds(self, device: torch.device, gradients: bool) -> list[TensorKind]:
        """What is received on a device: the tensors, or their gradients; made once."""
        kinds = self._kinds.get((device, gradients))
        if kinds is None:
            specs = self.gradients if gradients else self.tensors
            kinds = self._kinds[device, gradients] = [TensorKind(spec.shape, spec.dtype, device) for spec in specs]
        return kinds

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree, with these tensors in place of their specs."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)


def _from_skeleton(skeleton: Any) -> Structure:
    leaves, tree = tree_flatten(skeleton)
    return Structure(tree, tuple(leaves))


def describe(value: Any) -> tuple[Structure, list[Tensor]]:
    """Split a pytree into structure and tensors."""
    leaves, tree = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    specs = [_spec(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Structure(tree, tuple(specs)), tensors


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


# (chunk that sends, signature of the micro-batch's inputs, training)
Key = tuple[int, int, bool]

# Batches with inputs of a new structure whose messages go through the host.
_MOST_CAREFUL = 8

# Structures kept for each chunk: inputs that carry an ever-changing value have ever-new signatures.
_MOST_STRUCTURES = 4096


class _Structures:
    """Structures of chunks' outputs by signature, the oldest forgotten first.

    Both ends of a boundary learn them from the same messages in the same order, so they forget the same ones.
    """

    def __init__(self, most: int):
        self._most = most
        self._of_chunk: dict[tuple[int, bool], dict[int, Structure]] = {}

    def get(self, key: Key) -> Structure | None:
        chunk, signature, training = key
        return self._of_chunk.get((chunk, training), {}).get(signature)

    def put(self, key: Key, structure: Structure) -> None:
        chunk, signature, training = key
        known = self._of_chunk.setdefault((chunk, training), {})
        known[signature] = structure
        if len(known) > self._most:
            del known[next(iter(known))]


@dataclass(eq=False)
class Receipt:
    """A message posted for receipt. While its structure isn't known its tensors can't be, so it waits in its channel."""

    known: Callable[[], Structure | None]
    learn: Callable[[], Structure]
    is_gradient: bool
    structure: Structure | None = None
    incoming: Sequence[Incoming] = ()

    def start(self, structure: Structure, transport: Transport, stage: int, device: torch.device) -> None:
        """Post the tensors."""
        self.structure = structure
        self.incoming = transport.receive(structure.kinds(device, self.is_gradient), stage)


class Messages:
    """This rank's side of the pipeline's messages, in both directions.

    The structure of a chunk's output is cached by the signature of the micro-batch's inputs. An unknown one is sent
    ahead as a header; with `dynamic` every message has one. Both ends see the same messages, so their caches agree.
    """

    def __init__(
        self, transport: Transport, device: torch.device, dynamic: bool, most_structures: int = _MOST_STRUCTURES
    ):
        self._transport = transport
        self._device = device
        self._dynamic = dynamic
        self._structures = _Structures(most_structures)
        self._unposted: dict[int, deque[Receipt]] = {}
        self._leaving: list[tuple[StorageWeakRef, int]] | None = None
        self._met: set[tuple[int, bool]] = set()
        self._used = self._broken_off = False
        self._careful = 0

    def begin(self, signatures: Sequence[int], training: bool) -> None:
        """A batch of these micro-batches begins.

        With inputs of a structure not met before, libraries load kernels of theirs that were not needed until then, and
        loading one may wait for all that run on the device. One that receives runs until its message comes, which may wait
        for a kernel that another rank loads: so the messages of such a batch go through the host. (Not forever, should
        every batch have a structure of its own: then the kernels are there by and by.) Raises CommunicationError after a
        batch that was broken off.
        """
        if self._broken_off:
            raise CommunicationError(
                "a batch failed in the middle, so messages between stages are out of step; start the job again, from a "
                "checkpoint (engine.resume)"
            )
        self._used = False
        new = {(signature, training) for signature in signatures} - self._met
        careful = bool(new) and self._careful < _MOST_CAREFUL
        if careful:
            self._careful += 1
            self._met |= new
        self._transport.use_host(careful)

    def break_off(self) -> None:
        """The batch under way ends here, and what was posted is still to come: if anything was, no other batch can begin."""
        self._broken_off = self._broken_off or self._used

    def send_activation(self, key: Key, structure: Structure, tensors: Sequence[Tensor], stage: int) -> None:
        """Send a chunk's output to the next chunk's stage.

        Raises CommunicationError where it differs from its cache, and for tensors that are not dense.
        """
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise CommunicationError(f"a {tensor.layout} tensor can't travel between stages; make it dense")
        cached = self.known_structure(key)
        if cached is None:
            self._structures.put(key, structure)
            self._transport.send_header(structure, stage)
        elif cached != structure:
            raise CommunicationError(
                f"chunk {key[0]} returned {structure} for inputs for which it returned {cached} before; "
                'where the output depends on more than the inputs\' shapes, set pipeline.shapes to "dynamic"'
            )
        self._used = True
        self._transport.send(tensors, stage)

    def receive_activation(self, key: Key, stage: int) -> Receipt:
        """Post the receipt of a chunk's input, the output of chunk key[0]; pass it to `input_of`."""

        def learn() -> Structure:
            structure: Structure = self._transport.receive_header(stage)
            self._structures.put(key, structure)
            return structure

        return self._post(Receipt(lambda: self.known_structure(key), learn, False), stage)

    def input_of(self, receipt: Receipt, stage: int) -> tuple[Structure, list[Tensor]]:
        """Structure and tensors of an activation, once they are here. Blocks as Work.wait does."""
        tensors = self.wait(receipt, stage)
        assert receipt.structure is not None, "a message is here whose structure isn't known"
        return receipt.structure, tensors

    def receive_gradient(self, known: Callable[[], Structure | None], stage: int) -> Receipt:
        """Post the receipt of a chunk's output gradients; `known` gives that output's structure once it exists."""

        def learn() -> Structure:
            structure = known()
            assert structure is not None, "a gradient is waited for before its forward ran"
            return structure

        return self._post(Receipt(known, learn, True), stage)

    def send_gradient(self, gradients: Sequence[Tensor], stage: int) -> None:
        """Send the gradients of a chunk's input, in the order of Structure.gradients, to the stage that made it."""
        self._used = True
        self._transport.send(gradients, stage)
        self.let_go(gradients)

    def let_go(self, sent: Sequence[Tensor]) -> None:
        """Say that of these tensors nothing is needed any more but that they arrive."""
        if self._leaving is not None:
            storages = [tensor.untyped_storage() for tensor in sent]
            self._leaving += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]

    @contextmanager
    def tracking(self) -> Iterator[Callable[[], int]]:
        """For what runs inside: how many bytes of tensors are there only because they may not have left.

        For reports of memory alone: keeping track takes time at every message.
        """
        leaving: list[tuple[StorageWeakRef, int]] = []
        self._leaving = leaving
        try:
            yield lambda: sum(nbytes for storage, nbytes in leaving if not storage.expired())
        finally:
            self._leaving = None

    def known_structure(self, key: Key) -> Structure | None:
        """The cached structure of a chunk's output, where one can be relied on."""
        return None if self._dynamic else self._structures.get(key)

    def wait(self, receipt: Receipt, stage: int) -> list[Tensor]:
        """The message's tensors, once. Those ahead of it in its channel are posted first, so that the order holds."""
        queue = self._unposted[stage]  # where the receipt was posted
        while receipt in queue:
            self._start(queue.popleft(), stage, block=True)
        self._start_known(stage)
        return [incoming.wait() for incoming in receipt.incoming]

    def finish(self) -> None:
        """Return when all that was sent has left."""
        assert not any(self._unposted.values()), "a message was posted and never waited for"
        self._transport.finish()

    def _post(self, receipt: Receipt, stage: int) -> Receipt:
        self._used = True
        self._unposted.setdefault(stage, deque()).append(receipt)
        self._start_known(stage)
        return receipt

    def _start_known(self, stage: int) -> None:
        queue = self._unposted.get(stage)
        while queue and self._start(queue[0], stage, block=False):
            queue.popleft()

    def _start(self, receipt: Receipt, stage: int, block: bool) -> bool:
        structure = receipt.known()
        if structure is None:
            if not block:
                return False
            structure = receipt.learn()
        receipt.start(structure, self._transport, stage, self._device)
        return True
