"""Units of any module (ZeRO-3): which modules' weights are gathered together, and the hooks that gather and release them.

The order of the calls need not be known, and may change. The unit that followed another one the last time is prefetched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.autograd.split_backward import is_split
from parallel3d.comm.collectives import Group, start_all_gather_integers
from parallel3d.comm.structures import tensors_of
from parallel3d.errors import ExecutionError
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.lifetimes import LiveLimits
from parallel3d.zero.external import (
    WatchedParameters,
    declare_deepspeed_attributes,
    external_parameters,
    register_external_parameter,
    z3_leaf_module,
)
from parallel3d.zero.weights import Units


def units_of(model: nn.Module) -> dict[nn.Module, int]:
    """Return the number of the unit of each module that has one. The first module of a unit contains the others.

    A unit is a block with all that it contains; or a module with parameters of its own that is in no block, without what it
    contains. Blocks are the modules marked by set_z3_leaf_modules; those of the classes in Hugging Face's `_no_split_modules`;
    if there are none, the members of the ModuleList with the most parameters.
    """
    blocks, numbers, found = set(blocks_of(model)), count(), dict[nn.Module, int]()

    def visit(module: nn.Module, block: int | None) -> None:
        if module in found:
            return
        if block is None and (module in blocks or any(True for _ in module.parameters(recurse=False))):
            found[module] = next(numbers)
        elif block is not None:
            found[module] = block
        for child in module.children():
            visit(child, found[module] if module in blocks else block)

    visit(model, None)
    return found


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a module, see units_of; none if there are no such modules."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    chosen = [module for module in model.modules() if z3_leaf_module(module) or type(module).__name__ in names]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return chosen or max(lists, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class BlockUnits:
    """Gathers each unit of a module before the module runs, or its backward, and releases it after that.

    A unit whose module contains another one's is kept until the end of a backward, because its own operations run before and
    after those of the others. Parameters of other modules that a module has in a list, tuple or dict are gathered with it. A
    parameter that its forward reads as an attribute of another module is gathered then, and from then on with the reader.

    replicas: a group on the host, in which the replicas compare what they are about to gather. A replica for which a unit
    follows as it did the last time goes on, and awaits the comparison at the next gather; one that needs another unit awaits it
    first.
    module, forward_hooks, backward_hooks: as in DeepSpeed's `optimizer.parameter_offload`; scripts remove the hooks while they
    generate from weights that they have gathered, and add them again by _register_deepspeed_module.
    """

    def __init__(self, model: nn.Module, units: Units, limits: LiveLimits, replicas: Group):
        self._units, self._limits, self._replicas = units, limits, replicas
        self._compared: Callable[[], list[list[int]]] | None = None  # waits for the units that the replicas gather
        self.module = model
        self.forward_hooks: list[RemovableHandle] = []
        self.backward_hooks: list[RemovableHandle] = []
        self._running: Counter[int] = Counter()  # unit -> forwards that run now and need it
        self._kept: set[int] = set()  # outer units that are kept until the end of the backward
        # (whether in a backward, unit) -> the unit that was used after it the last time.
        self._following: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        self._ahead: int | None = None
        self._stack: list[nn.Module] = []  # the modules that run now, each of another unit than the one that called it
        numbers = units_of(model)
        paths = {module: path for path, module in model.named_modules()}
        self._names = {number: paths[module] or type(module).__name__ for module, number in reversed(numbers.items())}
        # Modules that contain other units, and those that contain none, with all inside them.
        self._outer, self._alone = {model}, list[nn.Module]()
        self._needed: dict[nn.Module, tuple[int, ...]] = {}
        for module in dict.fromkeys([model, *numbers, *model.modules()]):
            alone = module in numbers and all(numbers.get(m) == numbers[module] for m in module.modules())
            inside = set(module.parameters())
            kept = [
                p for p in tree_leaves(list(vars(module).values())) if isinstance(p, nn.Parameter) and p not in inside
            ]
            needed = units.of([*module.parameters(recurse=alone), *kept, *external_parameters(module)])
            if needed or module is model:
                self._needed[module] = needed
            if alone:
                self._alone.append(module)
            else:
                self._outer.add(module)
        self._watch(model.modules() if units.sizes else ())
        declare_deepspeed_attributes(model)
        self._register_deepspeed_module(model)

    def __reduce__(self) -> tuple[Callable[[], BlockUnits], tuple[()]]:
        """Copy and pickle as an object without units: the weights of a copied module are its own and need no gather."""
        return _no_units, ()

    def remove_hooks(self) -> None:
        """Take the hooks out of the model."""
        for hook in self.forward_hooks:
            hook.remove()
        self.forward_hooks = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Add the hooks to the model, unless they are there."""
        self.remove_hooks()
        for inner in self._needed if self._units.sizes else ():
            before = inner.register_forward_pre_hook(self._before_forward)
            self.forward_hooks += [before, inner.register_forward_hook(self._after_forward, always_call=True)]

    def compile(self, options: Mapping[str, Any]) -> int:
        """Compile the forward of each block, without the hooks; return their number. options: of torch.compile."""
        number, inner = 0, set[nn.Module]()
        for module in self._alone:  # a block comes before what it contains
            inside = set(module.modules()) - {module}
            if inside and module not in inner and not is_split(module):
                vars(module)["forward"] = FirstShapes(module.forward, type(module).__name__, **options)
                self._watch(module.modules(), on=False)  # torch.compile does not support this class of dict
                number += 1
                inner |= inside
        self._needed = {module: needed for module, needed in self._needed.items() if module not in inner}
        self._register_deepspeed_module(self.module)
        return number

    def run(
        self, run: Callable[[Instruction], None], lifetimes: Sequence[Instruction], first: int, i: Instruction
    ) -> None:
        """Run a compute instruction; see LayerUnits.run. Its lifetimes are not planned."""
        run(i)
        self._settle()
        self.abort()

    def begin(self, program: Sequence[Instruction]) -> None:
        """Begin a program; see LayerUnits.begin. Its gathers are not planned."""

    def abort(self) -> None:
        """Release all units, at the end of a forward or backward, or after a failure."""
        self._running.clear()
        self._stack.clear()
        self._kept.clear()
        self._last = self._ahead = self._compared = None
        self._units.release_all()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        needed = self._needed[module]
        if module is self.module or not all(self._running[unit] for unit in needed):
            self._stack.append(module)
            self._running.update(needed)
            self._use(needed)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        needed = self._needed[module]
        self._running.subtract(needed)
        if torch.is_grad_enabled() and needed:
            outer = module in self._outer
            for tensor in tensors_of(output):
                if tensor.requires_grad and (outer or not self._has_hook(tensor)):
                    tensor.register_hook(partial(self._before_backward, needed, outer))
        if module is self.module:
            self._last = self._ahead = None
            self._settle()
        if not _is_in_backward():  # a recomputation is followed by the backward that needs it
            self._keep_only(())

    def _has_hook(self, output: Tensor) -> bool:
        """Return whether another module has returned the same tensor: its gradient comes when that module's backward begins."""
        hooks: Mapping[int, Any] = output._backward_hooks or {}
        return any(getattr(hook, "func", None) == self._before_backward for hook in hooks.values())

    def _before_backward(self, needed: Sequence[int], outer: bool, _: Tensor) -> None:
        if outer:
            self._kept.update(needed)
        # An outer module may have returned the tensor of an inner one, whose weights have come first then.
        self._use(needed, releases=not outer)

    def _watch(self, modules: Iterable[nn.Module], on: bool = True) -> None:
        """Have `_gather_unregistered` called, or no longer, when parameters are read as attributes of these modules."""
        for module in modules:
            own = vars(module)["_parameters"]
            vars(module)["_parameters"] = WatchedParameters(own, self._gather_unregistered) if on else dict(own)

    def _gather_unregistered(self, parameter: nn.Parameter) -> None:
        """Gather a parameter of another unit for the module that runs, now and from now on whenever that runs."""
        if self._stack:
            module, (unit,) = self._stack[-1], self._units.of([parameter])
            register_external_parameter(module, parameter)
            self._needed[module] += (unit,)
            self._running[unit] += 1
            self._gather(unit)
            self._units.use((unit,))

    def _use(self, needed: Sequence[int], releases: bool = True) -> None:
        """Gather units, and the one that followed them the last time; release those that are done, if `releases`."""
        if releases:
            self._keep_only(needed)
        for unit in needed:
            self._gather(unit)
        self._units.use(needed)
        backward = _is_in_backward()
        held = [unit for unit in needed if self._units.holds(unit)]
        if not held:
            return  # in GatheredParameters, where replicas may do different things
        for unit in held:
            if self._last is not None and self._last != (backward, unit):
                self._following[self._last] = unit
            self._last = backward, unit
        self._units.expect(self._coming(backward, held[-1]))
        following = self._following.get((backward, held[-1]))
        self._ahead = following if following is not None and self._may_gather(following) else None
        if self._ahead is not None:
            self._gather(self._ahead)

    def _coming(self, backward: bool, unit: int | None) -> Iterator[int]:
        """Yield the units that were used after this one the last time and are not gathered."""
        for _ in self._units.sizes:
            unit = self._following.get((backward, unit)) if unit is not None else None
            if unit is not None and not self._units.is_gathered(unit):
                yield unit

    def _gather(self, unit: int) -> None:
        """Start to gather a unit. Raises ExecutionError if the replicas are about to gather different ones."""
        if self._units.is_gathered(unit):
            return
        self._settle()
        self._compared = start_all_gather_integers([unit], self._replicas)
        if self._last is None or self._following.get(self._last) != unit:
            self._settle()
        self._units.gather(unit)

    def _settle(self) -> None:
        """Await the last comparison. Raises ExecutionError, on all replicas, if they gather different units."""
        compared, self._compared = self._compared, None
        units = [unit for [unit] in compared()] if compared is not None else []
        mine = self._replicas.index
        for replica, other in enumerate(units):
            if other != units[mine]:
                raise ExecutionError(
                    f"replicas call layers in different orders: at the same point replica {mine} needs the weights of "
                    f"{self._names[units[mine]]} and replica {replica} those of {self._names[other]}; call the same layers on "
                    "all replicas: generate() with synced_gpus=True, or in "
                    "parallel3d.zero.GatheredParameters(model.parameters())"
                )

    def _may_gather(self, unit: int) -> bool:
        size = self._units.sizes[unit]
        return size <= self._limits.ahead and self._units.live + size <= self._limits.live

    def _keep_only(self, needed: Sequence[int]) -> None:
        running = {unit for unit, number in self._running.items() if number > 0}
        ahead = set() if self._ahead is None else {self._ahead}
        self._units.keep_only(running | self._kept | ahead | set(needed))


def _no_units() -> BlockUnits:
    units = BlockUnits.__new__(BlockUnits)
    units._needed, units._stack, units.module = defaultdict(tuple), [], nn.Module()
    return units
