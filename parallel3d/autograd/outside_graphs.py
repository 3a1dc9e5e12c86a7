"""Functions of autograd that break the graphs of torch.compile. Imported late: that imports the compiler, for a second."""

from __future__ import annotations

from typing import Any

import torch


@torch.compiler.disable(reason="a layer of parallel3d that no engine has compiled")
def apply_without_port(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply the function of a layer without an open port: in a graph the whole backward would run at BACKWARD_INPUT."""
    return function.apply(*args)


@torch.compiler.disable(reason="parallel3d computes this sharded layer in fp8; compile without fullgraph")
def apply_sharded_fp8(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply the function of fp8 layers between which a boundary communicates."""
    return function.apply(*args)
