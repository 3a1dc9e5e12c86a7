"""Checkpoint of whole tensors, as read from other programs' files, and the code that writes it in this package's format."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.checkpoint.directory import PendingSave, check_tag
from parallel3d.checkpoint.format import Manifest
from parallel3d.checkpoint.optimizer import merge_groups
from parallel3d.checkpoint.parts import parts_of
from parallel3d.checkpoint.save import write_parts
from parallel3d.checkpoint.values import encode
from parallel3d.errors import CheckpointError

Json = dict[str, Any]


@dataclass(frozen=True)
class WholeCheckpoint:
    """State of a training that another program saved.

    - tensors: name in a checkpoint of this package (see format.py) -> whole tensor.
    - groups: for each pipeline stage, the optimizer's groups, see describe_groups.
    - copies: name of a parameter that is tied to another one -> that one's name.
    - buffers: names of buffers, if the other program distinguishes them from frozen parameters.
    """

    tensors: Mapping[str, Tensor]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    optimizer: str
    counters: Mapping[str, int]
    lr_scheduler: Any = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    def write(self, save_dir: Path, tag: str) -> list[str]:
        """Write <save_dir>/<tag>, which `latest` then names; return why values are left out that no checkpoint can hold.

        Training continues with the generators and the data as they are. Raises CheckpointError; then nothing is written.
        """
        tensors, left_out = dict(self.tensors), []

        def encoded(value: Any, path: str) -> Any:
            held: dict[str, Tensor] = {}
            try:
                result = encode(value, path, held)
            except CheckpointError as error:
                left_out.append(str(error))
                return None
            tensors.update(held)
            return result

        state = {
            "layout": {"pipe": 1, "data": 1, "model": 1},
            "counters": dict(self.counters),
            "loss_scaler": None,
            "streams": {},
            "lr_scheduler": encoded(self.lr_scheduler, "lr_scheduler"),
            "client_state": {key: encoded(value, f"client_state.{key}") for key, value in self.client_state.items()},
            "optimizer": {"type": self.optimizer, "groups": merge_groups(self.groups), "numbers": {}},
            "left_out": [],
            "huggingface": None,
            "copies": dict(self.copies),
        }
        own: Json = {"generators": None, "data": None, "replica": {}}
        parts = [part for name, tensor in tensors.items() for part in parts_of(name, tensor)]
        try:
            pending = PendingSave(save_dir, check_tag(tag))
            try:
                written = write_parts(pending.path, 0, parts, may_thread=True)
                entries = {"tag": tag, "saved": time.time(), "latest": True, **written}
                pending.commit(Manifest.model_validate({**entries, "state": state, "ranks": [own]}))
            finally:
                pending.end()
        except OSError as error:
            raise CheckpointError(f"{save_dir / tag} can't be written: {error}; write to another directory") from error
        return left_out
