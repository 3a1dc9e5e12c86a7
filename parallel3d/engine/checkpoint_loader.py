"""Loading of a checkpoint: first checked, then applied."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from parallel3d.checkpoint.directory import other_tags
from parallel3d.checkpoint.format import MASTER, MODEL
from parallel3d.checkpoint.load import Wanted
from parallel3d.checkpoint.optimizer import OptimizerTarget
from parallel3d.checkpoint.parts import frozen, masters, parts_of
from parallel3d.checkpoint.read import Reader
from parallel3d.checkpoint.values import decode
from parallel3d.engine.contents import Json, layout_of, other_state
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import CheckpointError
from parallel3d.pipe.module import PipelineModule


class CheckpointLoader:
    """Loads one checkpoint: `prepare` checks it and lists the tensors to read, `read` changes the rank's state.

    - state: the state common to all ranks.
    - generators, data, replica: this rank's own state.
    """

    state: Json
    generators: Json
    data: Json | None
    replica: dict[str, Tensor]

    def __init__(self, model: PipelineModule, update: WeightUpdate, path: Path):
        self._model, self._update, self._path = model, update, path
        self.wanted = Wanted()
        self.optimizer: OptimizerTarget | None = None

    def prepare(self, with_optimizer: bool, rank: int) -> Json:
        """List the tensors to read, and read everything but the model and the optimizer."""
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
        """Read the states of this rank's generators, of its data and of its replica."""
        same = self.state["layout"] == layout_of(self._model)
        # A world of another size may not have this rank. Rank 0 reads the first inputs in any layout.
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
        others = [part for name, tensor in other_state(self._model) for part in parts_of(name, tensor, tensor)]
        for part in (*frozen(self._model.frozen_infos()), *others):
            self.wanted.known.append(part.name)
            if part.name.removeprefix(MODEL) not in left_out:
                self.wanted.add(self.reader, part)

    def read(self) -> None:
        """Read the tensors into the model and the optimizer."""
        for source, part in self.wanted.targets:
            self.reader.read_into(source, part.box, part.values)
        if self.optimizer is not None:
            self.optimizer.apply()
