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
from parallel3d.specs import Layer, LayerSpec
from parallel3d.user_model import load_subject


def _llama(hidden: int, ffn: int, layers: int, heads: int, vocab: int, **more: Any) -> DecoderConfig:
    given: dict[str, Any] = {"hidden_size": hidden, "ffn_size": ffn, "num_layers": layers, "num_heads": heads}
    return DecoderConfig(vocab_size=vocab, **{"max_positions": 4096, **given, **more})


def _gpt(hidden: int, layers: int, heads: int, vocab: int = 51200, positions: int = 2048) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        ffn_size=4 * hidden,
        num_layers=layers,
        num_heads=heads,
        max_positions=positions,
        norm="layer",
        activation="gelu",
        gated=False,
        rope=None,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tied=True,
    )


# The gpt3 and megatron sizes: arXiv:2104.04473, table 1, and arXiv:2205.05198, table 3.
MODELS: Mapping[str, DecoderConfig] = {
    "gpt2": _gpt(768, 12, 12, vocab=50257, positions=1024),
    "gpt2-xl": _gpt(1600, 48, 25, vocab=50257, positions=1024),
    "1b": _llama(2048, 5504, 24, 16, 32000, max_positions=2048),
    "7b": _llama(4096, 11008, 32, 32, 32000),
    "llama2-13b": _llama(5120, 13824, 40, 40, 32000),
    "llama2-70b": _llama(8192, 28672, 80, 64, 32000, num_kv_heads=8),
    "llama3-8b": _llama(4096, 14336, 32, 32, 128256, num_kv_heads=8, max_positions=8192),
    "llama3-70b": _llama(8192, 28672, 80, 64, 128256, num_kv_heads=8, max_positions=8192),
    "llama3-405b": _llama(16384, 53248, 126, 128, 128256, num_kv_heads=8, max_positions=8192),
    "gpt3-22b": _gpt(6144, 48, 64),
    "gpt3-175b": _gpt(12288, 96, 96),
    "megatron-530b": _gpt(20480, 105, 128),
    "megatron-1t": _gpt(25600, 128, 160),
}
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
                f"how to divide the blocks of {self.name} isn't known, as it is for a Hugging Face directory and for "
                f"{', '.join(MODELS)}; leave half out, and plan for a function that returns half blocks"
            )
        return replace(self, layers=self.halves)


def load_model(
    target: str, seq: int | None = None, config: str | Path | Mapping[str, Any] | None = None
) -> PlannedModel:
    """Return a model. Raises ConfigError.

    - target: one of MODELS, a Hugging Face directory or its config.json, or script.py:FUNCTION, as for `p3d check`.
    - seq: tokens of a sample, by default as many as the model takes; a function's samples have a length already.
    - config: configuration of every layout, in addition to DEFAULTS.
    """
    given = {} if config is None else dict(read_source(config)[1])
    if target in MODELS:
        return _decoder(target, MODELS[target], decoder(MODELS[target]), seq, {**DEFAULTS, **given})
    path = Path(target)
    if path.is_dir() or path.name == "config.json":
        directory = path if path.is_dir() else path.parent
        layers = from_hf(directory, weights=False)
        first = layers[0].module_args[0]
        assert isinstance(first, DecoderConfig)
        return _decoder(directory.resolve().name, first, layers, seq, {**DEFAULTS, **given})
    if ":" not in target:
        raise ConfigError(
            f"unknown model {target!r}.{nearest(target, MODELS)} Give one of {', '.join(MODELS)}, a Hugging Face "
            "directory, or script.py:FUNCTION"
        )
    return _of_function(target, seq, given)


def _decoder(
    name: str, config: DecoderConfig, layers: Sequence[Layer], seq: int | None, given: Mapping[str, Any]
) -> PlannedModel:
    seq = config.max_positions if seq is None else seq
    if seq < 1 or (config.rope is None and seq > config.max_positions):
        raise ConfigError(f"--seq is {seq}, but {name} has positions for 1 to {config.max_positions} tokens")

    def sample(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(count, seq, dtype=torch.int64)
        return tokens, tokens

    return PlannedModel(name, layers, causal_lm_loss, sample, seq, given, decoder(config, units="half"))


def _of_function(target: str, seq: int | None, given: Mapping[str, Any]) -> PlannedModel:
    subject = load_subject(target, seed=0)
    made = subject.batch(0, seed=0)
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if not tensors:
        raise ConfigError(f"{target}: micro_batch(0) holds no tensor; return (inputs, labels) of some samples")
    size = tensors[0].shape[0]
    length = tensors[0].shape[1] if tensors[0].dim() > 1 else 1
    if seq is not None and seq != length:
        raise ConfigError(
            f"--seq is {seq}, but {target} makes samples of {length}; let it make such, or leave --seq out"
        )

    def resized(leaf: Any, count: int) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != size:
            return leaf
        return leaf[torch.arange(count) % size]

    def sample(count: int) -> tuple[Any, Any]:
        inputs, labels = tree_map(lambda leaf: resized(leaf, count), made)
        return inputs, labels

    own = subject.given()
    base = {"optimizer": DEFAULTS["optimizer"], **own} if own else DEFAULTS
    return PlannedModel(target, subject.layers, subject.loss_fn, sample, length, {**base, **given})
