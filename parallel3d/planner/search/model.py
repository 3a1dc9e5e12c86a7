"""Model to plan for: by name, by its Hugging Face directory, or by a user's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from parallel3d.config import read_source
from parallel3d.errors import ConfigError, nearest
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder, from_hf
from parallel3d.models.huggingface.load import find_directory, sizes_of
from parallel3d.models.user_model import load_subject
from parallel3d.planner.search.presets import PRESETS
from parallel3d.specs import Layer, LayerSpec

MODELS: Mapping[str, DecoderConfig] = {name: DecoderConfig(**sizes) for name, sizes in PRESETS.items()}
_MOST_TOKENS = 2**24  # of a sample
# Default configuration of a training.
DEFAULTS: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
}


@dataclass(frozen=True)
class PlannedModel:
    """Model with its samples and configuration.

    - sample(n): return (inputs, labels) of n samples, of `seq` tokens each.
    - config: keys of the configuration that hold in every layout.
    - halves: the same layers with each block as two, its attention and its feed-forward; None if that isn't known.
    """

    name: str
    layers: Sequence[Layer]
    loss_fn: Callable[[Any, Any], Any] | LayerSpec | None
    sample: Callable[[int], tuple[Any, Any]]
    seq: int
    config: Mapping[str, Any]
    halves: Sequence[Layer] | None = None

    def in_halves(self) -> PlannedModel:
        """Return the model in half blocks. Raises ConfigError if these aren't known."""
        if self.halves is None:
            raise ConfigError(
                f"how to divide the blocks of {self.name} isn't known, as it is for {', '.join(MODELS)} and Hugging Face "
                "directories of Llama's and GPT-2's kind; leave half out, and plan for a function that returns half blocks"
            )
        return replace(self, layers=self.halves)


def load_model(
    target: str, seq: int | None = None, config: str | Path | Mapping[str, Any] | None = None
) -> PlannedModel:
    """Return a model. Raises ConfigError.

    - target: one of MODELS, or a Hugging Face directory, name or script.py:FUNCTION, as for `p3d check`.
    - seq: tokens of a sample, by default as many as the model takes; a function's samples have a length already.
    - config: configuration of every layout, in addition to DEFAULTS.
    """
    given = {} if config is None else dict(read_source(config)[1])
    if target in MODELS:
        return _of_layers(target, decoder(MODELS[target]), seq, given)
    if (directory := find_directory(target)) is not None:
        name = (directory if Path(target).exists() else Path(target)).resolve().name
        return _of_layers(name, from_hf(directory, weights=False), seq, given)
    if ":" not in target:
        raise ConfigError(
            f"unknown model {target!r}.{nearest(target, MODELS)} Give one of {', '.join(MODELS)}, a Hugging Face "
            "directory, or script.py:FUNCTION"
        )
    return _of_function(target, seq, given)


def _of_layers(name: str, layers: Sequence[LayerSpec], seq: int | None, given: Mapping[str, Any]) -> PlannedModel:
    sizes, config = sizes_of(layers), layers[0].module_args[0]
    seq = sizes.max_positions if seq is None else seq
    most = sizes.max_positions if sizes.learned else _MOST_TOKENS
    if not 1 <= seq <= most:
        raise ConfigError(
            f"--seq is {seq}, but {name} has positions for 1 to {most} tokens; give --seq a number of them"
        )

    def sample(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(count, seq, dtype=torch.int64)
        return tokens, tokens

    halves = decoder(config, units="half") if isinstance(config, DecoderConfig) else None
    return PlannedModel(name, layers, causal_lm_loss, sample, seq, {**DEFAULTS, **given}, halves)


def _of_function(target: str, seq: int | None, given: Mapping[str, Any]) -> PlannedModel:
    subject = load_subject(target, seed=0)
    made = subject.batch(0, seed=0)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise ConfigError(f"{target}: micro_batch(0) holds no tensor; return (inputs, labels) of some samples")
    size, length = (*tensors[0].shape, 1)[:2]
    if seq is not None and seq != length:
        raise ConfigError(
            f"--seq is {seq}, but {target} makes samples of {length}; let it make such, or leave --seq out"
        )

    batched = {id(tensor) for tensor in tensors if tensor.shape[0] == size}

    def sample(count: int) -> tuple[Any, Any]:
        rows = torch.arange(count) % size
        inputs, labels = tree_map(lambda leaf: leaf[rows] if id(leaf) in batched else leaf, made)
        return inputs, labels

    own = subject.given()
    base = {"optimizer": DEFAULTS["optimizer"], **own} if own else DEFAULTS
    return PlannedModel(target, subject.layers, subject.loss_fn, sample, length, {**base, **given})
