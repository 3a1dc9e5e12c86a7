"""An optimizer's state to a checkpoint and back, by the names of parameters: torch's own load_state_dict takes it in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.format import MODEL, OPTIMIZER, StoredTensor
from parallel3d.checkpoint.load import Wanted
from parallel3d.checkpoint.parts import own_state_name, state_name, state_parts
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.values import decode, encode
from parallel3d.errors import CheckpointError
from parallel3d.parameters import whole_shape
from parallel3d.zero.buckets import Bucket, ParameterShard

# Settings of a group that say how this process computes, or name its tensors, and not what.
_OWN_SETTINGS = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")


def describe_groups(optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket]) -> list[dict[str, Any]]:
    """The parameter groups as JSON: names of the parameters in them, and settings."""
    names = {piece.master: piece.info.name for bucket in buckets for piece in bucket.pieces}
    described = []
    for place, group in enumerate(optimizer.param_groups):
        tensors: dict[str, Tensor] = {}
        settings = {k: _number(v) for k, v in group.items() if k not in _OWN_SETTINGS}
        encoded = encode(settings, f"optimizer.param_groups.{place}", tensors)
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))} is a tensor of several elements, which no checkpoint holds")
        described.append({"names": sorted({names[p] for p in group["params"]}), "settings": encoded, "place": place})
    return described


def _number(value: Any) -> Any:
    """A learning rate in a tensor, which a captured graph reads, as the number that it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def merge_groups(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The groups of all ranks: those at one place with the same settings are one."""
    merged: dict[str, dict[str, Any]] = {}
    for group in (group for own in everyone for group in own):
        key = json.dumps([group["place"], group["settings"]], sort_keys=True)
        one = merged.setdefault(key, {**group, "names": set()})
        one["names"].update(group["names"])
    return [{**group, "names": sorted(group["names"])} for group in merged.values()]


class OptimizerTarget:
    """A rank's optimizer, to be given the state of a checkpoint: `wanted` says what is read into it before `apply`."""

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Iterable[Bucket], reader: Reader):
        self._optimizer, self._reader = optimizer, reader
        self._pieces = [piece for bucket in buckets for piece in bucket.pieces]
        self._saved = reader.manifest.state["optimizer"]
        self._check_type()
        names = (name for name in reader.tensors if name.startswith(OPTIMIZER))
        self._keys = list(dict.fromkeys(name.split("/", 2)[1] for name in names))
        self._state: dict[Tensor, dict[str, Any]] = {}

    def _check_type(self) -> None:
        mine, saved = type(self._optimizer).__name__, self._saved["type"]
        if mine != saved:
            raise CheckpointError(
                f"{self._reader.directory} holds the state of optimizer {saved}, and this engine has {mine}; use {saved}, or "
                "load the weights without it: load_optimizer_states=False, or load_module_only=True"
            )

    @torch.no_grad()
    def want(self, wanted: Wanted) -> None:
        """Add what is to be read, into memory of its own where the optimizer has none for it. Raises CheckpointError."""
        self._groups = [self._settings(place, group) for place, group in enumerate(self._optimizer.param_groups)]
        trained = {name for group in self._saved["groups"] for name in group["names"]}
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        for piece in self._pieces:
            name, stored = piece.info.name, self._reader.tensors.get(MODEL + piece.info.name)
            if piece.master not in held or stored is None or stored.shape != whole_shape(piece.info.parameter):
                continue  # of a weight that doesn't fit, the state fits no better
            if name not in trained:
                wanted.missing.append(f"{OPTIMIZER}*/{name} (the optimizer didn't hold it)")
            state: dict[str, Any] = dict(self._saved["numbers"].get(name, {}))
            for key in self._keys:
                source = self._source(piece, key, wanted)
                if source is not None:
                    state[key] = self._memory(piece, key, source)
                    for part in state_parts(piece, key, state[key]):
                        wanted.add(self._reader, part)
            self._state[piece.master] = state

    def _source(self, piece: ParameterShard, key: str, wanted: Wanted) -> StoredTensor | None:
        """The tensor that holds a piece's state of that key, None for no such state."""
        tensors, name = self._reader.tensors, state_name(piece, key)
        own = own_state_name(piece, key)
        if name in tensors and (own == name or tensors[name].shape in ((), whole_shape(piece.info.parameter))):
            return tensors[name]
        if own in tensors:
            return tensors[own]
        if any(other.startswith((f"{name} of dim", f"{name} from")) or other == name for other in tensors):
            wanted.missing.append(f"{own} (it fits the layout that saved it alone)")
        return None

    def _memory(self, piece: ParameterShard, key: str, stored: StoredTensor) -> Tensor:
        elementwise = stored.shape == whole_shape(piece.info.parameter)
        shape = tuple(piece.master.shape) if elementwise else stored.shape
        held = self._optimizer.state.get(piece.master, {}).get(key)
        if isinstance(held, Tensor) and tuple(held.shape) == shape and held.dtype == stored.torch_dtype:
            return held
        if elementwise:
            return torch.zeros_like(piece.master, dtype=stored.torch_dtype, requires_grad=False)
        return torch.zeros(shape, dtype=stored.torch_dtype, device=piece.master.device if shape else "cpu")

    def apply(self) -> None:
        """Make what has been read the optimizer's state, and the saved settings its groups'."""
        number = {piece.master: k for k, piece in enumerate(self._pieces)}
        groups = [
            {**settings, "params": [number[p] for p in group["params"]]}
            for settings, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]
        tensors = [p for group in self._optimizer.param_groups for p in group["params"]]
        state = {number[p]: self._state[p] for p in tensors if self._state.get(p)}
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _settings(self, place: int, group: Mapping[str, Any]) -> dict[str, Any]:
        names = {piece.master: piece.info.name for piece in self._pieces}
        own = {names[p] for p in group["params"]}
        saved = [s for s in self._saved["groups"] if own & set(s["names"])]
        saved = saved or [s for s in self._saved["groups"] if s["place"] == place]
        if any(s["settings"] != saved[0]["settings"] for s in saved):
            raise CheckpointError(
                f"parameter group {place} joins parameters that were saved with different settings, {saved[0]['settings']} "
                f"and others; make the same groups as before, or pass load_optimizer_states=False"
            )
        restored = decode(saved[0]["settings"], self._reader.read) if saved else {}
        kept = {key: value for key, value in group.items() if key != "params"}
        for key, value in restored.items():
            if isinstance(kept.get(key), Tensor):
                value = kept[key].clone().fill_(value)
            kept[key] = value
        return kept
