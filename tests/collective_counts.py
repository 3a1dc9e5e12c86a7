"""Which collectives a computation makes, counted below everything that makes them."""

from __future__ import annotations

from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parallel3d
from parallel3d.comm import log_summary
from parallel3d.comm.log import LOG


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


class Made(Collectives):
    NAMES: ClassVar[dict[str, int]] = {
        **Collectives.NAMES,
        "allgather_": 1,
    }  # a few words on which ranks agree, not logged


def log_of(settings: dict[str, Any], stage: int = 1) -> tuple[dict[Any, int], dict[Any, int], str]:
    """Return the calls of two steps at a stage of ZeRO as logged, as counted below everything, and what is printed."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1.0,
        "comms_logger": {"enabled": True, **settings},
        "steps_per_print": None,
    }
    engine, *_ = parallel3d.initialize(model=nn.Linear(8, 8), config=config)
    LOG.seconds.clear()
    with Made() as made, redirect_stdout(StringIO()) as printed:
        for _ in range(2):
            engine.backward(engine(torch.ones(4, 8, device=engine.device)).square().mean())
            engine.step()
        counts = {(name, nbytes): count for (name, nbytes), count in made.counts.items() if name != "allgather_"}
        logged = {(kind, nbytes): len(seconds) for (kind, nbytes, _), seconds in LOG.seconds.items()}
    with redirect_stdout(printed):
        log_summary(show_straggler=True)
    return logged, counts, printed.getvalue()
