"""Whole weights outside of the training's own calls: GatheredParameters."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from parallel3d.errors import ExecutionError
from parallel3d.zero.values import weights_of
from parallel3d.zero.weights import ShardedWeights, WeightState


class GatheredParameters:
    """Context in which parameters that live as shards (ZeRO-3) are whole on every rank. DeepSpeed's API.

    - params: a parameter, or several; those that are whole anyway are left as they are.
    - modifier_rank: the replica (position along the data-parallel axis) whose values are kept when they are changed; the
      masters follow at the next step. None: the parameters must not be changed.
    - fwd_module: without effect. enabled: False to do nothing.

    Collective over the replicas. Raises ExecutionError at its end if parameters got other values without modifier_rank; those
    are dropped.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ):
        given = [params] if isinstance(params, nn.Parameter) else list(params)
        self._parameters = [p for p in given if enabled and weights_of(p) is not None]
        self._modifier = modifier_rank
        self._gathered: list[ShardedWeights] = []
        self._versions: dict[nn.Parameter, int] = {}

    def __enter__(self) -> None:
        own = dict.fromkeys(weights for p in self._parameters if (weights := weights_of(p)) is not None)
        self._gathered = [weights for weights in own if weights.state is WeightState.SHARDED]
        for weights in self._gathered:
            weights.gather()
        for weights in own:
            weights.wait()
        self._versions = {p: p._version for p in self._parameters}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        changed = [p for p in self._parameters if p._version != self._versions[p]]
        own: dict[ShardedWeights, None] = dict.fromkeys(filter(None, map(weights_of, self._parameters)))
        if self._modifier is not None and kind is None:
            for weights in own:
                weights.keep_changes(self._modifier)
            for parameter in self._parameters:
                torch.autograd.graph.increment_version(parameter)
        lost = changed and self._modifier is None and kind is None and any(weights.differs() for weights in own)
        for weights in self._gathered:
            weights.release()
        if lost:
            shapes = [list(p.shape) for p in changed[:3]]
            raise ExecutionError(
                f"{len(changed)} parameters, of shapes {shapes}, were changed in GatheredParameters without modifier_rank, and "
                "the changes are dropped; give modifier_rank=0 on every rank to keep those of the first replica"
            )
