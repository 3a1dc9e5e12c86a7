"""An optimizer's state in a checkpoint, by the names of parameters; torch's own load_state_dict loads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.format import MODEL, OPTIMIZER, StoredTensor
from parallel3d.checkpoint.parts import own_state_name, state_name, state_parts
from parallel3d.checkpoint.read import Reader, Wanted
from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError
from parallel3d.parameters import whole_shape
from parallel3d.zero.buckets import Bucket, ParameterShard
from parallel3d.zero.memory import is_elementwise_state

# Settings of a group that concern only this process: how it computes, and its tensors.
_OWN_SETTINGS = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
# Settings that learning-rate schedules change. Settings that no optimizer has, such as "initial_lr", are schedules' too.
_SCHEDULED = ("lr", "betas", "momentum")


def describe_groups(optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]) -> list[dict[str, Any]]:
    """Return the parameter groups as JSON: the names of their parameters, and their settings."""
    names = {shard.master: shard.info.name for bucket in buckets for shard in bucket.shards}
    described = []
    for place, group in enumerate(optimizer.param_groups):
        tensors: dict[str, Tensor] = {}
        settings = {k: v for k, v in group.items() if k not in _OWN_SETTINGS}
        for key, value in settings.items():
            if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate that a captured graph reads
                settings[key] = value.item()
        encoded = encode(settings, f"optimizer.param_groups.{place}", tensors)
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))} is a tensor of several elements, which no checkpoint holds")
        described.append({"names": sorted({names[p] for p in group["params"]}), "settings": encoded, "place": place})
    return described


def merge_groups(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the groups of all ranks: groups at one index with the same settings become one."""
    merged: dict[str, dict[str, Any]] = {}
    for group in (group for own in everyone for group in own):
        key = json.dumps([group["place"], group["settings"]], sort_keys=True)
        one = merged.setdefault(key, {**group, "names": set()})
        one["names"].update(group["names"])
    return [{**group, "names": sorted(group["names"])} for group in merged.values()]


class OptimizerTarget:
    """Optimizer of a rank, into which the state of a checkpoint is loaded.

    The constructor adds the tensors to read to `wanted`, with new memory if the optimizer has none for them.
    keeps_schedule: settings of the groups that a learning-rate schedule changes are kept, since the schedule is not loaded.
    Raises CheckpointError.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Iterable[Bucket],
        keeps_schedule: bool,
        reader: Reader,
        wanted: Wanted,
    ):
        self._optimizer, self._reader, self._wanted = optimizer, reader, wanted
        self._keeps_schedule = keeps_schedule
        self._saved = reader.manifest.state["optimizer"]
        mine, saved = type(optimizer).__name__, self._saved["type"]
        if mine != saved:
            raise CheckpointError(
                f"{reader.directory} holds the state of optimizer {saved}, and this engine has {mine}; use {saved}, or "
                "load the weights without it: load_optimizer_states=False, or load_module_only=True"
            )
        pairs = [(bucket, shard) for bucket in buckets for shard in bucket.shards]
        shards = {shard.master: shard for _, shard in pairs}
        self._groups = [self._restored(place, group, shards) for place, group in enumerate(optimizer.param_groups)]
        keys = dict.fromkeys(name.split("/", 2)[1] for name in reader.tensors if name.startswith(OPTIMIZER))
        trained = {name for group in self._saved["groups"] for name in group["names"]}
        held = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        # Masters in the order in which a step makes their state: bucket by bucket where that is offloaded.
        self._order = list(shards) if any(bucket.is_offloaded for bucket, _ in pairs) else list(held)
        self._state: dict[Tensor, dict[str, Any]] = {}
        for master, shard in shards.items():
            name, stored = shard.info.name, reader.tensors.get(MODEL + shard.info.name)
            if stored is None or stored.shape != whole_shape(shard.info.parameter):
                continue  # the weight doesn't fit, so its state doesn't either
            if (name in trained) != (master in held):
                whose = "this engine's optimizer doesn't" if name in trained else "the optimizer didn't"
                wanted.missing.add(f"{OPTIMIZER}*/{name} ({whose} hold it)")
            if master not in held:
                continue
            self._state[master] = {**self._saved["numbers"].get(name, {}), **self._tensors(shard, keys)}

    def _tensors(self, shard: ParameterShard, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors that the shard's state is read into, by the state's keys."""
        tensors = {}
        for key in keys:
            source = self._source(shard, key)
            if source is not None:
                tensors[key] = self._memory(shard, key, source)
                self._wanted.add(self._reader, state_parts(shard, key, tensors[key]))
        return tensors

    def _source(self, shard: ParameterShard, key: str) -> StoredTensor | None:
        """Return the stored tensor of a shard's state `key`; None if there is none."""
        stored, name, own = self._reader.tensors, state_name(shard, key), own_state_name(shard, key)
        if name in stored and (own == name or stored[name].shape in ((), whole_shape(shard.info.parameter))):
            return stored[name]
        if own in stored:
            return stored[own]
        if any(other.startswith((f"{name} of dim", f"{name} from")) or other == name for other in stored):
            self._wanted.missing.add(f"{own} (it fits the layout that saved it alone)")
        return None

    @torch.no_grad()
    def _memory(self, shard: ParameterShard, key: str, stored: StoredTensor) -> Tensor:
        """Return the optimizer's tensor of a shard's state `key`, or a new one."""
        elementwise = is_elementwise_state(key, stored.shape, whole_shape(shard.info.parameter))
        shape = tuple(shard.master.shape) if elementwise else stored.shape
        held = self._optimizer.state.get(shard.master, {}).get(key)
        if isinstance(held, Tensor) and tuple(held.shape) == shape and held.dtype == stored.torch_dtype:
            return held
        if elementwise:
            return torch.zeros_like(shard.master, dtype=stored.torch_dtype, requires_grad=False)
        return torch.zeros(shape, dtype=stored.torch_dtype, device=shard.master.device if shape else "cpu")

    def apply(self) -> None:
        """Load the tensors that were read as the optimizer's state, and the saved settings into its groups."""
        groups = [
            {**settings, "params": [id(p) for p in group["params"]]}
            for settings, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]
        state = {id(master): self._state[master] for master in self._order if self._state.get(master)}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _restored(self, place: int, group: Mapping[str, Any], shards: Mapping[Any, ParameterShard]) -> dict[str, Any]:
        """Return the settings of a group, with saved values in place of its own."""
        own = {shards[p].info.name for p in group["params"]}
        saved = [s for s in self._saved["groups"] if own & set(s["names"])]
        saved = saved or [s for s in self._saved["groups"] if s["place"] == place]
        if any(s["settings"] != saved[0]["settings"] for s in saved):
            raise CheckpointError(
                f"parameter group {place} joins parameters that were saved with different settings, {saved[0]['settings']} "
                f"and others; make the same groups as before, or pass load_optimizer_states=False"
            )
        settings = {key: value for key, value in group.items() if key != "params"}
        for key, value in decode(saved[0]["settings"], self._reader.read).items() if saved else ():
            if self._keeps_schedule and (key in _SCHEDULED or key not in self._optimizer.defaults):
                continue
            is_tensor = isinstance(settings.get(key), Tensor)
            settings[key] = settings[key].clone().fill_(value) if is_tensor else value
        return settings
