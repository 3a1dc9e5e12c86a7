"""Units of any module (ZeRO-3): which modules' weights are gathered together, and the hooks that gather and release them.

The order of the calls need not be known, and may change. What was gathered after a unit the last time is gathered ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.comm.collectives import Group, all_gather_integers
from parallel3d.errors import ExecutionError
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.lifetimes import LiveLimits
from parallel3d.zero.external import external_parameters, z3_leaf_module
from parallel3d.zero.weights import Units


def units_of(model: nn.Module) -> dict[nn.Module, int]:
    """Return the number of the unit of each module that has one. The first module of a unit contains the others.

    A unit is a block with all that it contains; or a module with parameters of its own that is in no block, without what it
    contains. Blocks are the modules marked by set_z3_leaf_modules; those of the classes in Hugging Face's `_no_split_modules`;
    if there are none, the members of the ModuleList with the most parameters.
    """
    blocks, numbers, found = set(_blocks(model)), count(), dict[nn.Module, int]()

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


def _blocks(model: nn.Module) -> list[nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or ())
    chosen = [module for module in model.modules() if z3_leaf_module(module) or type(module).__name__ in names]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return chosen or max(lists, key=lambda members: sum(p.numel() for m in members for p in m.parameters()), default=[])


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class BlockUnits:
    """Gathers each unit of a module before the module runs, or its backward, and releases it after that.

    A unit whose module contains another one's is kept until the end of a backward, because its own operations run before and
    after those of the others.

    replicas: a group on the host, in which the replicas compare what they are about to gather.
    """

    def __init__(self, model: nn.Module, units: Units, limits: LiveLimits, replicas: Group):
        self._units, self._limits, self._replicas = units, limits, replicas
        self._running: Counter[int] = Counter()  # unit -> forwards that run now and need it
        self._outer: set[int] = set()
        self._kept: set[int] = set()  # outer units that are kept until the end of the backward
        # (whether in a backward, unit) -> the unit that was used after it the last time.
        self._following: dict[tuple[bool, int], int] = {}
        self._last: tuple[bool, int] | None = None
        self._ahead: int | None = None
        self._stack: list[nn.Module] = []  # the modules that run now, each of another unit than the one that called it
        numbers = units_of(model)
        paths = {module: path for path, module in model.named_modules()}
        self._names = {number: paths[module] or type(module).__name__ for module, number in reversed(numbers.items())}
        for module, number in numbers.items():
            alone = all(numbers.get(inner) == number for inner in module.modules())
            own = list(module.parameters(recurse=alone))
            if needed := units.of([*own, *external_parameters(module)]):
                module.register_forward_pre_hook(partial(self._before_forward, needed))
                module.register_forward_hook(partial(self._after_forward, needed), always_call=True)
                if not alone:
                    self._outer.update(needed)

    def run(
        self, run: Callable[[Instruction], None], lifetimes: Sequence[Instruction], first: int, i: Instruction
    ) -> None:
        """Run a compute instruction; see LayerUnits.run. Its lifetimes are not planned."""
        run(i)
        self.abort()

    def abort(self) -> None:
        """Release all units, at the end of a forward or backward, or after a failure."""
        self._running.clear()
        self._stack.clear()
        self._kept.clear()
        self._last = self._ahead = None
        self._units.release_all()

    def _before_forward(self, needed: Sequence[int], module: nn.Module, args: Any) -> None:
        if not all(self._running[unit] for unit in needed):
            self._stack.append(module)
            self._running.update(needed)
            self._use(needed)

    def _after_forward(self, needed: Sequence[int], module: nn.Module, args: Any, output: Any) -> None:
        if not self._stack or self._stack[-1] is not module:
            return
        self._stack.pop()
        self._running.subtract(needed)
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._before_backward, needed))
        if not _is_in_backward():  # a recomputation is followed by the backward that needs it
            self._keep_only(())

    def _before_backward(self, needed: Sequence[int], _: Tensor) -> None:
        self._kept.update(self._outer.intersection(needed))
        self._use(needed)

    def _use(self, needed: Sequence[int]) -> None:
        """Gather units, and the one that followed them the last time; release those that are done."""
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
        following = self._following.get((backward, held[-1]))
        self._ahead = following if following is not None and self._may_gather(following) else None
        if self._ahead is not None:
            self._gather(self._ahead)

    def _gather(self, unit: int) -> None:
        """Start to gather a unit. Raises ExecutionError, on all replicas, if they are about to gather different ones."""
        if self._units.is_gathered(unit):
            return
        for replica, [other] in enumerate(all_gather_integers([unit], self._replicas)):
            if other != unit:
                mine = self._replicas.index
                raise ExecutionError(
                    f"replicas call layers in different orders: at the same point replica {mine} needs the weights of "
                    f"{self._names[unit]} and replica {replica} those of {self._names[other]}; call the same layers on all "
                    "replicas, or read weights in parallel3d.zero.GatheredParameters"
                )
        self._units.gather(unit)

    def _may_gather(self, unit: int) -> bool:
        size = self._units.sizes[unit]
        return size <= self._limits.ahead and self._units.live + size <= self._limits.live

    def _keep_only(self, needed: Sequence[int]) -> None:
        running = {unit for unit, number in self._running.items() if number > 0}
        ahead = set() if self._ahead is None else {self._ahead}
        self._units.keep_only(running | self._kept | ahead | set(needed))
