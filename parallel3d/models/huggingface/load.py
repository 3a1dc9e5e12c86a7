"""`from_hf`: a Hugging Face causal language model as a list of layer specs."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from parallel3d.checkpoint.export import Stored
from parallel3d.config.files import parse_json, read_mapping
from parallel3d.config.load import Source, load_sections
from parallel3d.errors import ConfigError
from parallel3d.models.blocks import decoder
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.adapters import load_adapted
from parallel3d.models.huggingface.config import family_of, generation_of, parse
from parallel3d.models.huggingface.weights import (
    HEAD,
    Weights,
    check_weights,
    download_of,
    load_wrapped,
    names_of,
    open_directory,
    stored_as,
)
from parallel3d.models.huggingface.wrap import wrap
from parallel3d.specs import LayerSpec

ADAPTERS = "adapter_config.json"


def from_hf(
    source: str | Path | nn.Module,
    dtype: torch.dtype | Literal["auto"] | None = None,
    tied: bool | None = None,
    weights: bool = True,
    ignore: Collection[str] = (),
    units: Literal["block", "half"] | None = None,
    config: Source = None,
    peft_config: Any = None,
) -> list[LayerSpec]:
    """Return the layers for a PipelineModule: token ids or TokenEmbedding's inputs [batch, seq] -> logits [batch, seq, vocab].

    - source: a directory of safetensors, of which a rank reads what it builds; the name of a hub's model in the local cache;
      or a model of transformers, whose frozen parameters stay frozen. Architectures of FAMILIES become the native decoder;
      others, and a PeftModel with LoRA, keep their own layers (`wrap`). From a directory of adapters, these are trained.
    - dtype: dtype of the weights; None for torch's default dtype, "auto" for the stored one.
    - weights: False to start from new weights; a directory then needs only config.json.
    - tied, units, ignore: native decoders only. tied: whether the head shares the embedding's weight; None: as the config says.
      units: see `decoder`; None: pipeline.units of `config`. ignore: unknown keys of config.json that are accepted.
    - peft_config: a LoraConfig, to train new adapters of a directory's model, drawn with the same seed on all ranks.

    Raises ConfigError, and CheckpointError for tensors that are missing, too many or misshapen.
    """
    units = units or load_sections(config, "pipeline").pipeline.units
    directory = None if isinstance(source, nn.Module) else find_directory(source) or Path(source)
    if peft_config is not None or (directory is not None and (directory / ADAPTERS).is_file()):
        return _adapted(directory, dtype, peft_config, {"weights": None if weights else False}, tied, ignore, units)
    if isinstance(source, nn.Module):
        raw = _config_of(source)
        if family_of(raw) is None or hasattr(source, "peft_config"):
            _refuse_for_wrapping({"dtype": dtype, "weights": None if weights else False}, tied, ignore, units)
            return wrap(source)
        family, sizes = parse(raw, ignore)
        stored = Weights(source.state_dict(keep_vars=True)) if weights else None
    else:
        assert directory is not None
        raw = dict(read_mapping(directory / "config.json", parse_json))
        try:
            if family_of(raw) is None:
                _refuse_for_wrapping({}, tied, ignore, units)
                return wrap(*load_wrapped(directory, _wanted(raw, dtype), weights), directory)
            family, sizes = parse(raw, ignore)
        except ConfigError as error:
            raise ConfigError(f"{directory / 'config.json'}: {error}") from None
        stored = open_directory(directory, family.base) if weights else None
    sizes = _tie(sizes, tied, stored, where := str(directory or type(source).__name__))
    if stored is not None:
        check_weights(stored, _all_stored(sizes), sizes, where)
    described = replace(sizes, huggingface={**raw, **generation_of(source, directory)})
    return decoder(described, _dtype(raw) if dtype == "auto" else dtype, stored, units)


def _adapted(
    directory: Path | None, dtype: torch.dtype | Literal["auto"] | None, peft_config: Any, *others: Any
) -> list[LayerSpec]:
    """Return the layers of a directory's model with new adapters, or of the model whose adapters the directory has.

    others: further arguments, for _refuse_for_wrapping.
    """
    _refuse_for_wrapping(*others)
    if directory is None:
        raise ConfigError("peft_config is for directories; give a model to peft.get_peft_model, and its result here")
    adapters, model = peft_config, directory
    if (directory / ADAPTERS).is_file():
        if peft_config is not None:
            raise ConfigError(f"{directory} has adapters, and peft_config asks for new ones; leave peft_config out")
        base = read_mapping(directory / ADAPTERS, parse_json).get("base_model_name_or_path")
        found = find_directory(base) if isinstance(base, str) else None
        if found is None:
            raise ConfigError(
                f"{directory / ADAPTERS}: base_model_name_or_path is {base!r}, and no model is there; correct it, or load "
                "the model and give peft.PeftModel.from_pretrained(model, ..., is_trainable=True)"
            )
        adapters, model = directory, found
    raw = read_mapping(model / "config.json", parse_json)
    return wrap(*load_adapted(model, _wanted(raw, dtype), adapters), model)


def _wanted(raw: Mapping[str, Any], dtype: torch.dtype | Literal["auto"] | None) -> torch.dtype:
    """Return the dtype of weights that is asked for. raw: the model's config.json."""
    return (_dtype(raw) if dtype == "auto" else dtype) or torch.get_default_dtype()


def find_directory(source: str | Path) -> Path | None:
    """Return the directory of a model: itself, that of its config.json, or that of a hub's model in the local cache.

    None for what is neither. Raises ConfigError for a name org/model that is not in the cache, or without its config.json.
    """
    path = Path(source)
    if path.is_dir() or path.name == "config.json":
        return path if path.is_dir() else path.parent
    if path.exists() or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) or str(source).startswith("."):
        return None
    try:
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(str(source), local_files_only=True))
    except (ImportError, OSError, ValueError):
        if "/" not in str(source):
            return None
        raise ConfigError(
            f"there is no directory {str(source)!r}, and no model of that name in the local cache of the Hugging Face hub; "
            f"download it: hf download {source}"
        ) from None
    if not (found / "config.json").is_file():
        raise ConfigError(f"{found} has no config.json{download_of(found)}")
    return found


@dataclass(frozen=True)
class Sizes:
    """Sizes that samples of a model must have. max_positions: longest sequence; learned: whether longer ones are errors."""

    vocab_size: int
    max_positions: int
    learned: bool


def sizes_of(layers: Sequence[LayerSpec]) -> Sizes:
    """Return the sizes of a model of `from_hf` or `decoder`."""
    first = layers[0].module_args[0]
    if isinstance(first, DecoderConfig):
        return Sizes(first.vocab_size, first.max_positions, first.rope is None)
    config = first.text_config
    most = getattr(config, "max_position_embeddings", None)
    return Sizes(config.vocab_size, most or 2048, most is not None and getattr(config, "rope_parameters", None) is None)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ConfigError(
            f"{type(model).__name__} has no config of transformers; give a Hugging Face model, or a directory"
        )
    raw = dict(config.to_dict())
    raw["architectures"] = [type(model).__name__]
    return json.loads(json.dumps(raw, default=lambda value: str(value).removeprefix("torch.")))


def _all_stored(config: DecoderConfig) -> list[Stored]:
    """Return how each parameter of the whole decoder is stored. Blocks have the same parameters: one is built."""
    with torch.device("meta"):
        specs = decoder(replace(config, num_layers=1, windows=config.windows[:1]))
        parameters = [named for spec in specs for named in spec.build().named_parameters()]
    return [stored_as(config, k, *named) for k in range(config.num_layers) for named in parameters]


def _tie(config: DecoderConfig, tied: bool | None, weights: Weights | None, where: str) -> DecoderConfig:
    """Return the decoder, tied or not as the user asks."""
    if tied is None or tied == config.tied:
        return config
    if tied and weights is not None and HEAD in weights.shapes():
        raise ConfigError(f"{where} has a head of its own, {HEAD}, which tied=True would drop; leave tied out")
    if weights is not None:
        (embedding,) = names_of("tokens", config.rope is None)
        weights.alias(HEAD, f"{embedding}.weight")
    return replace(config, tied=tied)


def _dtype(raw: Mapping[str, Any]) -> torch.dtype | None:
    name = raw.get("dtype") or raw.get("torch_dtype")
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _refuse_for_wrapping(others: Mapping[str, object], tied: bool | None, ignore: Collection[str], units: str) -> None:
    arguments = {**others, "tied": tied, "ignore": ignore or None, "units": None if units == "block" else units}
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)} can't be given for a model that keeps its own layers; change the model, or its config.json"
        )
