"""Read text that users give: JSON with comments (Hjson, as DeepSpeed reads it), YAML, base64 of JSON.

Whatever the text is, it takes a bounded time and ends with a value of bounded size or a ConfigError that names the place.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import hjson
import yaml
from pydantic import ValidationError

from parallel3d.errors import ConfigError, nearest

YAML_SUFFIXES = (".yaml", ".yml")
_T = TypeVar("_T")

# Limits of what is read. The parsers of Hjson and YAML are slow, Hjson's for some texts by the square of their length.
_MOST_BYTES, _MOST_HJSON, _MOST_YAML = 2**25, 2**16, 2**18
_MOST_VALUES, _DEEPEST, _MOST_BITS = 200_000, 100, 1023
MOST_LISTED = 100  # problems in one message
# pydantic's type of a problem -> what to give, in the words of a file.
_WANTED = {"tuple_type": "a list", "model_type": "a mapping of keys to values"}


def read_mapping(path: Path, parse: Callable[[str, Path], object] | None = None) -> Mapping[str, Any]:
    """Return the contents of a file. Raises ConfigError with file, line and remedy.

    parse: by default parse_yaml for .yaml and .yml, else JSON with comments.
    """
    text = read_text(path)
    content = (parse or (parse_yaml if path.suffix.lower() in YAML_SUFFIXES else parse_hjson))(text, path)
    if not text.strip() or content is None:
        raise ConfigError(f"{path} is empty; write one mapping of keys to values")
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise ConfigError(f"{path} holds a {kind}; write one mapping of keys to values")
    return content


def decode(text: str) -> Mapping[str, Any] | None:
    """Return the mapping whose JSON, in base64 of either alphabet, is `text`; None if it is not base64 of an object."""
    plain = text.strip().rstrip("=").translate(str.maketrans("+/", "-_"))
    if not re.fullmatch(r"[\w-]+", plain, re.ASCII):
        return None
    try:
        decoded = base64.urlsafe_b64decode(plain + "=" * (-len(plain) % 4)).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None
    if not decoded.lstrip().startswith(("{", "//", "#", "/*")):
        return None  # a file's name may look like base64
    content = parse_hjson(decoded, "configuration in base64")
    return content if isinstance(content, Mapping) else None


def read_text(path: Path) -> str:
    """Return a file's text. Raises ConfigError if it can't be read, is very large, or is not UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        siblings: list[str] = []
        with suppress(OSError):
            siblings = [entry.name for entry in islice(path.parent.iterdir(), 1000)]
        raise ConfigError(
            f"no file {path} (working directory {Path.cwd()}); correct the path." + nearest(path.name, siblings)
        ) from None
    except OSError as error:
        raise ConfigError(f"can't read {path} ({error.strerror}); give the path of a text file") from None
    except ValueError as error:  # no path can have such characters
        raise ConfigError(f"can't read {str(path)!r} ({error}); give the path of a text file") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES} bytes; give the path of a smaller file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None


def bounded(content: _T, name: object) -> _T:
    """Return the content as it is. Raises ConfigError, with the dotted key, if it is too large, too deep, or holds itself.

    Each mention of a YAML's alias counts again, as it does for whoever walks through the content.
    """

    def inside(value: object, where: str) -> Iterable[tuple[object, str]]:
        if isinstance(value, Mapping):
            return ((inner, f"{where}.{key}" if where else str(key)) for key, inner in value.items())
        return ((inner, where) for inner in value) if isinstance(value, (list, tuple)) else ()

    for value, where in _walk(content, "", inside, lambda where: f"{name}: {where}"):
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ConfigError(f"{name}: {where} is too large a number; give one of at most {_MOST_BITS} bits")
    return content


def _walk(
    root: Any, start: _T, inside: Callable[[Any, _T], Iterable[tuple[Any, _T]]], place: Callable[[_T], str]
) -> Iterator[tuple[Any, _T]]:
    """Yield each value inside `root` with where it is. Raises ConfigError past the limits; inside: the values in one."""
    waiting = [(root, start, 0)]
    count = 0
    while waiting:
        value, where, depth = waiting.pop()
        yield value, where
        inner = [(other, there, depth + 1) for other, there in islice(inside(value, where), _MOST_VALUES + 1)]
        count += len(inner)
        if inner and depth >= _DEEPEST:
            raise ConfigError(f"{place(where)} is nested more than {_DEEPEST} deep, or holds itself; flatten it")
        if count > _MOST_VALUES:
            raise _too_many(place(where))
        waiting += inner


def _too_many(place: object) -> ConfigError:
    return ConfigError(f"{place}: there are more than {_MOST_VALUES} values; give fewer")


def explain(error: ValidationError) -> str:
    """Return what is wrong in a file by pydantic's account: each problem with its place, the value, and what to give."""
    problems = []
    for problem in error.errors(include_url=False)[:MOST_LISTED]:
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(".")
        problem_text, kind = problem["msg"].removeprefix("Value error, "), problem["type"]
        if kind == "missing":
            problem_text = "is missing; give it"
        elif kind != "value_error":
            problem_text = f"give {_WANTED[kind]}" if kind in _WANTED else problem_text
            problem_text = f"{problem_text}, not {reprlib.repr(problem['input'])}"
        problems.append(f"{where}: {problem_text}" if where else problem_text)
    count = error.error_count()
    return problems[0] if count == 1 else "\n  - ".join([f"{count} problems", *problems])


def parse_json(text: str, name: Path | str) -> object:
    """Return the value of a JSON text. Raises ConfigError, which begins with `name`."""
    return _parse_json(json.loads, text, name)


def parse_hjson(text: str, name: Path | str) -> object:
    """Return the value of a JSON text, with comments if it isn't long. Raises ConfigError, which begins with `name`."""
    return _parse_json(_load_hjson if len(text) <= _MOST_HJSON else json.loads, text, name)


def _load_hjson(text: str, **hooks: Any) -> object:
    """Parse as JSON first: Hjson would read the Infinity that json.dump writes, and the rest of its line, as a string."""
    try:
        return json.loads(text, **hooks)
    except json.JSONDecodeError:
        return hjson.loads(text, **hooks)


def _parse_json(loads: Callable[..., object], text: str, name: Path | str) -> object:
    counts = Counter[str]()

    def add(kind: str, values: int = 1) -> None:
        """Count values as they are parsed: `bounded` alone would come after seconds of parsing."""
        counts[kind] += values
        if counts[kind] > _MOST_VALUES:
            raise _too_many(name)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        add("mappings")
        add("keys", len(pairs))
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ConfigError(f"{name}: key {key!r} is given twice in one mapping; keep one of them")
        return mapping

    def number(read: Callable[[str], float]) -> Callable[[str], float]:
        def parse(digits: str) -> float:
            add("numbers")
            if abs(float(digits)) == float("inf"):
                line = text.count("\n", 0, text.index(digits)) + 1
                raise ConfigError(f"{name}, line {line}: {digits[:20]} is too large a number; give a smaller one")
            return read(digits)

        return parse

    try:
        parsed = loads(text, object_pairs_hook=unique, parse_int=number(int), parse_float=number(float))
    except (hjson.HjsonDecodeError, json.JSONDecodeError) as error:
        lines = f" (a text of more than {_MOST_HJSON} characters is read as plain JSON)" * (len(text) > _MOST_HJSON)
        raise ConfigError(
            f"{name}, line {error.lineno}, column {error.colno} is not JSON: {error.msg}{lines}; check the quotes, commas and "
            "brackets there and before"
        ) from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{name} is nested too deep; flatten it") from None
    except ValueError as error:  # raised by hjson for an invalid character
        raise ConfigError(f"{name} is not JSON: {error}; correct it there") from None
    except IndexError:  # raised by hjson, which looks past the text for a comment's end, and for the line before '''
        raise ConfigError(
            f"{name} ends within a comment, or has ''' on its first line; close the comment, or begin a new line before '''"
        ) from None
    return bounded(parsed, name)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and what aliases make huge, and reads 1e-4 as a number as YAML 1.2 does."""

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.name = name

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"key {key.value!r} is given twice in one mapping; keep one of them"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return node

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _DEEPEST:  # the scanner's time grows by the square of the depth
            problem = f"brackets are nested more than {_DEEPEST} deep; flatten them"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            problem = f"{reprlib.repr(node.value)} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def get_single_node(self) -> yaml.Node | None:
        root: yaml.Node | None = super().get_single_node()

        def inside(node: Any, mark: yaml.Mark) -> Iterable[tuple[Any, yaml.Mark]]:
            pairs = node.value if isinstance(node, yaml.CollectionNode) else ()
            nodes = (n for pair in pairs for n in pair) if isinstance(node, yaml.MappingNode) else pairs
            return ((inner, inner.start_mark) for inner in nodes)

        if root is not None:  # checked before objects are constructed, because merged keys are copied
            for _ in _walk(root, root.start_mark, inside, lambda mark: f"{mark.name}, line {mark.line + 1}"):
                pass
        return root


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, name: Path | str) -> Any:
    """Return the value of a YAML text: 1e-4, true, [0.9, 0.95], a word. Raises ConfigError, which begins with `name`."""
    if len(text) > _MOST_YAML:
        raise ConfigError(f"{name} has more than {_MOST_YAML} characters of YAML; write it as JSON")
    try:
        return bounded(_Loader(text, str(name)).get_single_data(), name)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}, line {line}: {error.problem}; check the indentation and quotes there") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deep; flatten it") from None
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {error}; correct it there") from None
