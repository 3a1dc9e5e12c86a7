"""`initialize`: makes an engine from a module and a configuration, as deepspeed.initialize does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from parallel3d.comm.collectives import Group, everywhere
from parallel3d.comm.environment import init_distributed, local_device
from parallel3d.config import BatchSizes, Config, batch_sizes, leaves_open, load
from parallel3d.deepspeed.accessors import DeepSpeedEngine, PipelineEngine
from parallel3d.deepspeed.arguments import find_config, known_values
from parallel3d.deepspeed.checkpointing import follow_captures
from parallel3d.errors import ConfigError
from parallel3d.models.huggingface.in_place import groups_of, tp_model_init
from parallel3d.models.huggingface.weights import read_when_needed
from parallel3d.optim import build_optimizer, build_scheduler
from parallel3d.pipe.batch import make_loader
from parallel3d.pipe.blocks import BlockUnits
from parallel3d.pipe.calls import policy_rule
from parallel3d.pipe.data import RepeatingLoader
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.settings import checkpoint_interval
from parallel3d.pipe.single_stage import SingleStageModule
from parallel3d.zero.external import set_configured_leaf_modules

# Parameters, or parameter groups of torch's optimizers: mappings {"params": [...], "lr": ...}.
Parameters = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]
OptimizerArgument = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerArgument | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | DataLoader[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
    auto: Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    mesh_param: tuple[int, int] | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Return (engine, optimizer, dataloader, lr_scheduler) for a PipelineModule, or for any module, trained data parallel.

    - config (or config_params, or args.deepspeed_config): a path, mapping or base64 text with DeepSpeed's keys.
    - auto: values for keys that are "auto", nested or dotted. Your own optimizer or loader fills some of them.
    - optimizer: an optimizer, or a callable of the parameters; None for the configuration's, or without one to evaluate only.
    - model_parameters: the parameters to train, or groups of them; by default all that require a gradient.
    - training_data: a dataset of samples, which are (inputs, labels) for a PipelineModule. A loader is made for it. It may be a
      stream without length, of which every replica reads all samples. Or a DataLoader of this replica's micro-batches.
    - lr_scheduler: stepped after each step that isn't skipped; or a callable of the optimizer. It is used instead of one that
      the configuration names.
    - dist_init_required: False if the script called init_process_group. distributed_port: MASTER_PORT, if no launcher set it.
    - mpu: another library's process groups, without tensor parallelism. mesh_param: (replicas, 1), as accelerate gives it.
    - weights: a directory of safetensors with the model's names, for a module that was built on the meta device. With ZeRO
      stage 3 each rank reads only its shards. A PipelineModule takes its weights from `models.from_hf`.

    Raises ConfigError, CheckpointError, CommunicationError. Collective: every rank calls it at the same point of its script.
    """
    _check_order(args, model, config)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _check_mpu(mpu, mesh_param)
    model = _with_weights(model, weights)
    settings = load(find_config(args, config, config_params), auto, known_values(optimizer, training_data))
    pipeline = _as_pipeline(model, settings)
    sizes = _batch_sizes(pipeline, settings)
    trained = _trainable(model.parameters() if model_parameters is None else model_parameters)
    built = _make_optimizer(optimizer, trained, settings)
    if built is not None:
        _warn_of_untrained(model, built, pipeline.groups.control)
    scheduler = _make_scheduler(lr_scheduler, built, settings)
    loader = make_loader(pipeline, training_data, sizes, settings, collate_fn) if training_data is not None else None
    iterator = RepeatingLoader(loader) if loader is not None else None
    kind = PipelineEngine if pipeline is model else DeepSpeedEngine
    return kind(pipeline, settings, sizes, built, scheduler, iterator), built, loader, scheduler


def _check_order(args: Any, model: Any, config: Any) -> None:
    """Raise ConfigError where a model or a configuration is given in the place of another argument."""
    if isinstance(args, (nn.Module, Mapping, str, Path, Config)):
        raise ConfigError(
            f"the first argument of initialize, args, is a {type(args).__name__}, but it is for the parsed command line; write "
            "initialize(model=model, config=config)"
        )
    if isinstance(config, nn.Module):
        raise ConfigError(
            f"config is a {type(config).__name__} and model a {type(model).__name__}; give them the other way round"
        )


def _with_weights(model: object, weights: str | Path | None) -> nn.Module:
    """Return the model. If it is on the meta device, its weights are read from this directory when they are needed."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}; give a torch.nn.Module, or a PipelineModule")
    if weights is not None and isinstance(model, PipelineModule):
        raise ConfigError(
            f"weights={str(weights)!r} is for plain modules; build a PipelineModule of from_hf({str(weights)!r})"
        )
    if weights is not None:
        read_when_needed(model, Path(weights), local_device())
    elif on_meta := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ConfigError(
            f"{len(on_meta)} parameters are on the meta device, such as {on_meta[0]}; give weights=, a directory of safetensors"
        )
    return model


def _remove_hooks_of_earlier_engines(model: nn.Module) -> None:
    """Remove the hooks by which an earlier engine gathers weights (ZeRO-3), as it would continue to gather its own shards."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(units := getattr(hook, "__self__", None), BlockUnits):
                units.remove_hooks()


def _as_pipeline(model: nn.Module, config: Config) -> PipelineModule:
    """Return the model as a pipeline of one stage, if it isn't a pipeline already, and set what it recomputes.

    Raises ConfigError as _check_module does.
    """
    size = config.tensor_parallel.autotp_size
    if not isinstance(model, PipelineModule):
        if config.zero_optimization.stage == 3:
            set_configured_leaf_modules(model, config.zero_optimization)
        if size > 1:
            tp_model_init(model, size)
        _remove_hooks_of_earlier_engines(model)
        model = SingleStageModule(model, groups_of(model))
    elif size > 1 and size != model.groups.model.size:
        raise ConfigError(
            f"tensor_parallel.autotp_size is {size}, but the PipelineModule was built with {model.groups.model.size} "
            "tensor-parallel ranks; set tensor_parallel.size in the configuration that it is built with, instead"
        )
    _check_module(model, config)
    follow_captures(model.groups.own_streams)
    if not isinstance(model, SingleStageModule):
        _set_recomputation(model, config)
    return model


def _set_recomputation(model: PipelineModule, config: Config) -> None:
    """Recompute what the configuration says, also in a module that was built without it, as DeepSpeed's engine does."""
    interval = model.settings.activation_checkpoint_interval or checkpoint_interval(config) or 0
    policies = config.activation_checkpointing.policy or model.policies
    if interval and leaves_open(policies):
        policies = model.policies
        if not isinstance(policies, Mapping):
            raise ConfigError(
                'activation_checkpointing.policy has "auto", by which a PipelineModule chooses while it is built; pass it '
                "the same config=, and sample_input="
            )
    model.calls.recompute(interval, policy_rule(None, policies, model.layer_names))


def _batch_sizes(pipeline: PipelineModule, config: Config) -> BatchSizes:
    replicas, least = pipeline.groups.data.size, config.elastic.min_replicas
    if config.elastic.enabled and replicas < least:
        raise ConfigError(
            f"{replicas} replicas are left, but elastic.min_replicas is {least}; start more processes, or set it"
        )
    shards = pipeline.groups.model.size
    if isinstance(pipeline, SingleStageModule) and shards > 1:
        # DeepSpeed and the libraries count the samples of all ranks.
        sizes = batch_sizes(config, pipe=1, data=replicas * shards, model=1)
        return replace(sizes, train_batch_size=sizes.train_batch_size // shards)
    return batch_sizes(config, pipe=pipeline.num_stages, data=replicas, model=shards)


def _check_mpu(mpu: Any, mesh_param: tuple[int, int] | None) -> None:
    if mesh_param is not None and mesh_param[1] > 1:
        raise ConfigError(
            f"mesh_param is {mesh_param}: {mesh_param[1]} ranks share a sequence, which attention here can't; give 1"
        )
    get_size = getattr(mpu, "get_tensor_model_parallel_world_size", getattr(mpu, "get_model_parallel_world_size", None))
    size = 1 if get_size is None else get_size()
    if size > 1:
        raise ConfigError(
            f"mpu has {size} tensor-parallel ranks, which is not supported yet; leave mpu out, or give it 1 rank"
        )


# Settings of a PipelineModule for which the configuration has another name.
_KEYS = {"num_stages": "stages", "partition_method": "partition"}


def _check_module(model: PipelineModule, config: Config) -> None:
    """Raise ConfigError where the module, which was built before this configuration was read, disagrees with it."""
    topology = model.topology()
    others = {a: topology.get_dim(a) for a in topology.get_axis_names() if a not in ("pipe", "data", "model")}
    if any(dim > 1 for dim in others.values()):
        raise ConfigError(f"the topology has axes {others} besides pipe, data and model; give them 1 rank")
    built = {"size": model.groups.model.size, **vars(model.settings)}
    if not isinstance(model, SingleStageModule):
        # Recomputation is set later, see _set_recomputation; random masks are seeded by layer anyway.
        for setting in ("activation_checkpoint_interval", "seed_layers"):
            if not built[setting]:
                del built[setting]
    if built["size"] == 1:
        del built["layout_independent"]  # one rank draws what the whole layer draws
    for section in ("tensor_parallel", "rng", "pipeline"):
        for setting, value in built.items():
            key = _KEYS.get(setting, setting)
            wanted = getattr(getattr(config, section), key, None)  # None also for a key of another section
            if wanted is not None and wanted != value:
                reason = _explain_built(model, section, value)
                raise ConfigError(f"{section}.{key} is {wanted!r}, but {reason}, or drop the key")
    chunks = model.settings.num_chunks
    if config.pipeline.schedule == "1f1b" and chunks > 1:
        raise ConfigError(
            f"the PipelineModule has {chunks} chunks a stage, which schedule '1f1b' can't run; set pipeline.schedule to "
            "'interleaved' or 'gpipe'"
        )


def _explain_built(model: PipelineModule, section: str, value: object) -> str:
    """Explain why a key of a section has this value for the module, and what to do."""
    if not isinstance(model, SingleStageModule):
        return f"the PipelineModule was built with {value!r}; pass the same config= to PipelineModule"
    name = type(model.layers["0"]).__name__
    if section == "tensor_parallel":
        return (
            f"the model is a {name}, which is whole on every rank; build a PipelineModule of tensor-parallel layers, as "
            "parallelize makes them"
        )
    return (
        f"the model is a {name}, for which it is {value!r}; build a PipelineModule of its layers (for Hugging Face's Trainer, "
        "parallel3d.huggingface.PipelineTrainer does)"
    )


def _trainable(parameters: Parameters) -> list[Any]:
    """Return these parameters, or parameter groups, without those that require no gradient."""
    kept: list[Any] = []
    for item in parameters:
        if isinstance(item, Mapping):
            members = item["params"]
            kept.append({**item, "params": _trainable([members] if isinstance(members, nn.Parameter) else members)})
        elif item.requires_grad:
            kept.append(item)
    return kept


def _make_optimizer(
    optimizer: OptimizerArgument | None, parameters: list[Any], config: Config
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer is not None:
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer= is a {type(optimizer).__name__}; give an optimizer, a callable of the parameters, or "
                "optimizer.type in the configuration"
            )
        # Optimizers of torch refuse an empty list, but accept an empty group.
        return optimizer(parameters or [{"params": []}])
    if config.optimizer is None:
        return None
    return build_optimizer(config.optimizer.type, parameters, config.optimizer.params)


def _warn_of_untrained(model: nn.Module, optimizer: torch.optim.Optimizer, control: Group) -> None:
    """Warn if nothing is trained, or if parameters require a gradient that the optimizer doesn't use. Collective."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in held]
    if everywhere(not held, control):
        warnings.warn(
            "no parameter requires a gradient: nothing is trained; set requires_grad of some, which an engine without an "
            "optimizer turns off",
            stacklevel=3,
        )
    elif left:
        warnings.warn(
            f"{len(left)} parameters require a gradient but are not in the optimizer, such as {left[0]}: their gradients take "
            "memory, and count in the norm for gradient_clipping; freeze them by requires_grad_(False)",
            stacklevel=3,
        )


def _make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer | None, config: Config) -> Any:
    """Return the script's own scheduler, as in DeepSpeed, else the configuration's; None without an optimizer."""
    if optimizer is None:
        return None
    if scheduler is None:
        return build_scheduler(config.scheduler.type, optimizer, config.scheduler.params) if config.scheduler else None
    if config.scheduler is not None:
        warnings.warn(
            f"lr_scheduler= is used, and the configuration's scheduler {config.scheduler.type} is not; give one of the two",
            stacklevel=3,
        )
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not hasattr(made, "step"):
        raise ConfigError(
            f"lr_scheduler= is a {type(made).__name__}; give a schedule, which has step(), a callable of the optimizer, or "
            "scheduler.type in the configuration"
        )
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise ConfigError(
            f"lr_scheduler= is a {type(made).__name__} of another optimizer than the engine's {type(optimizer).__name__}, "
            "whose learning rates it would not change; pass that optimizer, too, or a callable of the optimizer"
        )
    return made
