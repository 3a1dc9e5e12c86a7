"""GatheredParameters: a context in which a script reads or changes whole weights (ZeRO-3)."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from parallel3d.comm.collectives import Group, broadcast
from parallel3d.errors import ExecutionError
from parallel3d.zero.weights import ShardedWeights, Uncopied, WeightState, weights_of


def describe_whole(parameter: nn.Parameter, replicas: Group) -> None:
    """Give a parameter that is not sharded the attributes that libraries read from each parameter with ZeRO-3.

    replicas: the ranks that hold it.
    """
    attributes = {"ds_status": WeightState.GATHERED, "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
    vars(parameter).update({**attributes, **vars(parameter), "replicas": Uncopied(replicas)})


class GatheredParameters:
    """Context in which parameters that live as shards (ZeRO-3) are whole on every rank. DeepSpeed's API.

    - params: a parameter, or several; those that are whole anyway stay in their memory. None, a missing bias, is left out.
    - modifier_rank: the replica (position along the data-parallel axis) whose values are kept when they are changed, by all
      replicas; the masters follow at the next step. None: the parameters must not be changed.
    - fwd_module: without effect. enabled: False to do nothing.

    Collective over the replicas. Raises ExecutionError for a modifier_rank that is no replica, and at its end if parameters got
    other values without modifier_rank; those are dropped.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        given = [params] if isinstance(params, nn.Parameter) else [p for p in params if p is not None]
        self._parameters = [p for p in given if enabled and weights_of(p) is not None]
        self._whole = [p for p in given if enabled and weights_of(p) is None and "replicas" in vars(p)]
        self._modifier = modifier_rank
        self._gathered: list[ShardedWeights] = []
        self._versions: dict[nn.Parameter, int] = {}

    def __enter__(self) -> None:
        own = dict.fromkeys(weights for p in self._parameters if (weights := weights_of(p)) is not None)
        groups = [*(weights.partition for weights in own), *(vars(p)["replicas"].value for p in self._whole)]
        for group in groups if self._modifier is not None else ():
            if self._modifier not in range(group.size):
                raise ExecutionError(
                    f"modifier_rank is {self._modifier!r}; give the number of a replica, from 0 to {group.size - 1}, or None"
                )
        self._gathered = [weights for weights in own if weights.state is WeightState.SHARDED]
        for weights in own:
            weights.gather_whole()
        for weights in own:
            weights.wait()
        self._versions = {p: p._version for p in self._parameters}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = [p for p in self._parameters if p._version != self._versions[p]]
        own: dict[ShardedWeights, None] = dict.fromkeys(filter(None, map(weights_of, self._parameters)))
        try:
            if self._modifier is not None and kind is None:
                for weights in own:
                    weights.keep_changes(self._modifier)
                for parameter in self._whole:
                    _keep_changes(parameter, self._modifier)
                for parameter in (*self._parameters, *self._whole):
                    torch.autograd.graph.increment_version(parameter)
            lost = changed and self._modifier is None and kind is None and any(weights.differs() for weights in own)
        finally:
            for weights in self._gathered:
                weights.release()
        if lost:
            shapes = [list(p.shape) for p in changed[:3]]
            raise ExecutionError(
                f"{len(changed)} parameters, of shapes {shapes}, were changed in GatheredParameters without modifier_rank, and "
                "the changes are dropped; give modifier_rank=0 on every rank to keep those of the first replica"
            )


def _keep_changes(parameter: nn.Parameter, replica: int) -> None:
    """Copy what a replica has written into a whole parameter to the others. Collective."""
    group: Group = vars(parameter)["replicas"].value
    values = parameter.detach().contiguous()
    broadcast(values, group.ranks[replica], group)
    parameter.data.copy_(values)
