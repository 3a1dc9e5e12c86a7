"""Values survive as JSON with tensors beside; what can't is refused by its path."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(st.integers() | st.booleans() | st.none(), inner)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode(value, "v", tensors)))
    read: list[str] = []
    decoded = decode(encoded, lambda name: read.append(name) or tensors[name])
    assert sorted(read) == sorted(tensors)
    return decoded


@given(values)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_tensors_and_arrays_come_back() -> None:
    value = {
        "t": [torch.tensor([1, 2], dtype=torch.int16), (torch.tensor(2.5, dtype=torch.bfloat16),)],
        "a": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "n": np.float64(0.1),
        "c": Counter({30: 2, 80: 1}),
        "t.0": torch.tensor(3),
    }
    back = there_and_back(value)
    assert torch.equal(back["t"][0], value["t"][0])
    assert back["t"][0].dtype is torch.int16
    assert back["t.0"].item() == 3
    assert back["t"][1][0].dtype is torch.bfloat16
    assert back["a"].dtype == np.uint8
    assert back["a"].tolist() == value["a"].tolist()
    assert isinstance(back["n"], np.float64)
    assert back["n"] == value["n"]
    assert back["c"] == value["c"]
    assert isinstance(back["c"], Counter)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, "client_state.a.1 is a builtins.object"),
        ({"f": lambda: 0}, "client_state.f is a builtins.function"),
        ({"s": {1, 2}}, "client_state.s is a builtins.set"),
        ({("k",): 1}, "a key"),
        ({"o": np.array([object()])}, "client_state.o is a numpy.ndarray of object"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_by_its_path(value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        encode(value, "client_state", {})
