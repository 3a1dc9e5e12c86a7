"""Messages between stages: pytrees whose structure both ends know before the tensors move."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel3d.comm.structures import Structure
from parallel3d.comm.transport import Incoming, Transport
from parallel3d.errors import CommunicationError

# (chunk that sends, signature of the micro-batch's inputs, training)
Key = tuple[int, int, bool]

# Number of batches with inputs of a new structure whose messages go through the host, in training and in evaluation each.
_MAX_HOST_BATCHES = 8

# Maximum number of structures kept for each chunk: inputs with a value that always changes have a new signature each time.
_MAX_STRUCTURES = 4096


@dataclass(eq=False)
class Receipt:
    """Message to be received. The receive of its tensors is posted once its structure is known; until then it is queued.

    - known: returns the structure, or None while it is not known.
    - key: the key of an activation, whose structure may come in a header; None for gradients.
    """

    known: Callable[[], Structure | None]
    key: Key | None
    structure: Structure | None = None
    incoming: Sequence[Incoming] = ()


class Messages:
    """This rank's side of the pipeline's messages, in both directions.

    The structure of a chunk's output is cached by the signature of the micro-batch's inputs. A structure that is not cached
    is sent ahead as a header; with `dynamic` every message has a header. Both ends see the same messages, so their caches
    agree.
    """

    def __init__(
        self, transport: Transport, device: torch.device, dynamic: bool, max_structures: int = _MAX_STRUCTURES
    ):
        self._transport = transport
        self._device = device
        self._dynamic = dynamic
        # (chunk, training) -> its structures by signature, of which the oldest are dropped. Both ends of a boundary learn
        # them from the same messages in the same order, so they drop the same ones.
        self._structures: defaultdict[tuple[int, bool], dict[int, Structure]] = defaultdict(dict)
        self._max_structures = max_structures
        self._unposted: dict[int, deque[Receipt]] = {}
        # Storages in transit and their bytes, while `tracking`.
        self._in_transit: list[tuple[StorageWeakRef, int]] | None = None
        self._seen: set[tuple[int, bool]] = set()
        self._used = self._broken = False
        self._num_host_batches = {True: 0, False: 0}

    def begin(self, signatures: Sequence[int], training: bool) -> None:
        """Begin a batch of micro-batches with these signatures. Raises CommunicationError after a batch that was aborted.

        With inputs of a new structure, libraries load kernels that were not needed before, and loading one may wait for
        everything that runs on the device. A kernel that receives a message runs until the message comes, which may in turn
        wait for a kernel that another rank loads. So the messages of such a batch go through the host; but only for a
        limited number of batches, in case every batch has a structure of its own: by then the kernels are loaded.
        """
        if self._broken:
            raise CommunicationError(
                "a batch failed in the middle, so messages between stages are out of step; start the job again, from a "
                "checkpoint (engine.resume)"
            )
        self._used = False
        new = {(signature, training) for signature in signatures} - self._seen
        through_host = bool(new) and self._num_host_batches[training] < _MAX_HOST_BATCHES
        if through_host:
            self._num_host_batches[training] += 1
            self._seen |= new
        self._transport.use_host(through_host)

    def abort(self) -> None:
        """End the batch in the middle. If any message was posted, no other batch can begin: messages are still to come."""
        self._broken = self._broken or self._used

    def send_activation(self, key: Key, structure: Structure, tensors: Sequence[Tensor], stage: int) -> None:
        """Send a chunk's output to the stage of the next chunk.

        Raises CommunicationError where its structure differs from the cached one, and for tensors that are not dense.
        """
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise CommunicationError(f"a {tensor.layout} tensor can't travel between stages; make it dense")
        cached = self.known_structure(key)
        if cached is None:
            self._learn(key, structure)
            self._transport.send_header(structure.skeleton, stage)
        elif cached != structure:
            raise CommunicationError(
                f"chunk {key[0]} returned {structure} for inputs for which it returned {cached} before; "
                'where the output depends on more than the inputs\' shapes, set pipeline.shapes to "dynamic"'
            )
        self._used = True
        if self._in_transit is not None:
            # Transports hold what they send until it has left: a copy, so that the output itself is seen to be freed.
            tensors = [tensor.clone() for tensor in tensors]
            self.mark_in_transit(tensors)
        self._transport.send(tensors, stage)

    def receive_activation(self, key: Key, stage: int) -> Receipt:
        """Post the receive of a chunk's input, which is the output of chunk key[0]; pass the receipt to `input_of`."""
        return self._post(Receipt(lambda: self.known_structure(key), key), stage)

    def input_of(self, receipt: Receipt, stage: int) -> tuple[Structure, list[Tensor]]:
        """Return structure and tensors of an activation once they have arrived. Blocks as Work.wait does."""
        tensors = self.wait(receipt, stage)
        assert receipt.structure is not None, "the structure of a received message is not known"
        return receipt.structure, tensors

    def receive_gradient(self, known: Callable[[], Structure | None], stage: int) -> Receipt:
        """Post the receive of the gradients of a chunk's output; `known` returns the output's structure once it exists."""
        return self._post(Receipt(known, None), stage)

    def send_gradient(self, gradients: Sequence[Tensor], stage: int) -> None:
        """Send the gradients of a chunk's input, in the order of Structure.gradients, to the stage that computed the input."""
        self._used = True
        self._transport.send(gradients, stage)
        self.mark_in_transit(gradients)

    def mark_in_transit(self, sent: Sequence[Tensor]) -> None:
        """Declare that these tensors are needed only until they have been sent."""
        if self._in_transit is not None:
            storages = [tensor.untyped_storage() for tensor in sent]
            self._in_transit += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]

    @contextmanager
    def tracking(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the bytes of tensors kept only because they may not have been sent yet.

        For memory reports only: tracking takes host time at every message.
        """
        in_transit: list[tuple[StorageWeakRef, int]] = []
        self._in_transit = in_transit
        try:
            yield lambda: sum(nbytes for storage, nbytes in in_transit if not storage.expired())
        finally:
            self._in_transit = None

    def known_structure(self, key: Key) -> Structure | None:
        """Return the cached structure of a chunk's output; None if there is none, or if shapes are dynamic."""
        chunk, signature, training = key
        return None if self._dynamic else self._structures[chunk, training].get(signature)

    def _learn(self, key: Key, structure: Structure) -> None:
        chunk, signature, training = key
        known = self._structures[chunk, training]
        known[signature] = structure
        if len(known) > self._max_structures:
            del known[next(iter(known))]

    def wait(self, receipt: Receipt, stage: int) -> list[Tensor]:
        """Return the message's tensors; call it once. Messages ahead of it in its channel are posted first."""
        queue = self._unposted[stage]  # where the receipt was posted
        while receipt in queue:
            self._start(queue.popleft(), stage, block=True)
        self._start_known(stage)
        return [incoming.wait() for incoming in receipt.incoming]

    def finish(self) -> None:
        """Wait until everything posted has been sent."""
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
        """Post the receive if its structure is known, or wait for its header with `block`; return whether it is posted."""
        structure = receipt.known()
        if structure is None:
            if not block:
                return False
            assert receipt.key is not None, "a gradient is waited for before its forward has run"
            structure = Structure.of_skeleton(self._transport.receive_header(stage))
            self._learn(receipt.key, structure)
        receipt.structure = structure
        specs = structure.gradients if receipt.key is None else structure.tensors
        receipt.incoming = self._transport.receive([spec.empty(self._device) for spec in specs], stage)
        return True
