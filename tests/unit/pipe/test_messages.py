"""Structures of messages, and the protocol by which both ends know them."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from parallel3d.comm.structures import Structure, describe
from parallel3d.comm.values import dump, load
from parallel3d.errors import CommunicationError
from parallel3d.pipe.batch import signature
from parallel3d.pipe.messages import Messages

# A loaded machine is no failure.
unhurried = settings(deadline=None)
Point = namedtuple("Point", ["x", "y"])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Marked:
    """A tensor, or a pytree of them, and something about it."""

    tensor: Any
    mark: str


# Random pytrees

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.complex64])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(dtypes)
    tensor = torch.zeros(draw(st.lists(st.integers(0, 3), max_size=3)), dtype=dtype)
    return tensor.requires_grad_(dtype.is_floating_point and draw(st.booleans()))


values = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(allow_nan=False)
keys = st.text(max_size=3) | st.integers(0, 9)
trees = st.recursive(
    tensors() | values | st.builds(Marked, tensors(), st.text(max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Marked, inner, st.text(max_size=3))
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether containers, values and types are equal, and shape, dtype and requires_grad of tensors."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and _kind(a) == _kind(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Marked):
        return a.mark == b.mark and same(a.tensor, b.tensor)
    return a == b


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


@unhurried
@given(trees)
def test_a_pytree_is_rebuilt_from_its_structure_and_tensors(tree: Any):
    structure, found = describe(tree)
    assert all(isinstance(t, Tensor) for t in found)
    rebuilt = structure.rebuild(found)
    assert same(rebuilt, tree)
    assert all(
        a is b for a, b in zip(tree_flatten(rebuilt)[0], tree_flatten(tree)[0], strict=True) if isinstance(a, Tensor)
    )
    assert [_kind(t) for t in found] == [(s.shape, s.dtype, s.requires_grad) for s in structure.tensors]
    assert structure.gradients == [s for s in structure.tensors if s.requires_grad]


@unhurried
@given(trees)
def test_a_structure_is_sent_as_it_is(tree: Any):
    structure, found = describe(tree)
    other = Structure.of_skeleton(load(dump(structure.skeleton)))
    assert other == structure
    assert same(other.rebuild(found), tree)


@unhurried
@given(trees, trees)
def test_structures_and_signatures_are_equal_when_all_but_contents_is(one: Any, two: Any):
    equal = describe(one)[0] == describe(two)[0]
    if same(one, two):
        assert equal
        assert signature(one) == signature(two)
    elif not equal:
        assert signature(one) != signature(two)

    def refill(leaf: Any) -> Any:
        return torch.ones_like(leaf, requires_grad=leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    changed = tree_map(refill, one)
    assert describe(changed)[0] == describe(one)[0]
    assert signature(changed) == signature(one)


@unhurried
@given(trees)
def test_a_signature_fits_a_signed_word(tree: Any):
    assert 0 <= signature(tree) < 2**63


@dataclass
class Checked:
    """A dataclass whose constructor looks at tensors, needs more than its fields, and computes one of them."""

    tensor: Tensor
    scale: InitVar[float]
    scaled: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.tensor.mean(dim=0) * scale


def test_a_dataclass_travels_without_its_constructor():
    value = Checked(torch.ones(2, 3), 2.0)
    structure, found = describe(value)
    assert [tuple(tensor.shape) for tensor in found] == [(2, 3), (3,)]
    rebuilt = Structure.of_skeleton(load(dump(structure.skeleton))).rebuild(found)
    assert type(rebuilt) is Checked
    assert rebuilt.tensor is value.tensor
    assert rebuilt.scaled is value.scaled


@pytest.mark.parametrize(
    "other",
    [
        (torch.zeros(2, 4), 1),
        (torch.zeros(2, 3, dtype=torch.float64), 1),
        (torch.zeros(2, 3, requires_grad=True), 1),
        (torch.zeros(2, 3), 2),
        (torch.zeros(2, 3), None),
        [torch.zeros(2, 3), 1],
        Point(torch.zeros(2, 3), 1),
        (torch.zeros(2, 3), 1, 1),
    ],
)
def test_what_differs_in_more_than_contents_has_another_signature(other: Any):
    assert signature(other) != signature((torch.zeros(2, 3), 1))


# The protocol, between two stages in one process


class Wire:
    """Messages that two ends have sent each other, in order; makes the transport of stage 0 or 1."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.tensors: dict[int, deque[Tensor]] = {0: deque(), 1: deque()}
        self.headers: dict[int, deque[bytes]] = {0: deque(), 1: deque()}

    def end(self, stage: int) -> End:
        return End(self, stage)


class End:
    def __init__(self, wire: Wire, stage: int):
        self.wire, self.stage = wire, stage

    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        self.wire.log.append(f"send {len(tensors)}")
        self.wire.tensors[stage].extend(t.detach().clone() for t in tensors)

    def receive(self, buffers: Sequence[Tensor], stage: int) -> Sequence[Any]:
        self.wire.log.append(f"receive {len(buffers)}")
        return [Arrival(self.wire.tensors[self.stage], buffer) for buffer in buffers]

    def send_header(self, header: Any, stage: int) -> None:
        self.wire.log.append("header")
        self.wire.headers[stage].append(dump(header))

    def receive_header(self, stage: int) -> Any:
        return load(self.wire.headers[self.stage].popleft())

    def use_host(self, use: bool) -> None:
        self.by_host = use

    def finish(self) -> None:
        pass


class Arrival:
    """An expected tensor. Tensors arrive in the order of the waits, which is the channel's if both ends agree."""

    def __init__(self, channel: deque[Tensor], buffer: Tensor):
        self.channel, self.buffer = channel, buffer

    def is_completed(self) -> bool:
        return False

    def wait(self) -> Tensor:
        tensor = self.channel.popleft()
        assert (tensor.shape, tensor.dtype) == (self.buffer.shape, self.buffer.dtype)
        return tensor


def ends(dynamic: bool = False, most: int = 9) -> tuple[Wire, Messages, Messages]:
    wire = Wire()
    return wire, Messages(wire.end(0), CPU, dynamic, most), Messages(wire.end(1), CPU, dynamic, most)


def send(messages: Messages, key: tuple[int, int, bool], value: Any) -> None:
    structure, found = describe(value)
    messages.send_activation(key, structure, found, 1)


def take(messages: Messages, receipt: Any) -> Any:
    structure, found = messages.input_of(receipt, 0)
    return structure.rebuild(found)


def test_a_header_goes_ahead_of_the_first_message_of_a_signature_alone():
    wire, sender, receiver = ends()
    for key, size in [((0, 7, True), 2), ((0, 7, True), 2), ((0, 8, True), 3), ((0, 7, True), 2), ((0, 7, False), 2)]:
        wire.log.clear()
        first = key in {(0, 8, True), (0, 7, False)} or not sender.known_structure(key)
        send(sender, key, (torch.full((size,), 5.0), "text"))
        assert wire.log == (["header", "send 1"] if first else ["send 1"])
        got = take(receiver, receiver.receive_activation(key, 0))
        assert torch.equal(got[0], torch.full((size,), 5.0))
        assert got[1] == "text"
    receiver.finish()


def test_a_known_message_is_posted_at_once_and_an_unknown_one_when_waited_for():
    wire, sender, receiver = ends()
    key, other = (0, 7, True), (0, 8, True)
    send(sender, key, torch.ones(2))
    take(receiver, receiver.receive_activation(key, 0))
    wire.log.clear()
    one = receiver.receive_activation(key, 0)
    two = receiver.receive_activation(other, 0)
    three = receiver.receive_activation(key, 0)
    assert wire.log == ["receive 1"], "the third waits behind the second, whose size isn't known"
    for number, k in enumerate((key, other, key)):
        send(sender, k, torch.full((2 + (k == other),), float(number)))
    wire.log.clear()
    assert take(receiver, one).tolist() == [0, 0]
    assert wire.log == []
    assert take(receiver, two).tolist() == [1, 1, 1]
    assert wire.log == ["receive 1", "receive 1"]
    assert take(receiver, three).tolist() == [2, 2]


def test_messages_waited_for_out_of_order_are_posted_in_order():
    wire, sender, receiver = ends()
    keys_ = [(0, k, True) for k in range(3)]
    receipts = [receiver.receive_activation(key, 0) for key in keys_]
    for k, key in enumerate(keys_):
        send(sender, key, torch.full((k + 1,), float(k)))
    # On a real channel the buffers fill in posting order; here waiting empties the channel, so wait in order of sending.
    wire.log.clear()
    found = [receiver.wait(receipts[0], 0)]
    assert wire.log == ["receive 1"]
    assert receiver.known_structure(keys_[1]) is None
    found += [receiver.wait(receipt, 0) for receipt in receipts[1:]]
    assert [tensor.tolist() for (tensor,) in found] == [[0], [1, 1], [2, 2, 2]]


def test_structures_of_ever_new_signatures_are_forgotten_on_both_ends_alike():
    wire, sender, receiver = ends(most=2)
    for number in (0, 1, 2, 0, 1, 1, 2):
        wire.log.clear()
        key = (0, number, True)
        known = sender.known_structure(key) is not None
        assert (receiver.known_structure(key) is not None) == known
        receipt = receiver.receive_activation(key, 0)
        send(sender, key, torch.ones(number + 1))
        assert ("header" in wire.log) != known
        assert take(receiver, receipt).shape == (number + 1,)
    assert [sender.known_structure((0, k, True)) is not None for k in range(3)] == [False, True, True]


def test_a_message_keeps_its_own_structure_when_a_later_one_of_its_signature_differs():
    _, sender, receiver = ends(dynamic=True)
    key = (0, 7, True)
    receipts = [receiver.receive_activation(key, 0) for _ in range(2)]
    send(sender, key, (torch.ones(2), "first"))
    send(sender, key, (torch.ones(3), "second"))
    while receiver._start(receiver._unposted[0].popleft(), 0, block=True) and receiver._unposted[0]:
        pass  # as waiting for the second first does
    assert [take(receiver, receipt)[1] for receipt in receipts] == ["first", "second"]


def test_with_dynamic_shapes_every_message_has_a_header():
    wire, sender, receiver = ends(dynamic=True)
    key = (0, 7, True)
    for size in (2, 3, 3):
        wire.log.clear()
        send(sender, key, torch.ones(size))
        assert wire.log == ["header", "send 1"]
        assert take(receiver, receiver.receive_activation(key, 0)).shape == (size,)
        assert receiver.known_structure(key) is None


@pytest.mark.parametrize("changed", [torch.ones(3), (torch.ones(2),), torch.ones(2, dtype=torch.int64), None])
def test_a_structure_that_changes_is_an_error_of_the_sender(changed: Any):
    wire, sender, _ = ends()
    key = (3, 7, True)
    send(sender, key, torch.ones(2))
    wire.log.clear()
    with pytest.raises(
        CommunicationError, match=r'chunk 3 returned .*\(2,\).* before; .*set pipeline.shapes to "dynamic"'
    ):
        send(sender, key, changed)
    assert wire.log == [], "nothing is sent that the other end can't take"


def test_a_changed_structure_is_shown_with_its_containers():
    _, sender, _ = ends()
    send(sender, (0, 7, True), {"a": 1})
    with pytest.raises(CommunicationError, match=r"returned \[1\] for inputs for which it returned \{'a': 1\} before"):
        send(sender, (0, 7, True), [1])


def test_gradients_go_back_for_the_tensors_that_want_one():
    wire, sender, receiver = ends()
    structure, _ = describe((torch.ones(2, requires_grad=True), torch.ones(3), torch.ones(4, requires_grad=True)))
    receipt = sender.receive_gradient(lambda: structure, 1)
    assert wire.log == ["receive 2"]
    receiver.send_gradient([torch.full((2,), 2.0), torch.full((4,), 4.0)], 0)
    assert [g.tolist() for g in sender.wait(receipt, 1)] == [[2, 2], [4, 4, 4, 4]]


def test_sparse_tensors_do_not_travel():
    _, sender, _ = ends()
    with pytest.raises(CommunicationError, match="sparse_coo tensor can't travel between stages; make it dense"):
        send(sender, (0, 0, True), torch.eye(2).to_sparse())


def test_what_is_received_has_the_shapes_and_dtypes_of_what_was_sent():
    structure, _ = describe((torch.ones(2, 0, dtype=torch.bfloat16, requires_grad=True), torch.ones(3), "text"))
    assert structure.gradients == structure.tensors[:1]
    buffers = [spec.empty(CPU) for spec in structure.tensors]
    assert [(*b.shape, b.dtype, b.requires_grad) for b in buffers] == [
        (2, 0, torch.bfloat16, False),
        (3, torch.float32, False),
    ]


def test_a_batch_with_inputs_of_a_new_structure_goes_through_the_host():
    end = Wire().end(0)
    messages = Messages(end, CPU, dynamic=False)
    for signatures, training, through_host in [
        ([7, 7], True, True),
        ([7], True, False),
        ([7, 8], True, True),
        ([8, 7], True, False),
        ([7], False, True),
        ([7], False, False),
    ]:
        messages.begin(signatures, training)
        assert end.by_host is through_host
    # But not for ever, should every batch be unlike all before. A generation, in evaluation, leaves training its own.
    for training in (False, True):
        found = []
        for unlike in range(100, 130):
            messages.begin([unlike], training)
            found.append(end.by_host)
        assert found == sorted(found, reverse=True)
        assert 0 < sum(found) < 10


def test_after_a_batch_that_broke_off_amid_messages_no_other_begins():
    """Messages that were posted are still to come, and would be received as the next batch's."""
    _, sender, receiver = ends()
    sender.begin([7], True)
    sender.abort()  # before anything was posted
    sender.begin([7], True)
    structure, sent = describe(torch.ones(2))
    sender.send_activation((0, 7, True), structure, sent, 1)
    sender.abort()
    with pytest.raises(CommunicationError, match="messages between stages are out of step; start the job again"):
        sender.begin([7], True)
    receiver.begin([7], True)
    receiver.receive_activation((0, 7, True), 0)
    receiver.abort()
    with pytest.raises(CommunicationError, match="out of step"):
        receiver.begin([7], False)
