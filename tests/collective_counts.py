"""Which collectives a computation makes, counted below everything that makes them."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts (collective, bytes that this rank gives)."""

    NAMES: ClassVar[dict[str, int]] = {"allreduce_": 0, "_allgather_base_": 1, "_reduce_scatter_base_": 1}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            tensors = args[self.NAMES[name]]
            tensors = tensors if isinstance(tensors, (list, tuple)) else [tensors]
            self.counts[name, sum(t.numel() * t.element_size() for t in tensors)] += 1
        return func(*args, **(kwargs or {}))
