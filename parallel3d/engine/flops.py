"""FLOPs of a step's forwards, counted while they run, of which MFU follows."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.costs.devices import preset_of
from parallel3d.costs.operators import cost_of
from parallel3d.schedule.instructions import Instruction, Op


class ForwardFlops(TorchDispatchMode):
    """Counter of the FLOPs of matrix products and attention in this rank's forwards; operators run as without it."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled layers run as they do in other steps

    def __call__(self, instruction: Instruction) -> AbstractContextManager[Any]:
        """Count the block, if it is a forward."""
        return self if instruction.op is Op.FORWARD else nullcontext()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        kind, number = cost_of(function, args, kwargs or {}, (), (), out)
        self.total += number if kind != "moved" else 0.0
        return out


def peak_of(device: torch.device) -> float | None:
    """Return the FLOP/s of a device's data sheet; None on the CPU, and for one that isn't known."""
    preset = preset_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if preset is None else preset.peak_flops
