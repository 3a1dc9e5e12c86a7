"""State of the training that leaves the device between steps, so that a script may use its memory, as for generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.zero.buckets import Bucket

# DeepSpeed's names: weights and gradients that layers compute with, and those of the optimizer.
KINDS = ("lp_params", "lp_grads", "hp_params", "optim_states", "contiguous_grad_buffer")


class Parking:
    """Moves state of buckets to the host and back. Its tensors stay the same objects, without memory in the meantime.

    frozen: weights in no bucket. settle: called first; waits for copies and gathers in progress.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        frozen: Sequence[Tensor],
        settle: Callable[[], None],
    ):
        self._optimizer, self._buckets, self._frozen, self._settle = optimizer, buckets, frozen, settle
        self._parked: list[tuple[UntypedStorage, Tensor]] = []
        self._kinds: set[str] = set()  # of what is parked

    @torch.no_grad()
    def offload(self, include: Collection[str] | None, pin: bool) -> None:
        """Move these kinds of state, or all, to the host, except what is there already. Raises ConfigError."""
        if unknown := [kind for kind in include or () if kind not in KINDS]:
            raise ConfigError(f"there is no kind of state {unknown[0]!r}; give some of {', '.join(KINDS)}")
        self._settle()
        kinds = [kind for kind in KINDS if include is None or kind in include]
        self._kinds.update(kinds)
        found = (t for kind in kinds for t in self._tensors(kind))
        for storage in _storages(t for t in found if t.untyped_storage().resizable()):
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._parked.append((storage, allocate_slab(storage.nbytes(), pin).copy_(flat)))
            storage.resize_(0)

    def _tensors(self, kind: str) -> Iterator[Tensor]:
        resident = [bucket for bucket in self._buckets if not bucket.is_offloaded]
        if kind == "lp_params":
            for bucket in self._buckets:
                yield from bucket.parameters if bucket.sharded is None else (bucket.sharded.shard,)
            yield from self._frozen
        elif kind == "hp_params":
            yield from (shard.master for bucket in resident if bucket.has_own_master for shard in bucket.shards)
        elif kind == "optim_states":
            states = (self._optimizer.state.get(shard.master, {}) for bucket in resident for shard in bucket.shards)
            yield from (v for state in states for v in state.values() if isinstance(v, Tensor) and v.dim())
        else:
            yield from (bucket.gradient_shard for bucket in self._buckets)

    @torch.no_grad()
    def reload(self) -> None:
        """Move all back."""
        while self._parked:
            storage, slab = self._parked[-1]
            storage.resize_(slab.nbytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).copy_(slab)
            self._parked.pop()
        self._kinds.clear()

    def check(self, *needed: str) -> None:
        """Raise ExecutionError while state of these kinds, or any if none is named, is on the host."""
        missing = self._kinds.intersection(needed) if needed else self._kinds
        if missing:
            raise ExecutionError(
                f"offload_states moved {', '.join(sorted(missing))} to the host, which this needs; call engine.reload_states() "
                "first"
            )


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages of tensors that have memory, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.untyped_storage().nbytes()}
    yield from found.values()
