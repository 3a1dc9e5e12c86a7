"""Compilation by torch.compile, of each layer separately.

A layer becomes one graph forward and one backward. Linears and embeddings whose weight gradients go through the gradient sink,
and collectives, are operators of the graph (in_graph.py, differentiable.py). So BACKWARD_INPUT and BACKWARD_WEIGHT can run
separately, and weight gradients are added directly to their accumulators.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.autograd.in_graph import INDUCTOR_OPTIONS, Port
from parallel3d.autograd.selective import recomputed_in_graph
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import is_split, open_ports
from parallel3d.config import SELECTIVE, Config
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.logs import logger
from parallel3d.monitor.uncompiled import UncompiledWriter
from parallel3d.pipe.blocks import BlockUnits
from parallel3d.pipe.calls import choice_rule
from parallel3d.pipe.module import PipelineModule
from parallel3d.zero.external import unwatch


class Compilation:
    """Compiles the layers of this rank, and reports where their graphs break.

    sink: takes the gradients of layers that tensor parallelism has sharded, see open_ports.
    blocks: with ZeRO-3, the units of a module that is not a pipeline, which are compiled instead of the whole module.
    num_layers: the number of compiled layers. broke: whether graphs broke in the first step.
    """

    def __init__(self, model: PipelineModule, config: Config, sink: GradientSink, blocks: BlockUnits | None = None):
        self._model, self._config, self._sink, self._blocks = model, config.compile, sink, blocks
        self._directory = config.run_record.directory
        self._writer: UncompiledWriter | None = None
        self._ports: list[tuple[str, nn.Module, Port]] = []
        self._seen: Counter[str] = Counter()
        self._reports = False
        self.num_layers = 0
        self.is_compiled = self.broke = False

    def compile(self, changes: Mapping[str, Any]) -> None:
        """Compile the loss, and this rank's layers in place, except bare linears and embeddings; see Engine.compile.

        changes: arguments of torch.compile that replace the configuration's. Raises ConfigError for a backend or mode that
        torch.compile doesn't have.
        """
        model, config = self._model, self._config
        given = {
            "backend": config.backend,
            "mode": config.mode,
            "dynamic": config.dynamic,
            "options": {**config.options},
        }
        options = {key: value for key, value in {**given, **changes}.items() if value not in (None, {})}
        chosen = choice_rule(config.layers, model.layer_names, "compile.layers")
        try:
            torch.compile(lambda x: x, **options)
        except Exception as error:
            raise ConfigError(f"compile: torch.compile does not accept {options}: {error}") from error
        options = torch_options(options, model.groups.model.size > 1)
        # In the graph of a frozen layer nothing is recomputed, but PyTorch 2.13 refuses random operators there that might be.
        if hasattr(torch._functorch.config, "remat_using_tags_for_fwd_loss_bwd_graph"):
            torch._functorch.config.remat_using_tags_for_fwd_loss_bwd_graph = False
        self._ports = open_ports(model, self._sink)
        if self._blocks is not None:
            self.num_layers += self._blocks.compile(options)
        for place, module in model.calls.modules() if self._blocks is None else ():
            if chosen(place, module) and not is_split(module):
                self._compile_layer(module, options)
                self.num_layers += 1
        if config.layers is None:
            model.wrap_loss(lambda loss_fn: _compiled_loss(loss_fn, model.groups.model.size, options))
        self._seen = _graph_breaks()
        self._note_progress()
        if self._directory is not None and model.groups.rank == 0:
            own = [f for module in model.modules() for f in vars(module).values() if isinstance(f, FirstShapes)]
            self._writer = UncompiledWriter(own, Path(self._directory))
        self.is_compiled = self._reports = True

    def check_weights(self) -> None:
        """Raise ExecutionError if a weight or bias was replaced since it was compiled: the new one would get no gradient."""
        for name, layer, port in self._ports:
            if not port.leads_to(layer._parameters.get("weight"), layer._parameters.get("bias")):
                raise ExecutionError(
                    f"a parameter of layer {name!r} is another object than when it was compiled, and gets no gradient; change "
                    "it in place, by weight.copy_(...) in torch.no_grad(), or replace it before parallel3d.initialize"
                )

    def _compile_layer(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Compile a layer by its own method, or as nn.Module.compile does, with selective recomputation inside its graph."""
        unwatch(module)
        policy = self._model.calls.policy_of(module)
        if policy in SELECTIVE:
            self._model.calls.leave_to_graph(module)
            options = {**options, "around": partial(recomputed_in_graph, policy=policy)}
        if type(module).compile is nn.Module.compile:
            module._compiled_call_impl = FirstShapes(module._call_impl, type(module).__name__, **options)
        else:
            module.compile(**options)

    def _note_progress(self) -> None:
        """Record each compilation of this process as progress, so that a slow first step is not taken for a hang."""
        from torch._dynamo.callback import callback_handler

        if not self.is_compiled:
            note = self._model.groups.activity.compiled
            for register in (callback_handler.register_start_callback, callback_handler.register_end_callback):
                register(note)
            for remove in (callback_handler.remove_start_callback, callback_handler.remove_end_callback):
                weakref.finalize(self, _call_unless_removed, remove, note)

    def report(self) -> None:
        """Print, on rank 0 and once, how many layers are compiled and where their graphs broke in the first step.

        After every step, write which calls ran uncompiled.
        """
        if self._writer is not None:
            self._writer.write()
        if not self._reports:
            return
        self._reports = False
        breaks = self.breaks()
        self.broke = bool(breaks)
        if self._model.groups.rank == 0:
            lines = [f"compiled {self.num_layers} layers of rank 0"]
            lines += [f"  a graph broke {count} x: {reason}" for reason, count in breaks.items()]
            logger.info("%s", "\n".join(lines))

    def breaks(self) -> Mapping[str, int]:
        """Return why graphs broke since the last call, in all compiled code, and how often.

        The reasons are torch's, without the part for torch's own developers.
        """
        now = _graph_breaks()
        new, self._seen = now - self._seen, now
        reasons: Counter[str] = Counter()
        for reason, count in new.items():
            # Arguments and addresses would make one reason look like many.
            reasons[re.sub(r" at 0x[0-9a-f]+", "", reason.partition(" Developer debug context: ")[0])] += count
        return reasons


def torch_options(options: Mapping[str, Any], sliced: bool = False) -> dict[str, Any]:
    """Return these options of torch.compile, for graphs whose tensors may wait in the sink.

    sliced: other tensor-parallel ranks compute the same in copies of layers, such as norms. Kernels are then not chosen by
    times, as the ranks would choose different ones, and the copies differ in rounding. Except in modes that ask for it.
    """
    if options["backend"] != "inductor":
        return dict(options)
    # torch.compile takes either a mode or options.
    others = {key: value for key, value in options.items() if key not in ("mode", "options")}
    of_mode = torch._inductor.list_mode_options(options.get("mode", "default"), options.get("dynamic"))
    given = {**of_mode, **options.get("options", {}), **INDUCTOR_OPTIONS}
    from parallel3d.autograd.recomputed_swiglu import RecomputedSwiGLU  # imports the compiler, which takes a second

    # A pass that the script has set for all graphs stays.
    given["post_grad_custom_post_pass"] = torch._inductor.config.post_grad_custom_post_pass or RecomputedSwiGLU()
    if given.get("cpp_wrapper"):  # for a backward, which is compiled later, PyTorch forgets what follows from it
        given = {"triton.store_cubin": True, "triton.autotune_at_compile_time": True, **given}
    if sliced and not given.get("max_autotune"):
        given.setdefault("deterministic", True)
    return {**others, "options": given}


def _compiled_loss(loss_fn: Callable[..., Any], tensor_size: int, options: Mapping[str, Any]) -> Callable[..., Any]:
    compiled = getattr(loss_fn, "compiled", None)
    if not callable(compiled):
        return torch.compile(loss_fn, **options) if tensor_size == 1 else loss_fn
    # Without the mode: with CUDA graphs, the next call would overwrite tensors saved for the backward of this one.
    result: Callable[..., Any] = compiled(**{key: options[key] for key in ("backend", "dynamic") if key in options})
    return result


def _call_unless_removed(remove: Callable[[Any], None], callback: Any) -> None:
    with suppress(ValueError):  # torch.compiler.reset() removes all callbacks
        remove(callback)


def _graph_breaks() -> Counter[str]:
    from torch._dynamo.utils import counters  # importing the compiler takes a second

    return Counter({" ".join(str(reason).split()): count for reason, count in counters["graph_break"].items()})
