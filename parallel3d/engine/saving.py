"""Checkpoints of an engine: what it puts into one, and takes out of one again."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.activity import ACTIVITY, Phase
from parallel3d.checkpoint.directory import complete_checkpoints, other_tags
from parallel3d.checkpoint.export import write_one_file
from parallel3d.checkpoint.files import SINGLE
from parallel3d.checkpoint.format import MASTER, MODEL
from parallel3d.checkpoint.load import Wanted, agree_to_read, find_checkpoint
from parallel3d.checkpoint.names import huggingface_names, merge_names
from parallel3d.checkpoint.optimizer import OptimizerTarget, describe_groups, merge_groups
from parallel3d.checkpoint.parts import (
    Part,
    frozen,
    masters,
    optimizer_state,
    parts_of,
    persistent_buffers,
    weights,
)
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.save import Contents, Meeting, Saver
from parallel3d.checkpoint.values import decode, encode
from parallel3d.checkpoint.write import checksum
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.data import RepeatingLoader
from parallel3d.engine.calls import StepByCalls
from parallel3d.engine.loading import BatchLoader
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import CheckpointError
from parallel3d.parameters import slicing_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import RandomStreams, generator_states, set_generator_states

Location = str | os.PathLike[str]
Json = dict[str, Any]


def _other_state(model: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """What a state_dict holds besides the layers' parameters: buffers, as of running means, and the loss function's own."""
    for layer, module in model.layers.items():
        for name, buffer in persistent_buffers(module):
            yield MODEL + model.global_name(int(layer), name), buffer
    if isinstance(model.loss_fn, nn.Module):
        for name, tensor in (*model.loss_fn.named_parameters(), *persistent_buffers(model.loss_fn)):
            yield f"{MODEL}loss_fn.{name}", tensor


class ReplicaState:
    """What modules of this replica hold that differs from the first's, as running means of the data that it saw."""

    def __init__(self, model: PipelineModule):
        self._model = model
        self.settle({})

    def settle(self, own: Mapping[str, Tensor]) -> None:
        """From now on what is written to counts as its own, and what is in `own`, by name, which is copied here."""
        tensors = dict(_other_state(self._model))
        for name, value in own.items():
            if name in tensors:
                tensors[name].data.copy_(value)
        self._own = set(own)
        self._seen = self._checksums()

    def _checksums(self) -> dict[str, int]:
        """Not the tensors' versions: torch's batch norm writes without counting."""
        if self._model.groups.coordinate("data") == 0:
            return {}
        return {name: checksum(tensor.cpu().contiguous()) for name, tensor in _other_state(self._model)}

    def own(self) -> dict[str, Tensor]:
        """By name; of the first replica nothing."""
        now = self._checksums()
        changed = {name for name, value in now.items() if name in self._own or self._seen.get(name) != value}
        return {name: tensor for name, tensor in _other_state(self._model) if name in changed}


def _parts(model: PipelineModule, update: WeightUpdate, exclude_frozen: bool) -> tuple[list[Part], Json]:
    """The tensors of this rank, and what of the optimizer's state is no tensor."""
    update.sharded.follow_weights()
    buckets = list(update.reducer.all_buckets())
    state = optimizer_state(update.optimizer, buckets)
    parts = [*weights(buckets), *masters(buckets, wider_alone=True), *state.parts]
    if not exclude_frozen:
        parts += frozen(model.frozen_infos())
    # Replicas may differ in these, as in what they saw of the data: the first one's are saved.
    for name, tensor in _other_state(model) if model.groups.coordinate("data") == 0 else ():
        if slicing_of(tensor) is not None or model.groups.coordinate("model") == 0:
            parts += parts_of(name, tensor, tensor)
    return parts, {"groups": describe_groups(update.optimizer, buckets), "numbers": state.numbers}


def _layout(model: PipelineModule) -> dict[str, int]:
    groups = model.groups
    return {"pipe": groups.pipe.size, "data": groups.data.size, "model": groups.model.size}


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
    _meeting: Meeting
    _saver: Saver
    _replica_state: ReplicaState

    def _set_up_checkpoints(self) -> None:
        self._meeting = Meeting(self._groups.control, self.config.checkpoint.timeout_s)
        self._saver = Saver(self._meeting, self.config.checkpoint)
        self._replica_state = ReplicaState(self._model)

    @ACTIVITY.untimed(Phase.SAVING)
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
            parts, optimizer = _parts(self._model, self._update, exclude_frozen_parameters)
            tensors: dict[str, Tensor] = {}
            own = {"optimizer": optimizer, "rank": encode(self._own_state(), f"rank{self._groups.rank}", tensors)}
            own["huggingface"] = huggingface_names(self._model.layers_by_place(), self._model.global_name)
            own["frozen"] = [info.name for info in self._model.frozen_infos()] if exclude_frozen_parameters else []
            if self._groups.rank == 0:
                state = {**self._shared_state(), "client_state": dict(client_state or {})}
                own["shared"] = {key: encode(value, key, tensors) for key, value in state.items()}
            parts += [part for path, value in tensors.items() for part in parts_of(path, value, value)]
            return Contents(parts, own)

        self._saver.save(place, name, save_latest, collect, self._summarize)
        return True

    @ACTIVITY.untimed(Phase.SAVING)
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
            parts, _ = _parts(self._model, self._update, exclude_frozen_parameters)
            return Contents([part for part in parts if part.name.startswith(MODEL)], {})

        def assemble() -> Json:
            if self._groups.rank == 0:
                write_one_file(beside / "weights", place / save_filename)
                shutil.rmtree(beside)
            return {}

        beside = place / f".{save_filename}.parts"
        self._saver.save(beside, "weights", False, collect, lambda everyone: ({}, [{} for _ in everyone]))
        self._saver.wait()
        self._meeting.attempt("save_16bit_model", assemble, lambda values: [None] * len(values))
        return True

    @ACTIVITY.untimed(Phase.SAVING)
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
            "layout": _layout(self._model),
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

    @ACTIVITY.untimed(Phase.SAVING)
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
        path = find_checkpoint(self._meeting, Path(load_dir), None if tag is None else str(tag))
        if path is None:
            return None, None
        strict = strict if load_module_strict is None else load_module_strict
        loading = _Loading(self._model, self._update, path)
        everything = not load_module_only
        self._meeting.attempt(
            "load_checkpoint, reading the manifest",
            lambda: loading.prepare(everything and load_optimizer_states, self._groups.rank),
            lambda values: [None] * len(values),
        )
        agree_to_read(self._meeting, loading.reader, loading.wanted, strict)
        self._meeting.attempt(
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

        tags: list[str] = self._meeting.meet("resume", {"directory": place}, choose)
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

    def _take_over(self, loading: _Loading, everything: bool, scheduler: bool) -> Json:
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

    def _go_on(self, loading: _Loading, scheduler: bool) -> None:
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


class _Loading:
    """A checkpoint on its way into an engine. state: what is one for all ranks; the others: this rank's own."""

    state: Json
    generators: Json
    data: Json | None
    replica: dict[str, Tensor]

    def __init__(self, model: PipelineModule, update: WeightUpdate, path: Path):
        self._model, self._update, self._path = model, update, path
        self.wanted = Wanted()
        self.optimizer: OptimizerTarget | None = None

    def prepare(self, with_optimizer: bool, rank: int) -> Json:
        """Find out what is to be read; read what isn't the model's."""
        try:
            self.reader = Reader(self._path)
            self._model.wait_for_weights(self._model)
            self._want_model()
            if with_optimizer:
                self.optimizer = OptimizerTarget(
                    self._update.optimizer, list(self._update.reducer.all_buckets()), self.reader
                )
                self.optimizer.want(self.wanted)
            manifest = self.reader.manifest
            others = {key: value for key, value in manifest.state.items() if key not in ("optimizer", "huggingface")}
            self.state = decode(others, self.reader.read)
            self._read_own_state(manifest.ranks, rank)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{other_tags(self._path.parent, self._path.name)}") from None
        return {}

    def _read_own_state(self, ranks: list[Json], rank: int) -> None:
        """Where this rank's generators and data go on, and what is its replica's own."""
        same = self.state["layout"] == _layout(self._model)
        # In a world of another size there may be no rank of that number. Rank 0 reads the first inputs in any layout.
        self.generators = decode(ranks[rank % len(ranks)]["generators"], self.reader.read)
        self.data = decode(ranks[rank if same else 0]["data"], self.reader.read)
        self.replica = decode(ranks[rank]["replica"], self.reader.read) if same else {}
        if not same and self.data is not None and "taken" in self.data:
            replicas = self._model.groups.data.size
            self.data["taken"] = self.data["taken"] * self.state["layout"]["data"] // replicas

    def _want_model(self) -> None:
        left_out = set(self.reader.manifest.state["left_out"])
        buckets = list(self._update.reducer.all_buckets())
        for part in masters(buckets, wider_alone=False):
            name = part.name.removeprefix(MASTER)
            self.wanted.known.append(MODEL + name)
            self.wanted.add(self.reader, part, part.name if part.name in self.reader.tensors else MODEL + name)
        others = [part for name, tensor in _other_state(self._model) for part in parts_of(name, tensor, tensor)]
        for part in (*frozen(self._model.frozen_infos()), *others):
            self.wanted.known.append(part.name)
            if part.name.removeprefix(MODEL) not in left_out:
                self.wanted.add(self.reader, part)

    def read(self) -> None:
        """Change what the rank holds."""
        for source, part in self.wanted.targets:
            self.reader.read_into(source, part.box, part.values)
        if self.optimizer is not None:
            self.optimizer.apply()
