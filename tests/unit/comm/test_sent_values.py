"""Values between ranks: each comes back as it was, and nothing that is received names code to run."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from parallel3d.comm.values import dump, load
from parallel3d.errors import CommunicationError


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Cost:
    seconds: float
    parts: tuple[Any, ...] = field(default=())


class Model(BaseModel):
    name: str
    sizes: tuple[int, ...]


class Color(Enum):
    RED = "red"


class Access(Flag):
    READ = auto()
    WRITE = auto()


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
others = st.sampled_from(
    [
        torch.bfloat16,
        torch.device("cuda", 3),
        torch.device("cpu"),
        torch.Size((2, 3)),
        Color.RED,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        {1, 2},
        frozenset((1, "a")),
    ]
)
keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)) | st.just("$")
values = st.recursive(
    plain | others,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Cost, st.floats(allow_nan=False), st.tuples(inner))
        | st.builds(Model, name=st.text(max_size=3), sizes=st.tuples(st.integers()))
    ),
    max_leaves=15,
)


def kinds(value: Any) -> Any:
    """The types of a value and of all that is in it; equality takes 1, 1.0 and True for one."""
    if isinstance(value, dict):
        return type(value), [(kinds(k), kinds(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(item) for item in value]
    return (type(value), kinds(value.parts)) if isinstance(value, Cost) else type(value)


@settings(deadline=None)
@given(values)
def test_values_come_back_with_their_types(value: Any) -> None:
    found = load(dump(value))
    assert found == value
    assert kinds(found) == kinds(value)


def test_numbers_of_numpy_come_as_pythons_and_default_factories_stay() -> None:
    assert load(dump([numpy.float64(1.5), numpy.str_("a"), float("inf")])) == [1.5, "a", float("inf")]
    found = load(dump(defaultdict(list, {"a": [1]})))
    assert found["b"] == []


class Stranger:
    """No value: its classes could do anything when they are made."""


@pytest.mark.parametrize("value", [Stranger(), len, Stranger, object, [(1, {"a": Stranger()})]])
def test_what_is_no_value_is_refused_where_it_would_be_sent(value: Any) -> None:
    with pytest.raises(CommunicationError, match=r"can't be sent between ranks; send tensors, numbers"):
        dump(value)


def made_in_a_function() -> list[Any]:
    @dataclass
    class Local:
        x: int

    class Shade(Enum):
        DARK = 1

    twin = namedtuple("Cost", ["x"])  # a name that another class has
    return [Local(1), Shade.DARK, twin(1)]


@pytest.mark.parametrize("value", made_in_a_function())
def test_a_class_that_other_ranks_could_not_find_is_refused_where_it_would_be_sent(value: Any) -> None:
    with pytest.raises(
        CommunicationError, match=r"can't be sent between ranks; define its class at the top of a module"
    ):
        dump(value)


class Dangerous:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code ran",)


def content(*items: Any) -> bytes:
    return json.dumps({"$": items}).encode()


POINT = f"{__name__}:Point"


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Dangerous()),
        b"",
        b"\xff",
        b"[" * 100_000,
        content("dataclass", "os:system", []),
        content("dataclass", "subprocess:Popen", [["args", "true"]]),
        content("dataclass", f"{__name__}:Stranger", []),
        content("dataclass", f"{__name__}:Cost", [["__class__", 1]]),
        content("dataclass", "never_imported_module:Cost", []),
        content("dataclass", f"{__name__}:nothing", []),
        content("named tuple", f"{__name__}:Cost", []),
        content("container", f"{__name__}:Cost", [], None),
        content("model", f"{__name__}:Cost", []),
        content("member", f"{__name__}:Color", "BLUE"),
        content("member", POINT, "x"),
        content("type", "object"),
        content("dtype", "load"),
        content("function", "len"),
        content("tuple"),
        b'{"$": 1}',
        b'{"$": {}}',
        b'{"$": []}',
    ],
)
def test_what_a_stranger_sends_runs_no_code(data: bytes) -> None:
    with pytest.raises(CommunicationError, match="a rank sent what is not a value of this package"):
        load(data)
