"""Base of all sections of the configuration: immutable, typed, with a place for each of DeepSpeed's keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticUndefined


class Support(Enum):
    """Handling of a key, and the heading of such keys in the table of all keys."""

    SUPPORTED = "supported", "Supported"
    DIFFERENT = "different", "Supported, with a difference"
    OWN = "own", "Keys that DeepSpeed doesn't have"
    OLD_NAME = "old name", "Old names"
    # Known keys, which no field holds.
    LATER = "not yet supported", "Not yet supported: left out, with a warning each"
    REFUSED = "refused", "Not yet supported: an error, since the results would differ"
    WITHOUT_EFFECT = "without effect", "Without effect: one warning, unless it asks for what happens in any case"
    REMOVED = "removed", "Removed: an error"  # whatever the value: keys of earlier versions of this package

    heading: str

    def __new__(cls, name: str, heading: str = "") -> Support:
        """Make the kind of a name."""
        support = object.__new__(cls)
        support._value_, support.heading = name, heading
        return support


@dataclass(frozen=True)
class KnownKey:
    """A key that no field holds.

    - reason: shown to the user.
    - same: values that ask for what happens in any case.
    - inner: the keys of a section, among which a misspelled one is found.
    - switch: the inner key that turns a section on; a section without it is off. off_values: those that leave it off.
    """

    support: Support
    reason: str
    same: Sequence[object] = ()
    inner: Sequence[str] = ()
    switch: str = "enabled"
    off_values: Sequence[object] = (False, None)

    def asks_nothing(self, value: object) -> bool:
        """Return whether this value changes nothing here."""
        # A false value usually asks for nothing, but not False for a key whose `same` has True.
        if value in self.same or (not value and (value is not False or True not in self.same)):
            return True
        if isinstance(value, Mapping) and (self.switch in self.inner or self.switch in value):
            return value.get(self.switch, self.off_values[0]) in self.off_values
        return False


@cache
def _table() -> Any:
    return yaml.safe_load(Path(__file__).with_name("known_keys.yaml").read_text(encoding="utf-8"))


def _keys_of(section: str) -> dict[str, KnownKey]:
    """Return the keys of a section, or of the top level, that no field holds."""
    found = {}
    for support, entries in _table()[section].items():
        for entry in entries:
            about = {name: value for name, value in entry.items() if name != "keys"}
            found.update(dict.fromkeys(entry["keys"], KnownKey(Support(support), **about)))
    return found


class ReadOnlyMapping(Mapping[str, Any]):
    """A mapping without mutators, made of copies: mappings inside become read-only too, lists become tuples."""

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        self._items = {key: read_only(value) for key, value in dict(items).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def read_only(value: Any) -> Any:
    """Return a value in which mappings are read-only and lists are tuples, all the way down."""
    if isinstance(value, Mapping):
        return ReadOnlyMapping(value)
    return tuple(map(read_only, value)) if isinstance(value, (list, tuple)) else value


def dumped(value: object) -> object:
    """Return a plain dict of a read-only mapping, all the way down; other values as they are."""
    if isinstance(value, Mapping):
        return {key: dumped(inner) for key, inner in value.items()}
    return tuple(map(dumped, value)) if isinstance(value, tuple) else value


def whole(value: object) -> object:
    """Convert a float that is a whole number, such as 5e8, to an int; return other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


def _read_dtype(value: object) -> object:
    if not isinstance(value, str):
        return value
    name = value.lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


Positive = Annotated[int, Field(ge=1), BeforeValidator(whole)]
NonNegative = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Params = Annotated[
    Mapping[str, Any],
    AfterValidator(ReadOnlyMapping),
    PlainSerializer(dumped),
    WithJsonSchema({"type": "object"}),
]
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_read_dtype, json_schema_input_type=str)]
HalfDtype = Annotated[Literal["bf16", "fp16"], BeforeValidator(_read_dtype, json_schema_input_type=str)]
NonEmpty = Annotated[str, Field(min_length=1)]
LayerNames = Annotated[NonEmpty | Annotated[tuple[str, ...], Field(min_length=1)] | None, BeforeValidator(read_only)]


def key(default: Any, give: str, *, own: bool = False, differs: str = "", **limits: Any) -> Any:
    """Define a field of a section.

    - give: what the user should give, which completes the error of a wrong value.
    - own: whether DeepSpeed has no such key; differs: where the key means something else than DeepSpeed's.
    - limits: further arguments of pydantic's Field.
    """
    marks: dict[str, Any] = {"own": own, "difference": differs}
    return Field(default, description=give, json_schema_extra={k: v for k, v in marks.items() if v}, **limits)


own_key = partial(key, own=True)


class Section(BaseModel):
    """A mapping of the file: immutable, typed strictly, closed to unknown keys.

    keys: the section of known_keys.yaml in which DeepSpeed's keys are that no field holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    known_keys: ClassVar[Mapping[str, KnownKey]] = {}
    # Old names of fields, to the present ones.
    renamed: ClassVar[Mapping[str, str]] = {}
    # Keys for which "auto" means: not given.
    unset_by_auto: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, keys: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if keys is not None:
            cls.known_keys = _keys_of(keys)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value, as of a dict: libraries read `engine.config` so."""
        return getattr(self, name, default)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return pydantic's schema of the section, with the keys that no field holds; a value may always be "auto"."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, info in cls.model_fields.items():
            if section_of(info.annotation) is None:
                about = {
                    key: properties[name].pop(key) for key in ("description", "default") if key in properties[name]
                }
                properties[name] = {"anyOf": [properties[name], {"const": "auto"}], **about}
        for name, key in cls.known_keys.items():
            properties[name] = {"description": f"{key.support.value}: {key.reason}"}
        for old, new in cls.renamed.items():
            properties[old] = {**properties[new], "description": f"old name of {new}", "deprecated": True}
        return schema


def section_of(annotation: object) -> type[Section] | None:
    """Return the Section in a field's annotation, which may also allow None; None for a plain field."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is None and isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def what_to_give(field: FieldInfo) -> str:
    """Return what a user should give for a field."""
    section = section_of(field.annotation)
    if field.description or section is None:
        return field.description or "true or false"
    name, first = next(iter(section.model_fields.items()))
    return f'a mapping such as {{"{name}": {shown_default(first) or "..."}}}'


def shown_default(field: FieldInfo) -> str:
    """Return a field's default as JSON; an empty text without one."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return ""
    return "{}" if isinstance(default, (ReadOnlyMapping, BaseModel)) else json.dumps(default)
