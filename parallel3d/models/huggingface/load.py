"""`from_hf`: a Hugging Face causal language model as a list of layer specs."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from parallel3d.config.files import parse_json, read_mapping
from parallel3d.errors import ConfigError
from parallel3d.models.config import DecoderConfig
from parallel3d.models.decoder import decoder
from parallel3d.models.huggingface.config import family_of, parse
from parallel3d.models.huggingface.names import all_stored, names_of
from parallel3d.models.huggingface.weights import HEAD, Weights, check_weights, open_directory
from parallel3d.models.huggingface.wrap import wrap
from parallel3d.specs import LayerSpec


def from_hf(
    source: str | Path | nn.Module,
    dtype: torch.dtype | Literal["auto"] | None = None,
    tied: bool | None = None,
    weights: bool = True,
    ignore: Collection[str] = (),
    units: Literal["block", "half"] = "block",
) -> list[LayerSpec]:
    """Return the layers of a model for a PipelineModule: token ids [batch, seq] -> logits [batch, seq, vocab].

    The inputs are those of TokenEmbedding.

    - source: a directory with config.json and safetensors, from which each rank reads only what it builds; or a model made by
      transformers. Llama, Qwen2, Mistral and GPT-2 become the native decoder. Any other model, and a PeftModel with LoRA,
      keeps its own layers, split along its config's base_model_pp_plan and sharded by its base_model_tp_plan (`wrap`).
    - dtype: of the weights; None for torch's default one, "auto" for the stored one.
    - tied: whether the head shares the embedding's weight; None for what the config says.
    - weights: False to start from new weights; a directory then needs config.json alone.
    - ignore: unknown keys of the config that are accepted.
    - units: what a stage holds a whole number of, see `decoder`.

    Raises ConfigError for a config.json that can't be read, an unknown architecture or key, CheckpointError for tensors that
    are missing, too many or misshapen.
    """
    if isinstance(source, nn.Module):
        raw = _config_of(source)
        if family_of(raw) is None or hasattr(source, "peft_config"):
            _refuse_for_wrapping(dtype, tied, weights, ignore, units)
            return wrap(source)
        family, config = parse(raw, ignore)
        stored = Weights(source.state_dict()) if weights else None
        where = type(source).__name__
    else:
        raw = dict(read_mapping(Path(source) / "config.json", parse_json))
        try:
            family, config = parse(raw, ignore)
        except ConfigError as error:
            raise ConfigError(f"{Path(source) / 'config.json'}: {error}") from None
        stored = open_directory(Path(source), family.base) if weights else None
        where = str(source)
    config = replace(_tie(config, tied, stored, where), huggingface=raw)
    if stored is not None:
        check_weights(stored, all_stored(config), config.tied, where)
    return decoder(config, _dtype(raw) if dtype == "auto" else dtype, stored, units)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"{type(model).__name__} has no config of transformers; give a Hugging Face model, or a directory"
        )
    raw = dict(config.to_dict())
    raw["architectures"] = [type(model).__name__]
    return json.loads(json.dumps(raw, default=lambda value: str(value).removeprefix("torch.")))


def _tie(config: DecoderConfig, tied: bool | None, weights: Weights | None, where: str) -> DecoderConfig:
    """Return the decoder, tied or not as the user asks."""
    if tied is None or tied == config.tied:
        return config
    if tied and weights is not None and HEAD in weights.shapes():
        raise ConfigError(f"{where} has a head of its own, {HEAD}, which tied=True would drop; leave tied out")
    if weights is not None:
        (embedding,) = names_of(config, "embedding")["tokens.weight"].sections
        weights.alias(HEAD, embedding.name)
    return replace(config, tied=tied)


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _refuse_for_wrapping(dtype: object, tied: bool | None, weights: bool, ignore: Collection[str], units: str) -> None:
    halves = None if units == "block" else units
    arguments = {"dtype": dtype, "tied": tied, "ignore": ignore or None, "units": halves}
    given = [name for name, value in arguments.items() if value is not None]
    if given or not weights:
        raise ConfigError(
            f"{', '.join(given or ['weights'])} can't be given for a model that keeps its own layers; change the model itself"
        )
