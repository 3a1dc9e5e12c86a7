"""Read configurations from text: JSON with comments (Hjson, as DeepSpeed reads it), YAML, base64 of JSON."""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson
import yaml

from parallel3d.errors import ConfigError, nearest

YAML_SUFFIXES = (".yaml", ".yml")


def read_mapping(path: Path) -> Mapping[str, Any]:
    """Return the contents of a .yaml or .yml file, or else of a JSON file. Raises ConfigError with file, line and remedy."""
    text = _read_text(path)
    content = parse_yaml(text, path) if path.suffix.lower() in YAML_SUFFIXES else _parse_json(text, path)
    if not text.strip() or content is None:
        raise ConfigError(f"{path} is empty; write the configuration as one mapping of keys to values")
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise ConfigError(f"{path} holds a {kind}; write the configuration as one mapping of keys to values")
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
    content = _parse_json(decoded, "configuration in base64")
    return content if isinstance(content, Mapping) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"no configuration file {path} (working directory {Path.cwd()}); correct the path."
            + nearest(path.name, siblings)
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"can't read {path} ({error.strerror}); give the path of a JSON or YAML file") from None


def _parse_json(text: str, path: Path | str) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ConfigError(f"{path}: key {twice[0]!r} is given twice in one mapping; keep one of them")
        return dict(pairs)

    try:
        return hjson.loads(text, object_pairs_hook=unique)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}; check the quotes, commas and brackets "
            "there and before"
        ) from None


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, and reads 1e-4 as a number as YAML 1.2 does."""

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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, name: Path | str) -> Any:
    """Return the value of a YAML text: 1e-4, true, [0.9, 0.95], a word. Raises ConfigError, which begins with `name`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}, line {line}: {error.problem}; check the indentation and quotes there") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is not YAML: {error}; correct it there") from None
