"""Checkpoints of an engine: what it puts into one, and takes out of one again."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.directory import complete_checkpoints
from parallel3d.checkpoint.export import write_one_file
from parallel3d.checkpoint.files import SINGLE
from parallel3d.checkpoint.format import MODEL
from parallel3d.checkpoint.load import agree_to_read, find_checkpoint
from parallel3d.checkpoint.names import huggingface_names, merge_names
from parallel3d.checkpoint.optimizer import merge_groups
from parallel3d.checkpoint.parts import (
    parts_of,
)
from parallel3d.checkpoint.save import Contents, Saver
from parallel3d.checkpoint.values import encode
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.engine.attributed import untimed
from parallel3d.engine.calls import StepByCalls
from parallel3d.engine.contents import Json, ReplicaState, layout_of, parts_of_engine
from parallel3d.engine.restoring import Loading
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import CheckpointError
from parallel3d.pipe.batch import BatchLoader
from parallel3d.pipe.data import RepeatingLoader
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import RandomStreams, generator_states, set_generator_states

Location = str | os.PathLike[str]


class Saving:
    """Saves and loads."""

    config: Config
    lr_scheduler: Any
    optimizer: torch.optim.Optimizer
    global_steps: int
    global_samples: int
    _calls: StepByCalls
    _data_iterator: Any
    _groups: ProcessGroups
    _loader: BatchLoader
    _model: PipelineModule
    _streams: RandomStreams
    _update: WeightUpdate
    _decision: CollectiveDecision
    _saver: Saver
    _replica_state: ReplicaState

    def _set_up_checkpoints(self) -> None:
        self._decision = CollectiveDecision(
            self._groups.control, "checkpoint", self.config.checkpoint.timeout_s, CheckpointError
        )
        self._saver = Saver(self._decision, self.config.checkpoint)
        self._replica_state = ReplicaState(self._model)

    @untimed
    def save_checkpoint(
        self,
        save_dir: Location,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that training goes on from, as <save_dir>/<tag>; True when it is saved.

        tag: "global_step<n>" by default; one that is there is replaced when all of the new one is on the disk. client_state:
        rank 0's; JSON's values, tensors, numpy's arrays, and lists, tuples and mappings of these. save_latest: whether the
        file `latest` shall name it. exclude_frozen_parameters: leave out parameters that aren't trained. With
        checkpoint.async_save this returns when a copy is taken. Collective over all ranks; raises CheckpointError on all,
        with checkpoint.async_save also for the save before.
        """
        place = Path(save_dir)
        name = f"global_step{self.global_steps}" if tag is None else str(tag)

        def collect() -> Contents:
            if done := self._calls.num_backwards:
                raise CheckpointError(f"{done} micro-batches of a step are done; save behind engine.step() of its last")
            parts, optimizer = parts_of_engine(self._model, self._update, exclude_frozen_parameters)
            tensors: dict[str, Tensor] = {}
            own = {"optimizer": optimizer, "rank": encode(self._own_state(), f"rank{self._groups.rank}", tensors)}
            own["huggingface"] = huggingface_names(self._model.layers, self._model.global_name)
            own["frozen"] = [info.name for info in self._model.frozen_infos()] if exclude_frozen_parameters else []
            if self._groups.rank == 0:
                state = {**self._shared_state(), "client_state": dict(client_state or {})}
                own["shared"] = {key: encode(value, key, tensors) for key, value in state.items()}
            parts += [part for path, value in tensors.items() for part in parts_of(path, value, value)]
            return Contents(parts, own)

        self._saver.save(place, name, save_latest, collect, self._summarize)
        return True

    @untimed
    def save_16bit_model(
        self, save_dir: Location, save_filename: str = SINGLE, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights that the layers compute with, in their dtype, as one file of safetensors under the model's names.

        The ranks write their parts beside it, of which rank 0, holding all weights, makes the file. Collective; raises
        CheckpointError on all ranks, also for a filename of a pickle, such as DeepSpeed's "pytorch_model.bin".
        """
        place = Path(save_dir)

        def collect() -> Contents:
            if not save_filename.endswith(".safetensors"):
                raise CheckpointError(
                    f"save_filename is {save_filename!r}; weights are safetensors: give {SINGLE!r}, say"
                )
            parts, _ = parts_of_engine(self._model, self._update, exclude_frozen_parameters)
            return Contents([part for part in parts if part.name.startswith(MODEL)], {})

        def assemble() -> Json:
            if self._groups.rank == 0:
                write_one_file(beside / "weights", place / save_filename)
                shutil.rmtree(beside)
            return {}

        beside = place / f".{save_filename}.parts"
        self._saver.save(beside, "weights", False, collect, lambda everyone: ({}, [{} for _ in everyone]))
        self._saver.wait()
        self._decision.attempt("save_16bit_model", assemble, lambda values: [None] * len(values))
        return True

    @untimed
    def wait_for_checkpoint(self) -> None:
        """Return when what checkpoint.async_save was to write is on the disk. Raises CheckpointError if it failed."""
        self._saver.wait()

    def _own_state(self) -> Json:
        iterator = self._data_iterator
        data = None
        if isinstance(iterator, RepeatingLoader):
            data = iterator.state_dict(self._loader.num_left(iterator))
        return {"generators": generator_states(self._model.device), "data": data, "replica": self._replica_state.own()}

    def _shared_state(self) -> Json:
        update, scheduler = self._update, self.lr_scheduler
        return {
            "layout": layout_of(self._model),
            "counters": {
                "global_steps": self.global_steps,
                "global_samples": self.global_samples,
                "skipped_steps": update.skipped_steps,
                "micro_steps": self._calls.micro_steps,
            },
            "loss_scaler": update.scaler.state_dict() if update.scaler is not None else None,
            "streams": self._streams.state_dict(),
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        }

    def _summarize(self, everyone: list[Json]) -> tuple[Json, list[Json]]:
        """On rank 0, of every rank's own: what is one for all, and what each keeps."""
        numbers: dict[str, Any] = {}
        for own in everyone:
            for name, values in own["optimizer"]["numbers"].items():
                numbers.setdefault(name, {}).update(values)
        optimizer = {
            "type": type(self.optimizer).__name__,
            "groups": merge_groups(own["optimizer"]["groups"] for own in everyone),
            "numbers": numbers,
        }
        left_out = sorted({name for own in everyone for name in own["frozen"]})
        huggingface = merge_names(own["huggingface"] for own in everyone)
        state = {**everyone[0]["shared"], "optimizer": optimizer, "left_out": left_out, "huggingface": huggingface}
        return state, [own["rank"] for own in everyone]

    @untimed
    def load_checkpoint(
        self,
        load_dir: Location,
        tag: object = None,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        strict: bool = True,
        load_module_strict: bool | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(path, client_state) of a checkpoint that any layout has saved: training goes on from there.

        tag: what `latest` names by default; (None, None) and a warning where there is no such file. load_module_only: the
        weights, and nothing else changes. strict: whether tensors that are missing, extra or of another shape are an error
        that lists them; otherwise what fits is loaded, with a warning. load_module_strict: DeepSpeed's name for strict.
        Where it raises CheckpointError, it does on all ranks, and what was found damaged has changed nothing. Collective.
        """
        self._saver.wait()
        path = find_checkpoint(self._decision, Path(load_dir), None if tag is None else str(tag))
        if path is None:
            return None, None
        strict = strict if load_module_strict is None else load_module_strict
        loading = Loading(self._model, self._update, path)
        everything = not load_module_only
        self._decision.attempt(
            "load_checkpoint, reading the manifest",
            lambda: loading.prepare(everything and load_optimizer_states, self._groups.rank),
            lambda values: [None] * len(values),
        )
        agree_to_read(self._decision, loading.reader, loading.wanted, strict)
        self._decision.attempt(
            "load_checkpoint, reading tensors",
            lambda: self._take_over(loading, everything, load_lr_scheduler_states),
            lambda values: [None] * len(values),
        )
        self._update.sharded.follow_masters()
        return str(path), loading.state["client_state"]

    def resume(self, load_dir: Location) -> dict[str, Any] | None:
        """Go on from the newest checkpoint of a directory that is whole; its client_state, or None where there is none.

        One call at the start of a script that may be restarted. Of those that were saved as the latest; with a warning it
        passes over one that turns out to be damaged, and what is not complete. Collective; raises CheckpointError on all
        ranks where none can be loaded, as when they are another model's.
        """
        self._saver.wait()
        place = str(Path(load_dir).absolute())

        def choose(values: list[Json]) -> list[list[str]]:
            complete = complete_checkpoints(Path(values[0]["directory"]))
            return [[found.tag for found in reversed(complete) if found.manifest.latest]] * len(values)

        tags: list[str] = self._decision.make("resume", {"directory": place}, choose)
        first: CheckpointError | None = None
        for tag in tags:
            try:
                return self.load_checkpoint(place, tag)[1]
            except CheckpointError as error:
                first = first or error
                if self._groups.rank == 0:
                    warnings.warn(f"resume passes over {tag!r}: {error}", stacklevel=2)
        if first is not None:
            raise first
        return None

    def _take_over(self, loading: Loading, everything: bool, scheduler: bool) -> Json:
        """What was checked becomes this engine's."""
        iterator = self._data_iterator
        if everything and loading.data is not None and isinstance(iterator, RepeatingLoader):
            iterator.load_state_dict(loading.data)
            self._loader.forget(iterator)
        loading.read()
        self._replica_state.settle(loading.replica)
        if everything:
            self._go_on(loading, scheduler)
        self._calls.restart()
        return {}

    def _go_on(self, loading: Loading, scheduler: bool) -> None:
        """Counters, schedule and generators are as they were when the checkpoint was saved."""
        state, counters = loading.state, loading.state["counters"]
        self.global_steps, self.global_samples = counters["global_steps"], counters["global_samples"]
        self._update.skipped_steps = counters["skipped_steps"]
        self._calls.micro_steps = counters["micro_steps"]
        self._streams.load_state_dict(state["streams"])
        if loading.optimizer is not None and self._update.scaler is not None and state["loss_scaler"] is not None:
            self._update.scaler.load_state_dict(state["loss_scaler"])
        if scheduler and state["lr_scheduler"] is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        # Last: what comes before draws from them.
        set_generator_states(loading.generators, self._model.device)
