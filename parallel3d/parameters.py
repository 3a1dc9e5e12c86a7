"""Parameters as parts of the whole model, whatever the layout; buckets, norm and checkpoints read only this.

Under tensor parallelism a parameter may have two attributes more: `slicing`, where it is a part of a tensor, and
`partial_over`, where it is a copy of a whole one and each rank computes a part of its gradient: the group over which the
gradient is to be summed. A parameter with neither is a copy whose gradient is whole on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The dtypes of weights and gradients, by the configuration's words.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (start, stop) along a dim.
Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ParameterInfo:
    """One trainable parameter of this rank.

    - name: the same in every layout, "layers.<place in the list>.<name in the layer>".
    - owners: the chunks of the whole model that hold a copy, one for each rank where several chunks of a rank share it. More
      than one make a replica group.
    - unit: index of the layer whose weights are gathered together with it if weights are sharded.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[int, ...]
    unit: int = 0

    @property
    def shared(self) -> bool:
        """Whether its gradient is complete only after the backwards of several chunks."""
        return len(self.owners) > 1


@dataclass(frozen=True)
class Slicing:
    """Part of a whole tensor that a rank's parameter is: `ranges` of the whole along `dim`, one after the other.

    - size: of the whole along `dim`.

    Over the ranks of a tensor-parallel group the ranges cover 0 to size exactly once. There is no padding: the parts of two
    ranks may differ in size.
    """

    dim: int
    size: int
    ranges: tuple[Range, ...]

    @property
    def length(self) -> int:
        """Length of the part along `dim`."""
        return sum(stop - start for start, stop in self.ranges)

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor, in memory of its own."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def write(self, whole: Tensor, part: Tensor) -> None:
        """Copy a part to where it belongs in a whole tensor: with the parts of all ranks, the inverse of `part_of`."""
        lengths = [stop - start for start, stop in self.ranges]
        for (start, _), length, values in zip(self.ranges, lengths, part.split(lengths, self.dim), strict=True):
            whole.narrow(self.dim, start, length).copy_(values)


def sliced(whole: Tensor, slicing: Slicing) -> nn.Parameter:
    """Return a parameter with a rank's part of `whole`, marked by its slicing; trainable if `whole` is."""
    parameter = nn.Parameter(slicing.part_of(whole.detach()), whole.requires_grad)
    vars(parameter)["slicing"] = slicing
    return parameter


def slicing_of(parameter: Tensor) -> Slicing | None:
    """Return which part of a whole tensor the parameter is; None where it is whole."""
    slicing: Slicing | None = getattr(parameter, "slicing", None)
    return slicing


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor that a parameter is a part of."""
    slicing = slicing_of(parameter)
    if slicing is None:
        return tuple(parameter.shape)
    return tuple(slicing.size if dim == slicing.dim else size for dim, size in enumerate(parameter.shape))


def replace_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by convert(it), a shared one everywhere by the same tensor.

    A plain tensor in a parameter's place becomes a parameter with its attributes. Unlike module.to(), which swaps the contents
    of fake tensors and fails if something else refers to them.
    """
    converted: dict[Tensor, Tensor] = {}
    for owner in module.modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if tensor not in converted:
                    new = convert(tensor)
                    if not isinstance(new, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
                        vars(new).update(vars(tensor))
                    converted[tensor] = new
                table[name] = converted[tensor]


def copy_of(module: nn.Module, share: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Return copies of modules and parameters, whose memory is share(the module's); by default they share it.

    Changes of the copies' attributes don't reach the module. Configurations are the module's own.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(share(p.detach()), p.requires_grad) for p in module.parameters() if type(p) is nn.Parameter
    }
    memo |= {id(buffer): share(buffer) for buffer in module.buffers()}
    memo |= {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    return copy.deepcopy(module, memo)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's buffers that its state_dict holds, by their names there."""
    for prefix, submodule in module.named_modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's submodules whose state_dict has what their get_extra_state returns, by its names there."""
    for prefix, submodule in module.named_modules():
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state".lstrip("."), submodule
