"""Masters, gradients and optimizer state of a parameter, whole or this rank's part: DeepSpeed's safe_get and safe_set."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import all_gather_into
from parallel3d.errors import ConfigError
from parallel3d.zero.buckets import Bucket, ParameterShard
from parallel3d.zero.weights import nothing


class WholeState:
    """State of the training of one parameter. All methods are collective over the bucket's partition.

    A local part is flat, and may be empty: the parts of all ranks, one after the other, are the flat parameter.

    - factor: returns what the gradients in the bucket are multiples of.
    - reduce: called before gradients are read; ends their reductions.
    - settle: called before state is read or written, which may be on its way to the host.
    """

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[], float],
        reduce: Callable[[], None],
        settle: Callable[[], None],
    ):
        self._bucket, self._index, self._optimizer = bucket, index, optimizer
        self._factor, self._reduce, self._settle = factor, reduce, settle

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Leave the state out of a copy or pickle of the parameter."""
        return nothing, ()

    def master(self) -> Tensor:
        """Return the fp32 (or wider) master, in the parameter's shape."""
        found = self._whole(lambda shard: shard.master.detach())
        assert found is not None
        return found

    def set_master(self, value: Tensor) -> None:
        """Write the master; the weights follow. value: in the parameter's shape, the same on all ranks."""
        for shard in self._shards():
            shard.master.detach().copy_(self._part(value, shard))
        self._publish()

    def local_master(self) -> Tensor:
        """Return a copy of this rank's part of the master."""
        found = self._local(lambda shard: shard.master.detach())
        assert found is not None
        return found

    def set_local_master(self, value: Tensor) -> None:
        """Write this rank's part of the master; the weights follow."""
        self._write_local(value, lambda shard: shard.master.detach())
        self._publish()

    def _publish(self) -> None:
        self._bucket.write_back()
        if self._bucket.partition.size > 1:
            self._bucket.gather().wait()

    def gradient(self) -> Tensor:
        """Return the gradient of the mean loss, summed over the replicas, before clipping."""
        self._reduce()
        found = self._whole(lambda shard: shard.gradient)
        assert found is not None
        return found / self._factor()

    def set_gradient(self, value: Tensor) -> None:
        """Write the gradient, as `gradient` returns it."""
        self._reduce()
        for shard in self._shards():
            shard.gradient.copy_(self._part(value, shard) * self._factor())

    def local_gradient(self) -> Tensor:
        """Return this rank's part of the gradient, as `gradient` returns it."""
        self._reduce()
        found = self._local(lambda shard: shard.gradient)
        assert found is not None
        return found / self._factor()

    def set_local_gradient(self, value: Tensor) -> None:
        """Write this rank's part of the gradient."""
        self._reduce()
        self._write_local(value * self._factor(), lambda shard: shard.gradient)

    def optimizer_state(self, key: str) -> Tensor | None:
        """Return a state of the optimizer with an element for each of the parameter; None if it keeps none, or not yet."""
        return self._whole(lambda shard: self._elementwise(shard, key))

    def set_optimizer_state(self, key: str, value: Tensor) -> None:
        """Write such a state."""
        for shard in self._shards():
            self._written(shard, key).copy_(self._part(value, shard))

    def local_optimizer_state(self, key: str) -> Tensor | None:
        """Return a copy of this rank's part of such a state."""
        return self._local(lambda shard: self._elementwise(shard, key))

    def set_local_optimizer_state(self, key: str, value: Tensor) -> None:
        """Write this rank's part of such a state."""
        self._write_local(value, lambda shard: self._written(shard, key))

    def _written(self, shard: ParameterShard, key: str) -> Tensor:
        state = self._elementwise(shard, key)
        if state is None:
            raise ConfigError(
                f"{type(self._optimizer).__name__} keeps no state {key!r} for each element of {shard.info.name}, or not "
                f"before its first step; it has {sorted(self._optimizer.state.get(shard.master, ()))}"
            )
        return state

    def _local(self, of: Callable[[ParameterShard], Tensor | None]) -> Tensor | None:
        """Return copies of a tensor of each of this rank's shards, joined; None if a shard has none."""
        found = [of(shard) for shard in self._shards()]
        mine = torch.empty(0, dtype=self._bucket.master_dtype, device=self._bucket.device)
        values = [value.reshape(-1).to(mine) for value in found if value is not None]  # offloaded state is on the host
        return torch.cat([mine, *values]) if len(values) == len(found) else None

    @torch.no_grad()
    def _write_local(self, value: Tensor, of: Callable[[ParameterShard], Tensor]) -> None:
        shards = list(self._shards())
        sizes = [shard.master.numel() for shard in shards]
        if value.numel() != sum(sizes):
            name = self._bucket.infos[self._index].name
            raise ConfigError(f"this rank has {sum(sizes)} elements of {name}, but the value has {value.numel()}")
        for shard, part in zip(shards, value.reshape(-1).split(sizes), strict=True):
            of(shard).copy_(part.view(shard.master.shape))

    def _shards(self) -> Iterator[ParameterShard]:
        self._settle()
        info = self._bucket.infos[self._index]
        return (shard for shard in self._bucket.pieces if shard.info is info)

    def _elementwise(self, shard: ParameterShard, key: str) -> Tensor | None:
        value = self._optimizer.state.get(shard.master, {}).get(key)
        return value if isinstance(value, Tensor) and value.shape == shard.master.shape else None

    def _part(self, value: Tensor, shard: ParameterShard) -> Tensor:
        wanted = shard.info.parameter.shape
        if value.shape != wanted:
            raise ConfigError(f"{shard.info.name} has shape {list(wanted)}, but the value has {list(value.shape)}")
        return value.reshape(-1)[shard.start : shard.start + shard.master.numel()].view(shard.master.shape)

    @torch.no_grad()
    def _whole(self, of: Callable[[ParameterShard], Tensor | None]) -> Tensor | None:
        """Gather a tensor of each shard of the parameter; None if a shard has none."""
        bucket = self._bucket
        size, place = bucket.numel // bucket.partition.size, bucket.shard.start
        # The last element says whether this rank has all that it should.
        mine = torch.zeros(size + 1, dtype=bucket.master_dtype, device=bucket.device)
        for shard in self._shards():
            values = of(shard)
            if values is None:
                mine[-1] = 1
            else:
                start = shard.place - place if bucket.master is not None else shard.place
                mine[start : start + values.numel()] = values.reshape(-1)
        flat = mine.new_empty(bucket.partition.size, size + 1)
        all_gather_into(flat.view(-1), mine, bucket.partition).wait()
        if bool(flat[:, -1].any()):
            return None
        return bucket.view(flat[:, :-1].reshape(-1), self._index).clone()


def whole_state(parameter: nn.Parameter) -> WholeState | None:
    """Return the state of the training of a parameter; None if no engine trains it."""
    found: WholeState | None = vars(parameter).get("whole_state")
    return found
