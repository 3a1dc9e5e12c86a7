"""Values that ranks send each other, as JSON: what is received is data, and never names code to run.

Beside JSON's own, values may be tuples, mappings, sets, bytes, torch's dtypes, devices and sizes, members of enumerations,
named tuples, dataclasses, pydantic's models, and containers that are registered as pytrees.
"""

from __future__ import annotations

import base64
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from typing import Any

import torch
from pydantic import BaseModel
from torch.utils._pytree import SUPPORTED_NODES

from parallel3d.errors import CommunicationError

# Values that JSON has no form for become a mapping with this one key: [kind, content, ...].
_KIND = "$"
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, bytes, OrderedDict)}


def dump(value: Any) -> bytes:
    """Return a value as JSON. Raises CommunicationError that names the type of what can't be sent."""
    return json.dumps(_encode(value)).encode()


def load(data: bytes) -> Any:
    """Return the value that `dump` was given; its classes must have been imported. Raises CommunicationError."""
    try:
        return _decode(json.loads(data))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise CommunicationError(f"a rank sent what is not a value of this package: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, (int, float, str)) and not isinstance(value, Enum):  # numpy's numbers, for example
        return next(base(value) for base in (int, float, str) if isinstance(value, base))
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict and _KIND not in value and all(type(key) is str for key in value):
        return {key: _encode(item) for key, item in value.items()}
    return {_KIND: _encode_other(value, kind)}


def _encode_other(value: Any, kind: type) -> list[Any]:
    if kind is dict:
        return ["dict", [[_encode(key), _encode(item)] for key, item in value.items()]]
    if kind in (tuple, set, frozenset, torch.Size):
        return [kind.__name__, [_encode(item) for item in value]]
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind is type and value in _FACTORIES.values():
        return ["type", value.__name__]
    if isinstance(value, Enum):
        # A combination of flags may have no name.
        return ["member", _name(kind), value.value if isinstance(value, Flag) else value.name]
    if isinstance(value, BaseModel):
        return ["model", _name(kind), [[name, _encode(item)] for name, item in dict(value).items()]]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ["named tuple", _name(kind), [_encode(item) for item in value]]
    if kind in SUPPORTED_NODES:
        items, context = SUPPORTED_NODES[kind].flatten_fn(value)
        return ["container", _name(kind), [_encode(item) for item in items], _encode(context)]
    if is_dataclass(value) and kind is not type:
        return ["dataclass", _name(kind), [[f.name, _encode(getattr(value, f.name))] for f in fields(value)]]
    raise CommunicationError(
        f"a {_full_name(kind)} can't be sent between ranks; send tensors, numbers, strings, and lists, tuples, mappings and "
        "dataclasses of these"
    )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _name(kind: type) -> str:
    """Return the name by which other ranks find a class. Raises CommunicationError for one made in a function, for example."""
    name = _full_name(kind)
    with suppress(KeyError, TypeError):
        if _find(name) is kind:
            return name
    raise CommunicationError(f"a {name} can't be sent between ranks; define its class at the top of a module")


def _find(name: str) -> Any:
    """Return what was imported here under a name; to import a module would run it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = vars(found)[part]
    return found


def _class(name: str, is_allowed: Callable[[Any], bool]) -> Any:
    found = _find(name)
    if not isinstance(found, type) or not is_allowed(found):
        raise ValueError(f"{name!r} is not a class of values")
    return found


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):  # JSON gives dicts; an isinstance check for Mapping would take most of the time
        return value
    if _KIND not in value:
        return {key: _decode(item) for key, item in value.items()}
    kind, *content = value[_KIND]
    return _DECODERS[kind](*content)


def _items(values: Iterable[Any]) -> list[Any]:
    return [_decode(item) for item in values]


def _pairs(values: Iterable[Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(item) for key, item in values}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return found


def _member(name: str, member: str | int) -> Any:
    kind = _class(name, lambda kind: issubclass(kind, Enum))
    return kind(member) if issubclass(kind, Flag) else kind[member]


def _model(name: str, values: Iterable[Any]) -> Any:
    return _class(name, lambda kind: issubclass(kind, BaseModel)).model_construct(**_pairs(values))


def _named_tuple(name: str, values: Iterable[Any]) -> Any:
    kind = _class(name, lambda kind: issubclass(kind, tuple) and hasattr(kind, "_fields"))
    return tuple.__new__(kind, _items(values))


def _container(name: str, values: Iterable[Any], context: Any) -> Any:
    kind = _class(name, SUPPORTED_NODES.__contains__)
    return SUPPORTED_NODES[kind].unflatten_fn(_items(values), _decode(context))


def _dataclass(name: str, values: Iterable[Any]) -> Any:
    """Return a dataclass with these fields; its constructor is not called."""
    kind = _class(name, is_dataclass)
    made, known = kind.__new__(kind), {f.name for f in fields(kind)}
    for field, value in _pairs(values).items():
        if field not in known:
            raise ValueError(f"{name} has no field {field!r}")
        object.__setattr__(made, field, value)
    return made


_DECODERS: dict[str, Callable[..., Any]] = {
    "dict": _pairs,
    "tuple": lambda items: tuple(_items(items)),
    "set": lambda items: set(_items(items)),
    "frozenset": lambda items: frozenset(_items(items)),
    "Size": lambda items: torch.Size(_items(items)),
    "bytes": base64.b64decode,
    "dtype": _dtype,
    "device": torch.device,
    "type": _FACTORIES.__getitem__,
    "member": _member,
    "model": _model,
    "named tuple": _named_tuple,
    "container": _container,
    "dataclass": _dataclass,
}
