"""Checkpoints of an engine: saving and loading the state of a training."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from parallel3d.activity import Phase
from parallel3d.checkpoint.directory import candidates, naming_others
from parallel3d.checkpoint.export import SINGLE, export_one_file, huggingface_names, merge_names
from parallel3d.checkpoint.format import MASTER, MODEL, TrainingState, checksum
from parallel3d.checkpoint.optimizer import OptimizerTarget, describe_groups, merge_groups
from parallel3d.checkpoint.parts import Part, parts_of, shard_parts, state_parts
from parallel3d.checkpoint.read import Reader, Wanted, agree_to_read, find_checkpoint
from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.values import decode, encode
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.config import CheckpointConfig
from parallel3d.engine.calls import StepProgress
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.optim.schedules import load_schedule
from parallel3d.parameters import persistent_buffers, slicing_of, with_extra_state
from parallel3d.pipe.batch import TrainingData
from parallel3d.pipe.module import PipelineModule, tied_copies
from parallel3d.rng import RandomStreams, generator_states, set_generator_states
from parallel3d.zero.weights import weights_of

Location = str | os.PathLike[str]
Json = dict[str, Any]


class Checkpoints:
    """Saves and loads the state of a training: weights, optimizer, progress, data and random streams.

    Collective over all ranks; raises CheckpointError on all.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: CheckpointConfig,
        update: WeightUpdate,
        progress: StepProgress,
        data: TrainingData,
        streams: RandomStreams,
    ):
        self._model, self._groups, self._update = model, model.groups, update
        self._progress, self._data, self._streams = progress, data, streams
        self._decision = CollectiveDecision(model.groups.control, "checkpoint", config.timeout_s, CheckpointError)
        self._saver = Saver(self._decision, config)
        self._replica_state = _ReplicaState(model)

    def save(
        self,
        save_dir: Location,
        tag: object,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        exclude_frozen_parameters: bool,
        scheduler: Any,
    ) -> None:
        """Save a checkpoint; see Engine.save_checkpoint. scheduler: the learning-rate schedule, or None."""
        if not save_dir:
            raise ConfigError(f"save_dir is {save_dir!r}; give a directory")
        name = f"global_step{self._progress.global_steps}" if tag is None else str(tag)

        def collect() -> tuple[list[Part], Json]:
            if (done := self._progress.num_backwards) and self._groups.rank == 0:
                warnings.warn(
                    f"{done} micro-batches of a step are done, whose gradients a checkpoint doesn't hold; save after "
                    "engine.step() of its last to keep what they give",
                    stacklevel=8,
                )
            parts, optimizer = _parts_of_engine(self._model, self._update, exclude_frozen_parameters)
            tensors: dict[str, Tensor] = {}
            own = {"optimizer": optimizer, "rank": encode(self._own_state(), f"rank{self._groups.rank}", tensors)}
            own["huggingface"] = huggingface_names(self._model.layers, self._model.global_name)
            extra = _extra_state(self._model) if self._groups.coordinate("data") == 0 else {}
            own["extra"] = {name: encode(m.get_extra_state(), name, tensors) for name, m in extra.items()}
            own["frozen"] = [info.name for info in self._update.frozen_infos] if exclude_frozen_parameters else []
            if self._groups.rank == 0:
                state = {**self._shared_state(scheduler), "client_state": dict(client_state or {})}
                own["shared"] = {key: encode(value, key, tensors) for key, value in state.items()}
            parts += [part for path, value in tensors.items() for part in parts_of(path, value)]
            return parts, own

        with self._untimed():
            self._saver.save(Path(save_dir), name, save_latest, collect, self._summarize)

    def save_16bit_model(
        self, save_dir: Location, save_filename: str = SINGLE, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the weights that the layers compute with, in their dtype, as one file under the model's names.

        Each rank writes its part next to the file; rank 0 then reads all parts and writes the file. Raises CheckpointError.
        """
        place = Path(save_dir)

        def collect() -> tuple[list[Part], Json]:
            parts, _ = _parts_of_engine(self._model, self._update, exclude_frozen_parameters)
            return [part for part in parts if part.name.startswith(MODEL)], {}

        def assemble() -> None:
            if self._groups.rank == 0:
                export_one_file(beside / "weights", place / save_filename)
                shutil.rmtree(beside)

        beside = place / f".{save_filename}.parts"
        with self._untimed():
            self._saver.save(beside, "weights", False, collect, lambda everyone: ({}, [{} for _ in everyone]))
            self._saver.wait()
            self._decision.attempt("save_16bit_model", assemble)
        return True

    def wait(self) -> None:
        """Wait until a save with checkpoint.async_save is on the disk. Raises CheckpointError if it failed."""
        with self._untimed():
            self._saver.wait()

    def _untimed(self) -> AbstractContextManager[None]:
        """Return a context for a save or a load, in which failures.timeout_s does not apply."""
        return self._groups.activity.untimed(Phase.SAVING)

    def _own_state(self) -> Json:
        generators, replica = generator_states(self._model.device), self._replica_state.own()
        return {"generators": generators, "data": self._data.state_dict(), "replica": replica}

    def _shared_state(self, scheduler: Any) -> Json:
        update, progress = self._update, self._progress
        return {
            "layout": _layout_of(self._model),
            "counters": {**progress.state_dict(), "skipped_steps": update.skipped_steps},
            "loss_scaler": update.scaler.state_dict() if update.scaler is not None else None,
            "streams": self._streams.state_dict(),
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "copies": tied_copies(self._model),
        }

    def _summarize(self, everyone: list[Json]) -> tuple[Json, list[Json]]:
        """Combine the states of all ranks, on rank 0. Returns (the state common to all, the state of each rank)."""
        numbers: dict[str, Any] = {}
        for own in everyone:
            for name, values in own["optimizer"]["numbers"].items():
                numbers.setdefault(name, {}).update(values)
        optimizer = {
            "type": type(self._update.optimizer).__name__,
            "groups": merge_groups(own["optimizer"]["groups"] for own in everyone),
            "numbers": numbers,
        }
        left_out = sorted({name for own in everyone for name in own["frozen"]})
        huggingface = merge_names(own["huggingface"] for own in everyone)
        extra = {name: value for own in reversed(everyone) for name, value in own["extra"].items()}
        state = {**everyone[0]["shared"], "optimizer": optimizer, "left_out": left_out, "huggingface": huggingface}
        return state | {"extra": extra}, [own["rank"] for own in everyone]

    def load(
        self,
        load_dir: Location,
        tag: object,
        with_optimizer: bool,
        scheduler: Any,
        with_scheduler: bool,
        module_only: bool,
        strict: bool,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; see Engine.load_checkpoint. scheduler: the learning-rate schedule, or None."""
        with self._untimed():
            self._update.parking.check()
            self._saver.wait()
            path = find_checkpoint(self._decision, Path(load_dir), None if tag is None else str(tag))
            if path is None:
                return None, None
            loading = _CheckpointLoader(self._model, self._update, path)
            loads = scheduler if with_scheduler else None
            self._decision.attempt(
                "load_checkpoint, reading the manifest", lambda: loading.prepare(with_optimizer, loads is not scheduler)
            )
            agree_to_read(self._decision, loading.reader, loading.wanted, strict)
            self._decision.attempt(
                "load_checkpoint, reading tensors", lambda: self._apply(loading, not module_only, loads)
            )
            self._update.sharded.follow_masters(loading.optimizer is not None)
            return str(path), loading.state["client_state"]

    def resume(self, load_dir: Location, load: Callable[[str], Json | None]) -> Json | None:
        """Load the first candidate that can be loaded; see Engine.resume. load: loads a tag, and returns its client_state."""
        place = str(Path(load_dir).absolute())

        def choose(values: list[Json]) -> list[list[tuple[str, str | None]]]:
            return [candidates(Path(values[0]["directory"]))] * len(values)

        errors: list[str] = []
        with self._untimed():
            self._saver.wait()
            for tag, error in self._decision.make("resume", {"directory": place}, choose):
                try:
                    if error is not None:
                        raise CheckpointError(error)
                    return load(tag)
                except CheckpointError as raised:
                    errors.append(f"{tag!r}: {raised}")
                    if self._groups.rank == 0:
                        warnings.warn(f"resume passes over {errors[-1]}", stacklevel=3)
        if errors:
            raise CheckpointError(
                f"no checkpoint in {load_dir} can be loaded: {errors[0]}; to train from the start, use another directory"
            )
        return None

    def _apply(self, loading: _CheckpointLoader, everything: bool, scheduler: Any) -> None:
        """Apply a checkpoint that was checked. everything: counters, schedule, data and generators, besides tensors."""
        if everything:
            self._data.load_state_dict(loading.data, loading.same_layout, loading.state["layout"]["data"])
        self._update.sharded.settle()
        if self._update.units is not None:
            self._update.units.release_all()  # the shards are read, not what is gathered
        for bucket in self._update.reducer.all_buckets():  # keep a script's writes to weights that aren't loaded
            bucket.follow_weights(self._update.sharded.settle)
        loading.read()
        self._replica_state.load(loading.replica)
        for name, module in _extra_state(self._model).items():
            if name in loading.state.get("extra", {}):
                module.set_extra_state(loading.state["extra"][name])
        if everything:
            state, counters = loading.state, loading.state["counters"]
            self._progress.load_state_dict(counters)
            scaler = state["loss_scaler"] if loading.optimizer is not None else None
            self._update.restore(counters["skipped_steps"], scaler)
            self._streams.load_state_dict(state["streams"])
            if state["lr_scheduler"] is not None and hasattr(scheduler, "load_state_dict"):
                load_schedule(scheduler, state["lr_scheduler"], self._update.optimizer, loading.optimizer is None)
            # The generators come last, because the code above may draw from them.
            set_generator_states(loading.generators, self._model.device)
        self._progress.restart()


class _CheckpointLoader:
    """Loads one checkpoint: `prepare` checks it and lists the tensors to read, `read` changes the rank's state.

    - state: the state common to all ranks.
    - generators, data, replica: this rank's own state. same_layout: whether it was saved in the engine's layout.
    """

    state: Json
    generators: Json | None
    data: Json | None
    replica: dict[str, Tensor]
    same_layout: bool

    def __init__(self, model: PipelineModule, update: WeightUpdate, path: Path):
        self._model, self._update, self._path = model, update, path
        self.wanted = Wanted()
        self.optimizer: OptimizerTarget | None = None

    def prepare(self, with_optimizer: bool, keeps_schedule: bool) -> None:
        """List the tensors to read, and read everything but the model and the optimizer. See OptimizerTarget."""
        with naming_others(self._path.parent, self._path.name):
            self.reader = Reader(self._path)
            TrainingState.check(self.reader.manifest, self._path)
            self._model.wait_for_weights(self._model)
            self._want_model()
            if with_optimizer:
                own = self._update.optimizer, self._update.reducer.all_buckets()
                self.optimizer = OptimizerTarget(*own, keeps_schedule, self.reader, self.wanted)
            manifest = self.reader.manifest
            others = {key: value for key, value in manifest.state.items() if key not in ("optimizer", "huggingface")}
            self.state = decode(others, self.reader.read)
            self._read_own_state(manifest.ranks)

    def _read_own_state(self, ranks: list[Json]) -> None:
        """Read the states of this rank's generators, of its data and of its replica."""
        rank = self._model.groups.rank
        self.same_layout = same = self.state["layout"] == _layout_of(self._model)
        # A world of another size may not have this rank. Rank 0 reads the first inputs in any layout.
        self.generators = decode(ranks[rank % len(ranks)]["generators"], self.reader.read)
        self.data = decode(ranks[rank if same else 0]["data"], self.reader.read)
        self.replica = decode(ranks[rank]["replica"], self.reader.read) if same else {}

    def _want_model(self) -> None:
        wanted, reader, left_out = self.wanted, self.reader, set(self.reader.manifest.state["left_out"])
        wanted.known.update(MODEL + name for name in tied_copies(self._model))  # other programs store them, too
        for bucket in self._update.reducer.all_buckets():
            for shard in bucket.shards:
                weight, master = MODEL + shard.info.name, MASTER + shard.info.name
                wanted.known.add(weight)
                wanted.add(reader, shard_parts(master if master in reader.tensors else weight, shard, shard.master))
        others = ((name, parts_of(name, tensor)) for name, tensor in _other_state(self._model))
        for name, parts in (*_frozen_parts(self._update), *others):
            wanted.known.add(name)
            if name.removeprefix(MODEL) not in left_out:
                wanted.add(reader, parts)

    def read(self) -> None:
        """Read the tensors into the model and the optimizer."""
        for part in self.wanted.parts:
            self.reader.read_into(part.name, part.box, part.values)
        if self.optimizer is not None:
            self.optimizer.apply()


def _parts_of_engine(model: PipelineModule, update: WeightUpdate, exclude_frozen: bool) -> tuple[list[Part], Json]:
    """Return the tensors that this rank saves, and the optimizer's groups and numbers."""
    update.parking.check()
    update.sharded.settle()
    update.sharded.follow_weights()
    buckets = list(update.reducer.all_buckets())
    parts: list[Part] = []
    numbers: dict[str, dict[str, Any]] = {}
    for bucket in buckets:
        for shard in bucket.shards:
            name = shard.info.name
            parts += shard_parts(MODEL + name, shard, bucket.weights_of(shard))
            if bucket.weight_dtype != bucket.master_dtype:  # else masters have the weights' values
                parts += shard_parts(MASTER + name, shard, shard.master)
            # A parameter that was never updated has no state.
            for key, value in update.optimizer.state.get(shard.master, {}).items():
                if isinstance(value, Tensor):
                    parts += state_parts(shard, key, value)
                else:
                    numbers.setdefault(name, {})[key] = value
    for _, own in () if exclude_frozen else _frozen_parts(update):
        parts += own
    # These may differ between replicas, which see different data; those of the first replica are saved.
    for name, tensor in _other_state(model) if model.groups.coordinate("data") == 0 else ():
        if slicing_of(tensor) is not None or model.groups.coordinate("model") == 0:
            parts += parts_of(name, tensor)
    return parts, {"groups": describe_groups(update.optimizer, buckets), "numbers": numbers}


def _frozen_parts(update: WeightUpdate) -> Iterator[tuple[str, Iterator[Part]]]:
    """Yield (name, what this rank holds of it) of each parameter that is not trained; of those sharded by ZeRO-3, its shard."""
    shards = {shard.info.parameter: shard for bucket in update.frozen_buckets for shard in bucket.shards}
    for info in update.frozen_infos:
        name = MODEL + info.name
        if weights_of(info.parameter) is None:
            yield name, parts_of(name, info.parameter)
        elif info.parameter in shards:
            shard = shards[info.parameter]
            yield name, parts_of(name, info.parameter, shard.values, shard.start)
        else:
            yield name, iter(())


def _other_state(model: PipelineModule) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a state_dict's other tensors: buffers, such as running means, and those of the loss function."""
    for layer, module in model.layers.items():
        for name, buffer in persistent_buffers(module):
            yield MODEL + model.global_name(int(layer), name), buffer
    if isinstance(model.loss_fn, nn.Module):
        for name, tensor in (*model.loss_fn.named_parameters(), *persistent_buffers(model.loss_fn)):
            yield f"{MODEL}loss_fn.{name}", tensor


def _extra_state(model: PipelineModule) -> dict[str, nn.Module]:
    """Return this rank's modules that have other state than tensors, by its names in the model's state_dict."""
    layers = model.layers.items()
    return {model.global_name(int(layer), k): m for layer, top in layers for k, m in with_extra_state(top)}


class _ReplicaState:
    """Tensors of this replica's modules that differ from the first replica's, such as running means of its data."""

    def __init__(self, model: PipelineModule):
        self._model = model
        self.load({})

    def load(self, own: Mapping[str, Tensor]) -> None:
        """Copy `own`, by name, into the modules. These tensors, and those that change from now on, differ."""
        tensors = dict(_other_state(self._model))
        for name, value in own.items():
            if name in tensors:
                tensors[name].data.copy_(value)
        self._own = set(own)
        self._seen = self._checksums()

    def _checksums(self) -> dict[str, int]:
        """Return checksums by name. Version counters are not enough: torch's batch norm writes without counting."""
        if self._model.groups.coordinate("data") == 0:
            return {}
        return {name: checksum(tensor.cpu().contiguous()) for name, tensor in _other_state(self._model)}

    def own(self) -> dict[str, Tensor]:
        """Return the tensors that differ, by name; none on the first replica."""
        now = self._checksums()
        changed = {name for name, value in now.items() if name in self._own or self._seen.get(name) != value}
        return {name: tensor for name, tensor in _other_state(self._model) if name in changed}


def _layout_of(model: PipelineModule) -> dict[str, int]:
    """Return the number of ranks along each axis."""
    groups = model.groups
    return {"pipe": groups.pipe.size, "data": groups.data.size, "model": groups.model.size}
