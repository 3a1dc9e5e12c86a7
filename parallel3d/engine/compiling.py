"""An engine's side of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.engine.compilation import Compilation
from parallel3d.layer_choice import choice_rule
from parallel3d.pipe.module import PipelineModule


class Compiling:
    """Compiles this rank's layers, and says once where their graphs broke."""

    config: Config
    _model: PipelineModule
    _groups: ProcessGroups
    _compilation: Compilation | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether layers are compiled."""
        return self._compilation is not None

    def compile(self, backend: str | None = None, compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the layers as the configuration's `compile` section says, enabled or not, and the loss.

        A loss may say how by a method of its own, `compiled(backend=..., dynamic=...)`, where these are given, as CausalLMLoss
        does; under tensor slices no other is compiled.
        backend, compile_kwargs: of torch.compile, before the section's. Raises ConfigError.
        """
        section = self.config.compile
        chosen = choice_rule(section.layers, self._model.layer_names, "compile.layers")
        self._compilation = Compilation(section, chosen)
        options = {**({"backend": backend} if backend else {}), **(compile_kwargs or {})}
        self._compilation.compile(self._model.called_modules(), **options)
        loss_fn = self._model.loss_fn
        if loss_fn is not None and section.layers is None:
            self._model.loss_fn = _compiled_loss(loss_fn, self._groups.model.size, self._compilation.options)
        self._compilation_to_report = True

    def _report_compilation(self) -> None:
        """After the first step."""
        if self._compilation is None or not self._compilation_to_report:
            return
        self._compilation_to_report = False
        breaks = self._compilation.breaks()
        if self._groups.rank == 0:
            lines = [
                f"compiled {self._compilation.num_layers} layers of rank 0; their graphs break at linears and collectives"
            ]
            lines += [f"  and {count} x: {reason}" for reason, count in breaks.items()]
            print("\n".join(lines), flush=True)


def _compiled_loss(loss_fn: Callable[..., Any], num_slices: int, options: Mapping[str, Any]) -> Callable[..., Any]:
    compiled = getattr(loss_fn, "compiled", None)
    if not callable(compiled):
        return torch.compile(loss_fn, **options) if num_slices == 1 else loss_fn
    # Not the mode: CUDA graphs would overwrite what one call keeps for its backward in the next.
    of_parts: Callable[..., Any] = compiled(**{key: options[key] for key in ("backend", "dynamic") if key in options})
    return of_parts
