"""A user's model, loss and data, from which `p3d check` and `p3d plan` start."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parallel3d.config import read_source
from parallel3d.errors import ConfigError, nearest
from parallel3d.models import causal_lm_loss, from_hf
from parallel3d.models.huggingface.load import find_directory, sizes_of
from parallel3d.rng import seeded, stream_seed
from parallel3d.specs import Layer, LossFunction, check_layers


@dataclass(frozen=True)
class Subject:
    """A model to check or to plan for.

    - layers: as PipelineModule takes them. A class whose constructor declares `context` gets one in a layout, and None for the
      reference in plain PyTorch, where it must build an unsharded module.
    - micro_batch: micro_batch(index) -> (inputs, labels), which depend only on the index.
    - loss_fn: as PipelineModule's; a LayerSpec is built without context in plain PyTorch.
    - config: a path or mapping, to which a layout adds its own keys; without an optimizer, SGD with momentum is used.
    """

    layers: Sequence[Layer]
    micro_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: LossFunction = None
    config: str | Path | Mapping[str, Any] = field(default_factory=dict)

    def given(self) -> dict[str, Any]:
        """Return the configuration's keys as they stand. Raises ConfigError for a file that can't be read."""
        return dict(read_source(self.config)[1])

    def batch(self, index: int, seed: int) -> tuple[Any, Any]:
        """Return micro-batch `index`, its floating-point numbers in the default dtype, drawn only from seed and index.

        Raises ConfigError for anything but (inputs, labels).
        """
        with seeded(stream_seed(seed, index), torch.device("cpu")):
            made: Any = self.micro_batch(index)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ConfigError(f"micro_batch({index}) returned a {type(made).__name__}; return (inputs, labels)")
        dtype = torch.get_default_dtype()
        inputs, labels = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tuple(made))
        return inputs, labels


def load_subject(target: str, seed: int) -> Subject:
    """Call the function `script.py:name` or `package.module:name` with torch seeded, and seed torch again.

    - target: also a Hugging Face directory, its config.json, or the hub's name of one in the local cache.

    Every call makes new layers. Raises ConfigError, which says what is missing, where there is no such function or it
    returns neither a Subject nor a mapping with its fields.
    """
    if (directory := find_directory(target)) is not None:
        torch.manual_seed(seed)
        return _of_hugging_face(directory)
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(
            f"{target!r} names no function; give script.py:FUNCTION, package.module:FUNCTION or a Hugging Face directory"
        )
    module = _import(place)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{place} has no function {name!r}.{nearest(name, known)}")
    torch.manual_seed(seed)
    try:
        made = function()
    except Exception as error:
        raise ConfigError(f"{target}: {describe(error)}; it is called without arguments") from error
    subject = _as_subject(made, target)
    torch.manual_seed(seed)
    check_layers(subject.layers, subject.loss_fn)
    return subject


def _of_hugging_face(directory: Path) -> Subject:
    """Return the model of a directory, with its weights or new ones if it has none, on random tokens."""
    layers = from_hf(directory, weights=any(directory.glob("*.safetensors")))
    sizes = sizes_of(layers)
    batch, seq = 2, min(64, sizes.max_positions)

    def micro_batch(_: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(sizes.vocab_size, (batch, seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    # The model's own dropout draws the same masks in every layout.
    return Subject(layers, micro_batch, causal_lm_loss, {"rng": {"layout_independent": True}})


def describe(error: Exception) -> str:
    """Return an exception of a user's code, and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _import(place: str) -> ModuleType:
    is_file = place.endswith(".py")
    path = Path(place).resolve()
    if is_file and not path.is_file():
        raise ConfigError(f"there is no script {place!r} in {os.getcwd()}")
    folder = str(path.parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where python itself would look for what a script imports
    try:
        if not is_file:
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(f"subject_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ModuleNotFoundError as error:
        raise ConfigError(f"{place}: {error}; give a path that ends in .py, or a module on PYTHONPATH") from error
    except Exception as error:
        raise ConfigError(f"importing {place}: {describe(error)}") from error


def _as_subject(made: Any, target: str) -> Subject:
    if isinstance(made, Subject):
        return made
    names = [f.name for f in fields(Subject)]
    if not isinstance(made, Mapping):
        raise ConfigError(
            f"{target} returned a {type(made).__name__}; return a parallel3d.parity.Subject or a dict with {names}"
        )
    for key in made:
        if key not in names:
            raise ConfigError(f"{target} returned a dict with {key!r}.{nearest(str(key), names)} Its keys are {names}")
    missing = [name for name in ("layers", "micro_batch") if name not in made]
    if missing:
        raise ConfigError(f"{target} returned a dict without {missing}; its keys are {names}")
    return Subject(**made)
