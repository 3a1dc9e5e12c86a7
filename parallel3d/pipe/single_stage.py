"""A plain module as a pipeline of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.autograd.selective import recomputed_in_graph
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import RecomputationPolicy, leaves_open
from parallel3d.errors import ConfigError
from parallel3d.pipe.blocks import blocks_of, units_of
from parallel3d.pipe.calls import policy_rule
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import EnterLayer, same_stream


class SingleStageModule(PipelineModule):
    """Any nn.Module as a pipeline of one stage with one layer: whole on every rank, over which the world is data parallel.

    groups: those over which tensor-parallel layers inside the module are sharded; None without any.

    A micro-batch is the module's input: a mapping is passed as keywords, a tuple or list as arguments, anything else as the
    one argument. The module's result is the loss or contains it: as `.loss`, under "loss", or first in a tuple or list.
    Parameters keep the names that the module gives them. What is recomputed in the backward are its blocks, see units_of.
    """

    def __init__(self, model: nn.Module, groups: ProcessGroups | None = None):
        units = units_of(model)
        self._unit_of = {
            f"{path}.{name}" if path else name: units[module]
            for path, module in model.named_modules(remove_duplicate=False)
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        }
        self._given_groups = groups
        topology = None if groups is None else groups.topology
        super().__init__([model], num_stages=1, topology=topology, loss_fn=_loss_of)

    def pair(self, micro_batch: Any) -> tuple[Any, Any]:
        """Return the whole micro-batch as inputs."""
        return micro_batch, None

    def use_checkpointer(self, checkpointer: Checkpointer) -> None:
        """Recompute the module's blocks by the checkpointer's policy. Raises ConfigError where that can't be done."""
        super().use_checkpointer(checkpointer)
        policies = checkpointer.settings.policy
        if policies is None:  # the module may recompute by itself
            return
        blocks = blocks_of(self.layers["0"])
        if leaves_open(policies) or not blocks:
            reason = (
                'is "auto", which needs a PipelineModule' if blocks else "needs blocks, in a ModuleList or named by "
            )
            reason += "" if blocks else "parallel3d.zero.set_z3_leaf_modules, and the model has none"
            raise ConfigError(
                f"activation_checkpointing.policy {reason}; leave it out, or call parallel3d.checkpointing.checkpoint "
                "in the model"
            )
        policy_of = policy_rule(None, policies, [type(block).__name__ for block in blocks])
        for k, block in enumerate(blocks):
            known = getattr(vars(block).get("forward"), "__self__", None)
            plain = known.plain if isinstance(known, _Recomputing) else block.forward  # of an earlier engine
            policy = policy_of(k, block)
            vars(block)["forward"] = plain if policy == "none" else _Recomputing(plain, checkpointer, policy).forward

    def forward_chunk(self, chunk: int, x: Any, enter: EnterLayer = same_stream, restores: bool = False) -> Any:
        """Run the module on a micro-batch. Its blocks' recomputations restore random states in any case."""
        self.wait_for_weights(self)
        enter(0)
        if isinstance(x, Mapping):
            return self.layers["0"](**x)
        return self.layers["0"](*x) if isinstance(x, (tuple, list)) else self.layers["0"](x)

    def unit_of(self, layer: int, name: str) -> int:
        """Return the number of the unit of a parameter of the module; see units_of."""
        return self._unit_of[name]

    def global_name(self, layer: int, name: str) -> str:
        """Return the module's own name of the parameter."""
        return name


def _loss_of(outputs: Any, _: Any) -> Tensor:
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"the module returned {type(outputs).__name__} without a loss; let its forward return the loss (or .loss, "
            '"loss", or a tuple that begins with it), or use engine(...), engine.backward(loss) and engine.step()'
        )
    return loss


class _Recomputing:
    """Holder of a block's replaced forward, the method `forward`. A copy of the block calls a copy of this object.

    plain: the block's forward.
    """

    def __init__(self, plain: Callable[..., Any], checkpointer: Checkpointer, policy: RecomputationPolicy):
        self.plain, self._run = plain, partial(checkpointer.under(policy), plain)
        self._in_graph = recomputed_in_graph(plain, policy)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; its backward recomputes what the policy says."""
        if torch.is_grad_enabled():  # a recomputation would add keys and values to a cache a second time
            args = tuple([None if _is_cache(value) else value for value in args])
            kwargs = {name: value for name, value in kwargs.items() if not _is_cache(value)}
        run = self._in_graph if torch.compiler.is_compiling() else self._run
        return run(*args, **kwargs)


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length")  # a Cache of Hugging Face's
