"""Memory limit of a stage: bytes of each layer against the memory of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from parallel3d.errors import PartitionError
from parallel3d.partition.chain import FloatArray, cut, segment_costs


@dataclass(frozen=True)
class StageLimit:
    """No stage may hold more than `limit` bytes.

    Layer k on chunk c takes state[k] bytes whatever happens, and activations[k] for each of the in_flight[c] micro-batches
    whose activations the chunk holds at once. Layers of one tie key (one each, None for no tie) hold their state once a part.
    """

    limit: float
    state: Sequence[float]
    activations: Sequence[float]
    in_flight: Sequence[int]
    tie_keys: Sequence[str | None] | None = None

    def chunk_bytes(self) -> FloatArray:
        """[chunks, n + 1, n + 1]: element (c, a, b) is what layers [a, b) take as chunk c, inf where that is empty."""
        state = segment_costs(self.state, tie_keys=self.tie_keys)
        activations = segment_costs(self.activations)
        held = np.array(self.in_flight, dtype=np.float64)[:, None, None]
        # Where a part is empty: infinity times no micro-batch is no number.
        return state + np.where(np.isinf(activations), 0.0, activations) * held

    def check(self, bounds: Sequence[int], placement: Sequence[int]) -> None:
        """Raise PartitionError where these bounds break the limit."""
        loads = cut(bounds, self.chunk_bytes()).loads(placement)
        if max(loads) > self.limit:
            stage = int(np.argmax(loads))
            raise PartitionError(
                f"with bounds {list(bounds)} stage {stage} holds {loads[stage]:,.0f} bytes, but pipeline.max_stage_bytes is "
                f"{self.limit:,.0f}; set it to {ceil(loads[stage])}, or leave the bounds to a method such as 'parameters'"
            )


def refusal(limit: float, loads: Sequence[float], exact: bool) -> PartitionError:
    """No split fits: of the one that comes closest a stage holds loads[stage] bytes. exact: no other comes closer."""
    stage = int(np.argmax(loads))
    least = "the smallest limit that works is" if exact else "the smallest limit found to work is"
    return PartitionError(
        f"no split keeps every stage within pipeline.max_stage_bytes = {limit:,.0f}: at the lowest peak, stage {stage} holds "
        f"{loads[stage]:,.0f} bytes; {least} {ceil(loads[stage])}. Set that, use more stages, a higher ZeRO stage, smaller "
        "micro-batches or activation_checkpoint_interval, or leave the key out"
    )
