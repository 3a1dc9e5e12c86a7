"""Python values as JSON, with the tensors in them by name: the contents of a checkpoint besides the model's tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from parallel3d.errors import CheckpointError

# Values that JSON has no form for become a mapping with this one key: [kind, value].
_KIND = "$"


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; its tensors and arrays go into `tensors`, by names that begin with `path`.

    Values may be None, bools, numbers, strings, tensors, numpy's arrays and numbers, and nested lists, tuples and mappings of
    these, with any of the plain ones as keys. Raises CheckpointError with the path and type of any other.
    """
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, numpy.generic)):
        return value
    if isinstance(value, Tensor):
        return {_KIND: ["tensor", _put(value.detach(), path, tensors)]}
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        try:
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except TypeError:
            raise _refused(value, path, f" of {value.dtype}") from None
        return {_KIND: ["array" if isinstance(value, numpy.ndarray) else "number", _put(tensor, path, tensors)]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{path}.{k}", tensors) for k, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: ["tuple", items]}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    raise _refused(value, path)


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    while path in tensors:  # {"a.b": ..., "a": {"b": ...}}
        path += "'"
    tensors[path] = tensor
    return path


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, Counter) and all(isinstance(key, str) and key != _KIND for key in value):
        return {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    items = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (bool, int, float, str))):
            raise _refused(key, f"{path}, a key {key!r},")
        items.append([key, encode(item, f"{path}.{key}", tensors)])
    return {_KIND: ["counter" if isinstance(value, Counter) else "mapping", items]}


def _refused(value: object, path: str, more: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}{more}, which a checkpoint can't hold; give numbers, "
        "strings, tensors, numpy arrays, and lists, tuples and mappings of these, such as its state_dict()"
    )


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the value that `encode` was given. read: returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(item, read) for key, item in value.items()}
    kind, content = value[_KIND]
    if kind == "tensor":
        return read(content)
    if kind in ("array", "number"):
        array = read(content).numpy()
        return array if kind == "array" else array[()]
    if kind == "tuple":
        return tuple(decode(item, read) for item in content)
    items = {key: decode(item, read) for key, item in content}
    return Counter(items) if kind == "counter" else items
