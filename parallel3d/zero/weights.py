"""Weights that live as shards (ZeRO-3) and are gathered while layers compute with them (arXiv:1910.02054, section 5).

The functions at the end handle parameters whose values are not whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE, Group, Work, all_gather_into, broadcast
from parallel3d.comm.transfers import Event
from parallel3d.errors import ExecutionError
from parallel3d.zero.host_shards import HostShards

_READS = (
    "state_dict() reads whole weights, but zero_optimization.stage 3 holds shards of them; call engine.save_16bit_model or "
    "engine.save_checkpoint, or read them in parallel3d.zero.GatheredParameters"
)
_WRITES = (
    "load_state_dict() writes whole weights, but zero_optimization.stage 3 holds shards of them; call it before initialize, "
    "or in parallel3d.zero.GatheredParameters(module.parameters(), modifier_rank=0), or call engine.load_checkpoint"
)
_LOST = (
    "a parameter of shape {} was written while it lived as shards, and the values are lost; write it in "
    "parallel3d.zero.GatheredParameters(parameter, modifier_rank=0)"
)


class WeightState(Enum):
    """State of sharded weights, and the memory that it takes on a rank. The last three names are DeepSpeed's."""

    SHARDED = "this rank's shard alone"
    GATHERING = "the shard and the whole, which is being written"
    GATHERED = "the shard and the whole"
    IN_FP8 = "the shard and the whole in fp8, see Fp8Weights"
    NOT_AVAILABLE = SHARDED
    INFLIGHT = GATHERING
    AVAILABLE = GATHERED


def placeholder(parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a parameter's shape with the memory of one element. Reading it gives NaN (0 of an integer dtype)."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(parameter.shape)


def cut(offset: int, size: int, shard: slice) -> slice:
    """Return where in a shard of a flat buffer the part lies that it has of `size` elements from `offset` on."""
    start = max(offset, shard.start) - shard.start
    return slice(start, max(start, min(offset + size, shard.stop) - shard.start))


class Uncopied:
    """Holds a value for a parameter's attribute; copies and pickles of the parameter have None there."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # NoneType() is None


class ShardedWeights:
    """The weights of some parameters in one flat tensor, of which each rank of `partition` holds one shard.

    The flat tensor's storage is released and allocated again, but stays the same object: views of it that autograd has
    saved for a backward are valid again when the weights are gathered for that backward. The parameters stay the same
    objects too. Their data are views of the flat tensor while it is gathered, and placeholders otherwise. They have DeepSpeed's
    attributes ds_id, ds_shape, ds_numel, ds_status, which is the state, and ds_tensor: the elements that the shard has of each.

    - shard: this rank's part, [numel / ranks], which `host` keeps if it is given; pieces: of each parameter, what the shard has
      of it, flat. numel: elements of the flat tensor, padding included; nbytes: its bytes; live_bytes: those gathered now.
    - partition: the ranks that hold shards.
    - state: see WeightState.
    """

    def __init__(
        self,
        whole: Tensor,
        shard: Tensor,
        parameters: Sequence[nn.Parameter],
        views: Sequence[Tensor],
        partition: Group,
        host: HostShards | None = None,
    ):
        self.shard, self.numel, self.nbytes = shard, whole.numel(), whole.nbytes
        self._host = host
        self._written: Event = None  # end of the last copy to a shard in host memory
        self._whole, self.partition = whole, partition
        self._views = list(zip(parameters, views, strict=True))
        self._placeholders = [(p, placeholder(p, whole.dtype, whole.device)) for p in parameters]
        self.pieces: list[Tensor] = []
        first = partition.index * shard.numel()
        for parameter, view in self._views:
            at = int(view.storage_offset()) - int(whole.storage_offset())
            own = shard[cut(at, view.numel(), slice(first, first + shard.numel()))]
            self.pieces.append(own)
            attributes = {"ds_shape": parameter.shape, "ds_numel": parameter.numel(), "ds_tensor": own}
            vars(parameter).update(sharded_weights=self, ds_id=id(parameter), **attributes)
        self._work: Work = DONE
        self._versions: list[int] = []
        self._enter(WeightState.GATHERED)
        self.release()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave the shards out of a copy or pickle of a parameter."""
        return type(None), ()  # NoneType() is None

    def _enter(self, state: WeightState) -> None:
        self.state = state
        for parameter, _ in self._views:
            vars(parameter)["ds_status"] = state

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the flat tensor."""
        return [parameter for parameter, _ in self._views]

    @torch.no_grad()
    def gather(self) -> Work:
        """Start to gather the weights, unless they are; see `wait`.

        Raises ExecutionError if a placeholder was written or replaced, or while offload_states has the shard.
        """
        return self.gather_whole()

    @property
    def live_bytes(self) -> int:
        """Bytes of what is gathered now."""
        return 0 if self.state is WeightState.SHARDED else self.nbytes

    @torch.no_grad()
    def gather_whole(self) -> Work:
        """Do what `gather` does, in the weights' own dtype: the parameters have their values then."""
        if self.state is WeightState.SHARDED:
            self._check_shard()
            self._whole.untyped_storage().resize_(self.nbytes)
            for parameter, view in self._views:
                parameter.data = view
            self._work = self._start()
            self._enter(WeightState.GATHERING)
        return self._work

    def _start(self) -> Work:
        if self._host is not None:
            return self._host.gather(self._whole, self.shard, self.partition, self._written)
        return all_gather_into(self._whole, self.shard, self.partition)

    @torch.no_grad()
    def write(self, part: slice, values: Tensor) -> None:
        """Round values on the device, flat, into a part of the shard."""
        if self._host is not None:
            self._written = self._host.write(self.shard, part, values)
        else:
            self.shard[part].copy_(values)

    def wait(self) -> None:
        """Return (CUDA: let the stream go on) when the weights are gathered."""
        if self.state is WeightState.GATHERING:
            self._work.wait()
            self._work = DONE
            self._enter(WeightState.GATHERED)

    def release(self) -> None:
        """Free the memory of the whole weights. What is enqueued on the current stream may still read them."""
        self.wait()
        if self.state is WeightState.GATHERED:
            for parameter, placeholder in self._placeholders:
                parameter.data = placeholder
            self._whole.untyped_storage().resize_(0)
            self._enter(WeightState.SHARDED)
            self._versions = [parameter._version for parameter, _ in self._views]

    def _check_shard(self) -> None:
        if self.shard.numel() and self.shard.untyped_storage().nbytes() == 0:
            raise ExecutionError(
                "offload_states moved lp_params to the host; call engine.reload_states() before a gather"
            )
        for (parameter, given), version in zip(self._placeholders, self._versions, strict=True):
            # Casts and moves of a module replace the data, too: they stay NaN.
            replaced = parameter.data_ptr() != given.data_ptr() and parameter.is_floating_point()
            if parameter._version != version or (replaced and not bool(parameter.isnan().all())):
                raise ExecutionError(_LOST.format(list(parameter.shape)))

    def differs(self) -> bool:
        """Return whether the gathered weights have other values than this rank's shard, in its part of them."""
        if self._host is not None:
            self._host.settle()
        size = self.shard.numel()
        own = self._whole[self.partition.index * size :][:size]
        return not torch.equal(own, self.shard.to(own.device))

    @torch.no_grad()
    def keep_changes(self, replica: int) -> None:
        """Copy what a replica has written into its gathered weights to the shards. Collective.

        Raises ExecutionError for parameters whose data have been replaced by such of another shape.
        """
        for parameter, view in self._views:
            if parameter.shape != view.shape:
                raise ExecutionError(
                    f"a parameter of shape {list(view.shape)} got data of shape {list(parameter.shape)} while it was gathered; "
                    "replace the parameter itself, before parallel3d.initialize"
                )
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view
        broadcast(self._whole, self.partition.ranks[replica], self.partition)
        size = self.shard.numel()
        self.write(slice(0, size), self._whole[self.partition.index * size :][:size])


class Units:
    """The units of a rank, each the sharded weights of one layer, by the layer's index in the list.

    - host: keeps shards that are in host memory or on disk.
    - live: number of elements that are gathered now; peak: the most so far; live_bytes, peak_bytes: the same in bytes.
    - number: gathers so far.
    """

    def __init__(self, weights: Mapping[int, Sequence[ShardedWeights]], host: HostShards | None = None):
        self._weights, self._host = weights, host
        self.sizes = {unit: sum(w.numel for w in own) for unit, own in weights.items()}
        self._unit_of = {p: unit for unit, own in weights.items() for w in own for p in w.parameters}
        self._nbytes = {unit: sum(w.nbytes for w in own) for unit, own in weights.items()}
        # Unit -> (weights of it that are gathered here, not by GatheredParameters; their bytes).
        self._held: dict[int, list[tuple[ShardedWeights, int]]] = {}
        self.live = self.peak = self.live_bytes = self.peak_bytes = self.number = 0

    def __reduce__(self) -> tuple[type[Units], tuple[dict[int, Any]]]:
        """Copy and pickle as an object without units: the weights of a copied module are its own."""
        return Units, ({},)

    def elements(self, nbytes: int) -> int:
        """Return how many elements of weights take at most these bytes."""
        return nbytes // max(self._nbytes[unit] // size for unit, size in self.sizes.items())

    def of(self, parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
        """Return the units that hold these parameters."""
        return tuple(dict.fromkeys(self._unit_of[p] for p in parameters if p in self._unit_of))

    def holds(self, unit: int) -> bool:
        """Return whether a unit was gathered by `gather` or `use`, and not released since."""
        return unit in self._held

    def is_gathered(self, unit: int) -> bool:
        """Return whether a unit is gathered, or is being gathered."""
        return all(each.state is not WeightState.SHARDED for each in self._weights[unit])

    def expect(self, units: Iterable[int]) -> None:
        """Read shards from the disk ahead for these units, which will be gathered next, in this order."""
        if self._host is not None:
            self._host.expect(weights.shard for unit in units for weights in self._weights[unit])

    def gather(self, unit: int) -> list[Work]:
        """Start to gather a unit, unless it is gathered; return the works of its collectives."""
        own = [each for each in self._weights[unit] if each.state is WeightState.SHARDED]
        works = [each.gather() for each in self._weights[unit]]
        if own:
            held = self._held.setdefault(unit, [])
            for each in own:
                nbytes = each.live_bytes
                held.append((each, nbytes))
                self.live, self.live_bytes = self.live + each.numel, self.live_bytes + nbytes
            self.peak, self.peak_bytes = max(self.peak, self.live), max(self.peak_bytes, self.live_bytes)
            self.number += 1
        return works

    def use(self, units: Iterable[int]) -> None:
        """Return (CUDA: let the stream go on) when these units are gathered; gather those that are not."""
        for unit in units:
            self.gather(unit)
            for weights in self._weights[unit]:
                weights.wait()

    def release(self, unit: int) -> None:
        """Release a unit, except weights that GatheredParameters has gathered."""
        for weights, nbytes in self._held.pop(unit, ()):
            self.live, self.live_bytes = self.live - weights.numel, self.live_bytes - nbytes
            weights.release()

    def keep_only(self, units: Collection[int]) -> None:
        """Release all other units."""
        for unit in self._held.keys() - units:
            self.release(unit)

    def release_all(self) -> None:
        """Release all units, as between two steps."""
        self.keep_only(())

    def refuse_state_dicts(self, model: nn.Module) -> None:
        """Make state_dict() and load_state_dict() of modules raise ExecutionError while their weights are shards."""
        for module in model.modules():
            own = [p for p in module._parameters.values() if p is not None]
            if self.of(own):
                module.register_state_dict_pre_hook(partial(_check_gathered, own, _READS))
                module.register_load_state_dict_pre_hook(partial(_check_gathered, own, _WRITES))


def _check_gathered(parameters: Iterable[nn.Parameter], what: str, *_: object) -> None:
    found = map(weights_of, parameters)
    if any(weights is not None and weights.state is not WeightState.GATHERED for weights in found):
        raise ExecutionError(what)


# (start, stop) -> these elements of a parameter, flat, until the next is read.
Read = Callable[[int, int], Tensor]


def weights_of(parameter: Tensor) -> ShardedWeights | None:
    """Return the sharded weights that a parameter is part of; None if it is whole on every rank."""
    found: ShardedWeights | None = vars(parameter).get("sharded_weights")
    return found


@torch.no_grad()
def keep_in_file(parameter: nn.Parameter, read: Read, device: torch.device) -> None:
    """Move a parameter from the meta device to `device`, without memory: `read` returns its values when they are needed.

    It stays the same object, so that optimizers and tied modules keep it.
    """
    moved = nn.Parameter(placeholder(parameter, parameter.dtype, device), parameter.requires_grad)
    vars(moved).update(vars(parameter), read=read)
    torch.utils.swap_tensors(parameter, moved)


def is_whole(parameter: Tensor) -> bool:
    """Return whether the values of a parameter are all in its own memory."""
    return weights_of(parameter) is None and "read" not in vars(parameter)


@torch.no_grad()
def read_into(target: Tensor, parameter: Tensor, start: int) -> None:
    """Copy a parameter's elements, from `start` on, into a flat target. Collective, if the parameter is sharded."""
    read: Read | None = vars(parameter).get("read")
    if read is not None:
        target.copy_(read(start, start + target.numel()))
        return
    if (found := weights_of(parameter)) is not None:
        found.gather_whole()
        found.wait()
    target.copy_(parameter.detach().reshape(-1)[start : start + target.numel()])
    if found is not None:
        found.release()


def make_whole(parameter: Tensor) -> None:
    """Make a parameter whole for good. Collective, if it is sharded."""
    if not is_whole(parameter):
        values = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        read_into(values.view(-1), parameter, 0)
        forget(parameter)
        parameter.data = values.detach()


def forget(parameter: Tensor) -> None:
    """Note that a parameter has memory of its own now."""
    for name in ("read", "sharded_weights", "ds_id", "ds_shape", "ds_numel", "ds_status", "ds_tensor"):
        vars(parameter).pop(name, None)
