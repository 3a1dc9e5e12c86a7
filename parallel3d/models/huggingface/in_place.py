"""Tensor parallelism of a Hugging Face model that stays whole otherwise: DeepSpeed's AutoTP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel3d.comm.environment import get_world_size, init_distributed, local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import PipeModelDataParallelTopology
from parallel3d.errors import ConfigError
from parallel3d.models.huggingface.adapters import unwrapped
from parallel3d.models.huggingface.outline import list_of_layers, with_modules
from parallel3d.models.huggingface.pipeline import gather_whole
from parallel3d.models.huggingface.tp_plan import TensorPlan
from parallel3d.parameters import slicing_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.specs import BuildContext

_GROUPS = "_tensor_parallel_groups"


def groups_of(model: nn.Module) -> ProcessGroups | None:
    """Return the process groups over which tp_model_init has sharded a model, or one inside it; None for any other."""
    found: list[ProcessGroups] = [vars(module)[_GROUPS] for module in model.modules() if _GROUPS in vars(module)]
    return found[0] if found else None


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype | None = None, config: Any = None, **others: Any
) -> nn.Module:
    """Shard a causal language model of transformers, in place, over each `tp_size` neighbouring ranks; return it.

    Its weights must be the same on all ranks. The plan is that of its config, see TensorPlan. Parameters stay the same objects,
    with a rank's part of their values, so that an optimizer may have been made of them. The other ranks are replicas.
    dtype and the arguments after it have no effect: the configuration of the training chooses dtypes.

    Raises ConfigError for a model without a plan, or with modules that can't be sharded. Collective.
    """
    if isinstance(model, PipelineModule):
        raise ConfigError(
            f"a {type(model).__name__} is sharded by tensor_parallel.size; set that instead of tensor_parallel.autotp_size"
        )
    init_distributed()
    world = get_world_size()
    if (groups := groups_of(model)) is not None:
        if groups.model.size != tp_size:
            raise ConfigError(
                f"the model is sharded over {groups.model.size} ranks already, and can't be over {tp_size}"
            )
        return model
    if tp_size < 1 or world % tp_size:
        raise ConfigError(f"{world} ranks can't be divided by {tp_size} tensor-parallel ranks; set another autotp_size")
    if tp_size > 1:
        if not hasattr(model, "config"):
            raise ConfigError(
                f"a {type(model).__name__} is not a causal language model of transformers, and autotp_size shards only these; "
                "give others to parallel3d.tensor_parallel.parallelize, in a PipelineModule"
            )
        gather_whole(model)
        groups = ProcessGroups(PipeModelDataParallelTopology(num_pp=1, num_mp=tp_size, num_dp=world // tp_size))
        _shard(unwrapped(model)[0], BuildContext(groups, local_device()))
        vars(model)[_GROUPS] = groups
    return model


def _shard(model: nn.Module, context: BuildContext) -> None:
    """Replace the modules that the plan shards; their parameters remain the model's."""
    before = dict(model.named_parameters(remove_duplicate=False))
    path = list_of_layers(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in before.items():
        names.setdefault(parameter, []).append(name)
    ties = [(own[0], other) for own in names.values() for other in own[1:]]
    plan = TensorPlan.of(model, f"{path}.").whole_where_tied(ties)
    layers: Any = model.get_submodule(path)
    new = [plan.layer(layer, f"{path}.{k}.", context) for k, layer in enumerate(layers)]
    around = plan.around(with_modules(model, {path: nn.Identity()}), "", context)
    for k, layer in enumerate(new):
        layers[k] = layer
    for name, module in around.named_modules():
        if any(slicing_of(parameter) is not None for parameter in module.parameters(recurse=False)):
            model.set_submodule(name, module)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            old = before.get(f"{name}.{key}" if name else key)
            if parameter is not None and old is not None and old is not parameter:
                old.data = parameter.data
                vars(old).update(vars(parameter))
                module._parameters[key] = old
