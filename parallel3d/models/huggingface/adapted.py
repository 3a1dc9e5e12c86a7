"""Models in a directory with LoRA adapters of PEFT, new ones or those of another directory, read part by part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.read import differences
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models.huggingface.adapters import PREFIX, merged_name
from parallel3d.models.huggingface.meta import load_wrapped
from parallel3d.models.huggingface.weights import Weights

_ADAPTER = "default"
_KEPT = ("lora_A", "lora_B", "modules_to_save")  # parts of adapted modules that parts of the model can read
# Initializations of PEFT that need no weight of the model.
_INDEPENDENT = (True, False, "gaussian")


def load_adapted(directory: Path, dtype: torch.dtype, adapters: Path | Any) -> tuple[nn.Module, Weights | None]:
    """Return a PeftModel to train, and the weights that its parts are to read; None if it has them.

    - directory: of the model. adapters: a directory of PEFT's files, or the PeftConfig of new adapters.

    The model is on the meta device, but for one that transformers converts, and for adapters that are made of its weights.
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
    if weights is None or not kept or not independent:
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
