"""LoRA adapters of PEFT: sharded with the layers they adapt, saved in PEFT's files, and merged.

New adapters, or those of a directory, are put into the model of another directory, which is read part by part.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.read import differences
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models.huggingface.weights import Weights, load_wrapped
from parallel3d.parameters import copy_of
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.dropout import SlicedDropout
from parallel3d.tensor_parallel.parallelize import Column, Row, Style, Whole

# Before the names of a model's parameters in the state_dict of its PeftModel.
PREFIX = "base_model.model."


class UnknownRegion(Exception):
    """Raised for a module that may compute a wrong result from a part of its input. The text follows the module's name."""


def unwrapped(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Return the model inside a PeftModel, and the PeftModel on the meta device; any other model, and None.

    Raises ConfigError for adapters that compute outside of the layers, which no stage would run.
    """
    peft: Any = model
    if not hasattr(model, "peft_config"):
        return model, None
    kinds = {name: str(getattr(config.peft_type, "value", "")) for name, config in peft.peft_config.items()}
    if not hasattr(model, "get_base_model") or set(kinds.values()) != {"LORA"}:
        raise ConfigError(
            f"{type(model).__name__} has adapters {kinds}; layers are made of a PeftModel with LORA: "
            "get_peft_model(model, LoraConfig(...)). Train others with ZeRO alone, by initialize(model=model)"
        )
    return peft.get_base_model(), copy_of(model, lambda tensor: tensor.to("meta"))


def adapted_by(module: nn.Module) -> nn.Module | None:
    """Return the layer that an adapter wraps; None for any other module."""
    for name in ("base_layer", "original_module"):
        if isinstance(found := getattr(module, name, None), nn.Module):
            return found
    return None


def styles_inside(name: str, module: Any, style: Style, context: BuildContext | None) -> dict[str, Style]:
    """Return the styles of the linear layers inside an adapted one, y = W x + s B A x; of any other layer, its own.

    By outputs: rows of W and B, with A whole. By inputs: columns of W and A, with B whole, and each rank drops its own part
    of x. Raises UnknownRegion for layers and variants, such as DoRA, in which more than W, A and B is multiplied.
    """
    base = adapted_by(module)
    if base is None or isinstance(style, Whole):
        return {name: style}
    if not hasattr(module, "lora_A") or not isinstance(base, nn.Linear) or module.lora_variant:
        raise UnknownRegion(
            f"is adapted by {type(module).__name__}, which is sharded for LoRA's plain linear layers alone"
        )
    found: dict[str, Style] = {f"{name}.base_layer": style}
    for adapter in module.lora_A:
        down, up = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
        if isinstance(style, Column):
            # What enters the region before A has its gradient summed there; A's own is a part.
            found |= {down: Whole(partial=style.in_region), up: style}
        elif isinstance(style, Row):
            found[down] = style
            if style.input_is_parallel:
                rate = getattr(module.lora_dropout[adapter], "p", 0.0)
                module.lora_dropout[adapter] = SlicedDropout(
                    rate, base.in_features, segments=style.segments, context=context
                )
    return found


def is_saved(peft: Any, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter, by its name in the model, may belong to what PEFT saves."""
    return parameter.requires_grad or any(f".{adapter}." in name for adapter in peft.peft_config)


def save_adapters(peft: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors. weights: by their names in the model."""
    state = {PREFIX + name: tensor for name, tensor in weights.items()}
    peft.save_pretrained(str(directory), state_dict=state, save_embedding_layers=False)


def merged_name(name: str) -> str | None:
    """Return the name, in a model without adapters, of a parameter of one with adapters; None for an adapter's own."""
    if any(part in name for part in (".lora_", ".modules_to_save.", ".trainable_tokens_")):
        return None
    return re.sub(r"\.(base_layer|original_module|token_adapter)(?=\.)", "", name)


def merged(peft: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model with its adapters merged.

    weights: (name, weight); those of one layer follow each other. Raises CheckpointError for sums that are not finite.
    """
    adapted = {name: module for name, module in peft.get_base_model().named_modules() if adapted_by(module) is not None}

    def layer_of(item: tuple[str, Tensor]) -> str | None:
        return next((name for name in adapted if item[0].startswith(f"{name}.")), None)

    for name, own in groupby(weights, layer_of):
        if name is None:
            yield from own
            continue
        layer: Any = copy.deepcopy(adapted[name])
        # Clones: a tensor is valid until the next one is taken.
        layer.load_state_dict({key.removeprefix(f"{name}."): tensor.clone() for key, tensor in own}, assign=True)
        try:
            if hasattr(layer, "unload_and_optionally_merge_module"):
                layer = layer.unload_and_optionally_merge_module(merge=True, safe_merge=True, adapter_names=None)
            else:
                layer.merge(safe_merge=True)
                layer = layer.get_base_layer()
        except ValueError as error:
            raise CheckpointError(f"{name} can't be merged: {error}; load an earlier checkpoint") from error
        yield from ((f"{name}.{key}", tensor) for key, tensor in layer.state_dict().items())


_ADAPTER = "default"
_KEPT = ("lora_A", "lora_B", "modules_to_save")  # parts of adapted modules that parts of the model can read
# Initializations of PEFT that need no weight of the model.
_INDEPENDENT = (True, False, "gaussian")


def load_adapted(directory: Path, dtype: torch.dtype, adapters: Path | Any) -> tuple[nn.Module, Weights | None]:
    """Return a PeftModel to train, and the weights that its parts are to read; None if it has them.

    - directory: of the model. adapters: a directory of PEFT's files, or the PeftConfig of new adapters.

    The model is on the meta device, unless transformers converts its weights or adapters are computed from them.
    Raises ConfigError, CheckpointError.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("adapters are made by peft; install it: pip install peft") from None
    module: Any = peft
    is_stored = isinstance(adapters, Path)
    config: Any = module.PeftConfig.from_pretrained(str(adapters)) if is_stored else copy.deepcopy(adapters)
    config.inference_mode = False
    model, weights = load_wrapped(directory, dtype, weights=True)
    base_names = set(model.state_dict())
    adapted = module.get_peft_model(model, config, adapter_name=_ADAPTER)
    own = {name: p for name, p in model.named_parameters() if merged_name(name) is None}
    kept = all(any(f".{kind}.{_ADAPTER}." in name for kind in _KEPT) for name in own)
    independent = is_stored or getattr(config, "init_lora_weights", None) in _INDEPENDENT
    biases = getattr(config, "bias", "none") != "none"  # then the model's trained biases are in the adapters' files
    if weights is None or not kept or not independent or biases:
        return _whole(module, directory, dtype, adapters, config), None
    for name in model.state_dict():
        plain = merged_name(name) or name.replace(f".modules_to_save.{_ADAPTER}.", ".")
        if plain in base_names:
            weights.alias(name, plain)
    for name, tensor in (_stored(adapters, own) if isinstance(adapters, Path) else _drawn(model, config)).items():
        weights.put(name, tensor)
    return adapted, weights


def _whole(module: Any, directory: Path, dtype: torch.dtype, adapters: Path | Any, config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    found: nn.Module
    if isinstance(adapters, Path):
        found = module.PeftModel.from_pretrained(model, str(adapters), is_trainable=True)
    else:
        found = module.get_peft_model(model, config)
    return found


def _stored(directory: Path, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of adapters, by their names in the model. Raises CheckpointError unless they are those of the files."""
    from peft.utils import load_peft_weights

    try:
        values: Any = load_peft_weights
        found: dict[str, Tensor] = values(str(directory), device="cpu")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} has no adapters that can be read: {error}") from error
    names = {
        PREFIX + name.replace(f".modules_to_save.{_ADAPTER}.", ".").replace(f".{_ADAPTER}.", "."): name for name in own
    }
    shapes = {key: tuple(own[name].shape) for key, name in names.items()}
    misshapen = {k: (shapes[k], tuple(t.shape)) for k, t in found.items() if shapes.get(k, t.shape) != t.shape}
    if faults := differences(
        [key for key in names if key not in found], [k for k in found if k not in names], misshapen
    ):
        raise CheckpointError(f"the adapters in {directory} don't fit their model; {faults}; take those of this model")
    return {names[key]: tensor for key, tensor in found.items()}


def _drawn(model: nn.Module, config: Any) -> dict[str, Tensor]:
    """Return the values of new adapters, by their names in the model, as PEFT draws them."""
    values: dict[str, Tensor] = {}
    for path, layer in model.named_modules():
        if _ADAPTER in getattr(layer, "lora_A", ()):
            drawn = copy.copy(layer)
            drawn._modules = dict(layer._modules)
            for part in ("lora_A", "lora_B"):
                linear = copy.deepcopy(getattr(layer, part)[_ADAPTER]).to_empty(device="cpu")
                drawn._modules[part] = nn.ModuleDict({_ADAPTER: linear})
            reset: Any = drawn.reset_lora_parameters
            reset(_ADAPTER, config.init_lora_weights)
            for part in ("lora_A", "lora_B"):
                own = getattr(drawn, part).named_parameters()
                values |= {f"{path}.{part}.{name}": parameter.detach() for name, parameter in own}
    return values
