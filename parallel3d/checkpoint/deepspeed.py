"""DeepSpeed's checkpoints as whole tensors: ZeRO stages 0 to 3, tensor parallelism, and its pipelines.

    [zero_pp_rank_<d>_]mp_rank_<m>_model_states.pt        weights and counters of model-parallel rank m; at stage 3 replica d's
    [bf16_]zero_pp_rank_<d>_mp_rank_<m>_optim_states.pt   its shard of masters and moments
    layer_<k>-model_<t>-model_states.pt                   weights of layer k of a pipeline on tensor-parallel rank t

Files are read by torch's restricted unpickler, which executes nothing; objects of DeepSpeed's classes become `Inert`.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.format import MASTER, MODEL, OPTIMIZER
from parallel3d.checkpoint.values import encode
from parallel3d.checkpoint.whole import WholeCheckpoint
from parallel3d.errors import CheckpointError

_RANK_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
# Prefixes of classes that are replaced by Inert; all others outside of torch's own list are refused.
_REPLACED = ("deepspeed.", "megatron.", "argparse.Namespace")
# Keys that DeepSpeed puts into a file of model states; the others are the user's client_state.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "lr_scheduler"),
    *("frozen_param_fragments", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version"),
    *("universal_checkpoint_info", "sparse_tensor_module_names", "ds_autoep_layers", "autoep_layers"),
}
_STAGES_1_AND_2 = ("single_partition_of_fp32_groups", "base_optimizer_state")
_UNNAMED = (
    "does not tell whose the optimizer's states are: at stage 0 that takes weights of different values, or in fp32 weights of "
    "different shapes that are all trained; save it with zero_optimization.stage 1, or import it with --weights-only"
)
_SETTINGS = "lr initial_lr betas eps weight_decay amsgrad maximize momentum decoupled_weight_decay".split()
Json = dict[str, Any]


class Inert:
    """Object of a class that is not imported: its constructor's arguments and its attributes."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


def is_deepspeed(directory: Path) -> bool:
    """Return whether a directory holds a checkpoint of DeepSpeed's."""
    return directory.is_dir() and any(_RANK_FILE.fullmatch(path.name) for path in directory.iterdir())


def load_file(path: Path) -> Json:
    """Read a file of DeepSpeed's without executing anything in it. Raises CheckpointError for any other file."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if unknown := [name for name in named if not name.startswith(_REPLACED)]:
            raise ValueError(f"it names {', '.join(sorted(unknown))}, which is not read; leave it out of client_state")
        with torch.serialization.safe_globals([(Inert, name) for name in named]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} can't be read as a file of DeepSpeed's: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a file of DeepSpeed: it holds a {type(content).__name__}")
    return content


def read_deepspeed(directory: Path, weights_only: bool = False) -> WholeCheckpoint:
    """Read a checkpoint of DeepSpeed's, a directory <save_dir>/<tag>. Raises CheckpointError for what it can't read exactly.

    weights_only: leave out the optimizer's moments, and at stage 0 its masters and groups.
    """
    try:
        return _whole(*_files(directory), weights_only)
    except CheckpointError as error:
        place = "" if str(error).startswith(str(directory)) else f"{directory} "
        raise CheckpointError(f"{place}{error}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{directory} is not as DeepSpeed writes it: {error!r}; copy it again") from error


def _files(directory: Path) -> tuple[list[tuple[list[Json], list[Json]]], dict[int, dict[int, Json]]]:
    """Return (model states, optimizer states) by replica of each model-parallel rank, and {tp rank: {layer: weights}}."""
    found: dict[tuple[int, str], dict[int, Path]] = {}
    layers: dict[int, dict[int, Json]] = {}
    for path in sorted(directory.iterdir()):
        if match := _RANK_FILE.fullmatch(path.name):
            found.setdefault((int(match[2]), match[3]), {})[int(match[1] or 0)] = path
        elif match := _LAYER_FILE.fullmatch(path.name):
            layers.setdefault(int(match[2] or 0), {})[int(match[1])] = load_file(path)
        elif "expert" in path.name or path.name.startswith("expp_"):
            raise CheckpointError(
                f"{path} is of a mixture of experts, which this package does not have; import another one"
            )
    ranks = []
    for rank in range(1 + max(rank for rank, _ in found)):
        models, optims = (
            [load_file(path) for _, path in sorted(found.get((rank, kind), {}).items())] for kind in ("model", "optim")
        )
        shard = optims[0]["optimizer_state_dict"] if optims else {}
        count = shard.get("partition_count", 0)
        count = max(count) if isinstance(count, list) else count
        partitioned = bool(models) and models[0]["param_shapes"] is not None
        wanted = count if "fp32_flat_groups" in shard else 1
        if len(models) != wanted or len(optims) != count or partitioned != bool(optims):
            raise CheckpointError(
                f"has {len(models)} files of model states and {len(optims)} of optimizer states for mp_rank {rank:02}, of "
                f"{count or 'its'} replicas; copy the files of all nodes there"
            )
        ranks.append((models, optims))
    if len(ranks) != (world := ranks[0][0][0]["mp_world_size"]):
        raise CheckpointError(
            f"has files of {len(ranks)} model-parallel ranks of {world}; copy the files of all nodes there"
        )
    return ranks, layers


def _whole(
    ranks: Sequence[tuple[list[Json], list[Json]]], layers: Mapping[int, Mapping[int, Json]], weights_only: bool
) -> WholeCheckpoint:
    first = ranks[0][0][0]
    tp = len(layers) or len(ranks)
    tensors: dict[str, Tensor] = {}
    copies: dict[str, str] = {}
    groups: list[list[Json]] = []
    named: set[str] = set()
    for begin in range(0, len(ranks), tp):
        of_ranks = []
        for t, (models, optims) in enumerate(ranks[begin : begin + tp]):
            copies |= models[0]["shared_params"] or {}
            weights: dict[str, Tensor] = dict(models[0]["module"] or {})
            for k, layer in layers.get(t, {}).items():
                weights |= {f"{k}.{name}": tensor for name, tensor in layer.items()}
            if optims:
                found, own = _partitioned(models, [optim["optimizer_state_dict"] for optim in optims], weights_only)
                weights |= {_parameter(name): found.pop(name) for name in list(found) if name.startswith(MODEL)}
            else:
                found, own = _replicated(models[0], weights, named, copies, weights_only)
            of_ranks.append(found | {MODEL + name: weight for name, weight in weights.items() if name not in copies})
        groups.append(own)
        info = first.get("universal_checkpoint_info")
        for name, tensor in (of_ranks[0] if tp == 1 else _merged(of_ranks, info, models[0]["buffer_names"])).items():
            known = tensors.setdefault(name, tensor)
            if known is not tensor and not torch.equal(known, tensor):
                raise CheckpointError(f"holds different values of {name} on two pipeline stages, which can't be joined")
    buffers = {name for models, _ in ranks for name in models[0]["buffer_names"]}
    _check_named(tensors, groups, named | buffers)
    if layers:
        _rename_layers(tensors, groups)
        buffers = {f"layers.{name}" for name in buffers}
    for name in [name.removeprefix(MASTER) for name in tensors if name.startswith(MASTER)]:
        if tensors[MODEL + name].dtype == tensors[MASTER + name].dtype:
            tensors[MODEL + name] = tensors.pop(MASTER + name)
    return WholeCheckpoint(
        tensors,
        groups,
        _optimizer_type(first["ds_config"], groups),
        {key: int(first[key]) for key in ("global_steps", "global_samples", "skipped_steps")},
        first["lr_scheduler"],
        {key: value for key, value in first.items() if key not in _OWN_KEYS},
        copies,
        frozenset(buffers),
    )


def _check_named(tensors: Mapping[str, Tensor], groups: Sequence[Sequence[Json]], known: Set[str]) -> None:
    """Check that weights and masters belong together. known: at stage 0, the trained weights and the buffers."""
    weights = {name.removeprefix(MODEL) for name in tensors if name.startswith(MODEL)}
    masters = {name.removeprefix(MASTER) for name in tensors if name.startswith(MASTER)}
    if any(groups) and not masters and weights != known:
        raise CheckpointError(_UNNAMED)
    lacking = {name for name in masters - weights if not name.startswith("tied_modules.")}
    if lacking:
        raise CheckpointError(f"has masters of {min(lacking)}, but not its weights; copy the files of all nodes there")


def _partitioned(
    models: Sequence[Json], shards: Sequence[Json], weights_only: bool
) -> tuple[dict[str, Tensor], list[Json]]:
    """Return masters and moments, of which each replica has a part, at stage 3 also weights; and the optimizer's groups."""
    first = models[0]
    tensors: dict[str, Tensor] = {}
    groups = []
    is_stage3 = "fp32_flat_groups" in shards[0]
    masters, base = ("fp32_flat_groups", "optimizer_state_dict") if is_stage3 else _STAGES_1_AND_2
    if not isinstance(shards[0][base], dict):
        raise CheckpointError("was saved with zero_optimization.elastic_checkpoint; save it without")
    for place, group in enumerate(shards[0][base]["param_groups"]):
        names: list[str] = []
        for k in group["params"]:
            shapes: Mapping[str, torch.Size] = first["param_shapes"][k]
            paddings = shards[0].get("param_alignment_paddings") or [[0] * len(own) for own in first["param_shapes"]]
            states = [shard[base]["state"].get(k, {}) for shard in shards]
            values = {MASTER: [shard[masters][k] for shard in shards]}
            for key, value in () if weights_only else {**_step_of(group), **states[0]}.items():
                if isinstance(value, Tensor) and value.dim():
                    values[f"{OPTIMIZER}{key}/"] = [state[key] for state in states]
                else:
                    tensors |= {f"{OPTIMIZER}{key}/{name}": torch.tensor(float(value)) for name in shapes}
            for prefix, parts in values.items():
                whole = _zipped(parts, shapes) if is_stage3 else _cut(torch.cat(parts), shapes, paddings[k])
                tensors |= {prefix + name: tensor for name, tensor in whole.items()}
            names += shapes
        groups.append(_described(place, names, group))
    return tensors | (_stage3_weights(models, tensors) if is_stage3 else {}), groups


def _step_of(group: Mapping[str, Any]) -> Json:
    """Return the number of steps from a parameter group, where DeepSpeed's own optimizers keep it."""
    return {"step": group["step"]} if "step" in group else {}


def _described(place: int, names: Iterable[str], group: Mapping[str, Any]) -> Json:
    settings = {key: encode(group[key], key, {}) for key in _SETTINGS if key in group}
    return {"names": sorted(names), "settings": settings, "place": place}


def _cut(flat: Tensor, shapes: Mapping[str, Sequence[int]], paddings: Sequence[int]) -> dict[str, Tensor]:
    """Return the parameters that follow each other in a flat tensor, each followed by its padding."""
    found, begin = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        found[name] = flat.narrow(0, begin, math.prod(shape)).view(*shape)
        begin += math.prod(shape) + padding
    return found


def _zipped(parts: Sequence[Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Join the parameters of stage 3, of each of which every replica has an equal part, the last one padded."""
    found, begin = {}, 0
    for name, shape in shapes.items():
        size = -(-math.prod(shape) // len(parts))
        found[name] = torch.cat([part.narrow(0, begin, size) for part in parts])[: math.prod(shape)].view(*shape)
        begin += size
    return found


def _stage3_weights(models: Sequence[Json], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of stage 3 in their dtype: the trained ones, of which only masters are stored, and frozen ones."""
    dtypes = {name: placeholder.dtype for name, placeholder in models[0]["module"].items()}
    masters = {_parameter(name): master for name, master in trained.items() if name.startswith(MASTER)}
    weights = {MODEL + name: master.to(dtypes[name]) for name, master in masters.items()}
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name].flatten() for model in models]
        weights[MODEL + name] = _zipped(parts, {name: shape})[name]
    return weights


def _replicated(
    first: Json, weights: Mapping[str, Tensor], named: set[str], copies: dict[str, str], weights_only: bool
) -> tuple[dict[str, Tensor], list[Json]]:
    """Return masters and moments of stage 0, and the optimizer's groups.

    Their names are not stored: they are in the order of the module in each group, and masters have the weights' values.

    - named: the weights of earlier pipeline stages, to which this adds its own.
    - copies: receives name -> name of the weight whose memory it shares.
    """
    optimizer = first["optimizer"]
    if optimizer is None or weights_only:
        return {}, []
    inner = optimizer.get("optimizer_state_dict", optimizer)
    states = [[inner["state"].get(k, {}) for k in group["params"]] for group in inner["param_groups"]]
    masters = optimizer.get("fp32_groups_flat") or [_flat(group) for group in optimizer.get("fp32_groups", [])]
    known = named.union(first["buffer_names"])
    candidates = {name: weight for name, weight in weights.items() if name not in known}
    shapes = _in_order(candidates, states, masters, copies)
    named.update(name for own in shapes for name in own)
    tensors: dict[str, Tensor] = {}
    groups = []
    for g, group in enumerate(inner["param_groups"]):
        names, own = shapes[g], states[g]
        own = own * len(names) if masters and len(own) == 1 else own  # flat: one state for all
        if len(own) != len(names):
            raise CheckpointError(_UNNAMED)
        flats = {MASTER: masters[g]} if masters else {}
        for key, value in {**_step_of(group), **own[0]}.items():
            if isinstance(value, Tensor) and value.dim():
                flats[f"{OPTIMIZER}{key}/"] = _flat([state[key] for state in states[g]])
            else:
                numbers = (torch.tensor(float(state.get(key, value))) for state in own)
                tensors |= {f"{OPTIMIZER}{key}/{name}": number for name, number in zip(names, numbers, strict=True)}
        for prefix, flat in flats.items():
            if sum(map(math.prod, names.values())) != flat.numel():
                raise CheckpointError(_UNNAMED)
            tensors |= {prefix + name: tensor for name, tensor in _cut(flat, names, [0] * len(names)).items()}
        groups.append(_described(g, names, group))
    return tensors, groups


def _parameter(name: str) -> str:
    """Return the parameter's name from the name of a stored tensor."""
    return name.split("/", 2 if name.startswith(OPTIMIZER) else 1)[-1]


def _in_order(
    weights: Mapping[str, Tensor], states: Sequence[Sequence[Json]], masters: Sequence[Tensor], copies: dict[str, str]
) -> list[dict[str, torch.Size]]:
    """Return the names and shapes of each group's parameters: each weight is the next one of the group that it fits."""
    shapes: list[dict[str, torch.Size]] = [{} for _ in states]
    seen: dict[int, str] = {}
    for name, weight in weights.items():
        if (original := seen.setdefault(weight.data_ptr(), name)) != name:
            copies[name] = original
            continue
        fitting = []
        for g, own in enumerate(states):
            if masters:
                part = masters[g][sum(map(math.prod, shapes[g].values())) :][: weight.numel()]
                fits = torch.equal(part.to(weight.dtype), weight.flatten())
            else:
                known = len(shapes[g])
                fits = known < len(own) and own[known].get("exp_avg", weight).shape == weight.shape
            fitting += [g] if fits else []
        if len(fitting) > 1:
            raise CheckpointError(_UNNAMED)
        for g in fitting:
            shapes[g][name] = weight.shape
    return shapes


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _merged(of_ranks: Sequence[Mapping[str, Tensor]], info: Json | None, buffers: Container[str]) -> dict[str, Tensor]:
    """Return whole tensors from those of the tensor-parallel ranks. info: which names are sharded how."""
    if info is None:
        raise CheckpointError(
            f"is sharded over {len(of_ranks)} tensor-parallel ranks, and no universal_checkpoint_info says along which dims; "
            "save it with this key in client_state, as AutoTP and Megatron-DeepSpeed do"
        )
    merged = {}
    for name in of_ranks[0]:
        parts, parameter = [own[name] for own in of_ranks], _parameter(name)
        is_whole = parameter in buffers or not parts[0].dim()
        merged[name] = parts[0] if is_whole else _joined(parameter, parts, info)
    return merged


def _joined(parameter: str, parts: list[Tensor], info: Json) -> Tensor:
    def is_in(key: str, names: Iterable[str] = ()) -> bool:
        return any(re.match(pattern, parameter) for pattern in (*info.get(key, ()), *names))

    fused = [pattern for one in info.get("parameter_with_sub_params", ()) for pattern in one["patterns"]]
    if is_in("autotp_unsupported_parameter_patterns", fused):
        raise CheckpointError(f"shards {parameter} in a way that is not read here; save it without tensor parallelism")
    if is_in("tp_replicated_parameter_patterns"):
        return parts[0]
    if is_in("parameter_to_average_patterns"):
        return torch.stack(parts).mean(0)
    if is_in("parameter_with_2_sub_params_cat_dim_0"):
        return torch.cat([torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)])
    whole = torch.cat(parts, int(is_in("parameter_with_row_parallelism_patterns")))
    return whole[: info["original_vocab_size"]] if is_in("vocabulary_parameter_patterns") else whole


def _rename_layers(tensors: dict[str, Tensor], groups: Sequence[Sequence[Json]]) -> None:
    """Give parameters of a pipeline, "<k>.<name>" or "tied_modules.<key>.<name>", the names of this package's pipelines."""
    weights = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    new = {name: f"layers.{name}" for name in weights}
    for tied in [name.removeprefix(MASTER) for name in tensors if name.startswith(f"{MASTER}tied_modules.")]:
        end, master = "." + tied.split(".", 2)[2], tensors[MASTER + tied]
        copies = [
            name
            for name, weight in weights.items()
            if name.lstrip("0123456789") == end and MASTER + name not in tensors
            if torch.equal(weight, master.to(weight.dtype))
        ]
        if not copies:
            raise CheckpointError(f"has no layer_*-model_states.pt with the weights of {tied}; copy all files there")
        first = min(copies, key=lambda name: int(name.split(".")[0]))
        new[tied] = f"layers.{first}"
        for copy in copies:
            new[copy] = f"layers.{first}"
    for name in list(tensors):
        parameter = _parameter(name)
        tensors[name.removesuffix(parameter) + new[parameter]] = tensors.pop(name)
    for group in (group for own in groups for group in own):
        group["names"] = sorted(new[name] for name in group["names"])


def _optimizer_type(config: Any, groups: Sequence[Sequence[Json]]) -> str:
    """Return the name of the optimizer's class as it is here; DeepSpeed's own Adams become torch's."""
    declared = (config.get("optimizer") or {}) if isinstance(config, dict) else {}
    name: str = declared.get("type", "AdamW")
    if "adam" not in name.lower():
        return name
    decoupled = declared.get("params", {}).get("adam_w_mode", True) or name.lower() == "adamw"
    settings = groups[0][0]["settings"] if groups and groups[0] else {}
    return "AdamW" if settings.get("decoupled_weight_decay", decoupled) else "Adam"
