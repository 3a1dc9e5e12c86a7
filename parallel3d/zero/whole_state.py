"""Masters, gradients and optimizer state of a parameter, whole or this rank's part: DeepSpeed's safe_get and safe_set."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group, all_gather_into, all_reduce
from parallel3d.errors import ConfigError
from parallel3d.zero.buckets import Bucket, ParameterShard
from parallel3d.zero.memory import is_elementwise_state
from parallel3d.zero.weights import Uncopied

MASTER, GRADIENT = "the master", "the gradient"  # names that no optimizer has for a state
# Kinds of state, by offload_states' names, that must be on the device to be read or written.
_NEEDS = {MASTER: ("hp_params", "lp_params"), GRADIENT: ("lp_grads", "contiguous_grad_buffer")}


class WholeState:
    """State of the training of one parameter. All methods are collective over the bucket's partition.

    A local part is flat, and may be empty: the parts of all ranks, one after the other, are the flat parameter.

    - factor: returns what the gradients in the bucket are multiples of.
    - end_reductions: called before gradients are read or written, see GradientReducer.
    - check: called with kinds of state that are needed; raises ExecutionError for those that offload_states has moved.
    - settle: called before state is read or written, which may be on its way to the host.
    - on_weights: called when the weights have been written.
    """

    def __init__(
        self,
        bucket: Bucket,
        index: int,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[], float],
        end_reductions: Callable[[Bucket], Group | None],
        check: Callable[..., None],
        settle: Callable[[], None],
        on_weights: Callable[[], None],
    ):
        self._bucket, self._index, self._optimizer = bucket, index, optimizer
        self._factor, self._end_reductions, self._on_weights = factor, end_reductions, on_weights
        self._check, self._settle = check, settle

    def attach(self, parameter: nn.Parameter) -> None:
        """Let `whole_state` find this object from the parameter. The parameter refers to it only weakly."""
        # Weak: Python's collector can't see a cycle through a parameter that the graph of a Port's token holds.
        vars(parameter)["whole_state"] = Uncopied(weakref.ref(self))

    @torch.no_grad()
    def read(self, what: str, local: bool = False) -> Tensor | None:
        """Return a copy in the parameter's shape, or, flat, of this rank's part; None if there is none.

        what: MASTER (in fp32 or wider), GRADIENT (of the mean loss, or of the sum where losses are (sum, count), over all
        replicas; after the step clipped, unless the optimizer got a copy, as with "step": "cpu" or narrower accumulators), or
        the name of a state of the optimizer with an element for each of the parameter.
        """
        group = self._prepare(what)
        found = self._local(what) if local else self._whole(what)
        if found is not None and group is not None:
            all_reduce(found, group).wait()
        return found / self._scale() if found is not None and what == GRADIENT else found

    @torch.no_grad()
    def write(self, what: str, value: Tensor, local: bool = False) -> None:
        """Write what `read` returns; after the master, the weights follow.

        value: in the parameter's shape, the same on all ranks, or this rank's part. Raises ConfigError for another size, and
        for state that the optimizer does not keep.
        """
        group = self._prepare(what)
        if what == GRADIENT:
            is_summed_later = group is not None and group.index > 0
            value = value * (0.0 if is_summed_later else self._scale())
        shards = list(self._shards())
        parts = self._split(value, shards) if local else [self._part(value, shard) for shard in shards]
        for shard, part in zip(shards, parts, strict=True):
            self._written(shard, what).copy_(part.view(shard.master.shape))
        if what == MASTER:
            self._bucket.write_back()
            if self._bucket.partition.size > 1:
                self._bucket.gather().wait()
            self._on_weights()

    def _scale(self) -> float:
        return 1.0 if self._bucket.is_divided else self._factor()

    def _prepare(self, what: str) -> Group | None:
        """Make state ready to be read and written; return the ranks that have parts of it to be summed, None if it is whole."""
        self._check(*_NEEDS.get(what, ("optim_states",)))
        self._settle()
        if what == MASTER:
            self._bucket.follow_weights(self._settle)
        return self._end_reductions(self._bucket) if what == GRADIENT else None

    def _of(self, shard: ParameterShard, what: str) -> Tensor | None:
        if what in (MASTER, GRADIENT):
            return shard.master.detach() if what == MASTER else shard.gradient
        value = self._optimizer.state.get(shard.master, {}).get(what)
        shape = shard.master.shape
        return value if isinstance(value, Tensor) and is_elementwise_state(what, value.shape, shape) else None

    def _written(self, shard: ParameterShard, what: str) -> Tensor:
        state = self._of(shard, what)
        if state is None:
            raise ConfigError(
                f"{type(self._optimizer).__name__} keeps no state {what!r} for each element of {shard.info.name}, or not "
                f"before its first step; it has {sorted(self._optimizer.state.get(shard.master, ()))}"
            )
        return state

    def _local(self, what: str) -> Tensor | None:
        """Return copies of a tensor of each of this rank's shards, joined; None if a shard has none."""
        found = [self._of(shard, what) for shard in self._shards()]
        mine = torch.empty(0, dtype=self._bucket.master_dtype, device=self._bucket.device)
        values = [value.reshape(-1).to(mine) for value in found if value is not None]  # offloaded state is on the host
        return torch.cat([mine, *values]) if len(values) == len(found) else None

    def _split(self, value: Tensor, shards: Sequence[ParameterShard]) -> Sequence[Tensor]:
        sizes = [shard.master.numel() for shard in shards]
        if value.numel() != sum(sizes):
            name = self._bucket.infos[self._index].name
            raise ConfigError(f"this rank has {sum(sizes)} elements of {name}, but the value has {value.numel()}")
        return value.reshape(-1).split(sizes)

    def _shards(self) -> Iterator[ParameterShard]:
        info = self._bucket.infos[self._index]
        return (shard for shard in self._bucket.shards if shard.info is info)

    def _part(self, value: Tensor, shard: ParameterShard) -> Tensor:
        wanted = shard.info.parameter.shape
        if value.shape != wanted:
            raise ConfigError(f"{shard.info.name} has shape {list(wanted)}, but the value has {list(value.shape)}")
        return value.reshape(-1)[shard.start : shard.start + shard.master.numel()]

    def _whole(self, what: str) -> Tensor | None:
        """Gather a tensor of each shard of the parameter; None if a shard has none."""
        bucket = self._bucket
        size, place = bucket.numel // bucket.partition.size, bucket.shard.start
        # The last element is a flag: whether this rank has all the tensors that it should.
        mine = torch.zeros(size + 1, dtype=bucket.master_dtype, device=bucket.device)
        for shard in self._shards():
            values = self._of(shard, what)
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
    found: Uncopied | None = vars(parameter).get("whole_state")
    state: WholeState | None = None if found is None else found.value()
    return state
