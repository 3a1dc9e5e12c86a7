"""Number formats of a training run, and the scale that keeps fp16 gradients from underflowing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from parallel3d.config import Config, Fp16Config
from parallel3d.errors import PrecisionError
from parallel3d.parameters import DTYPES


@dataclass(frozen=True)
class Precision:
    """Number formats of a training run.

    - weights: dtype that layers hold and compute with, over fp32 masters; None to keep the dtype that they were built in.
    - autocast: dtype of torch.autocast's region around the layers and the loss, None without.
    - scaling: how the loss is scaled, None without.
    - checks_overflow: a step whose gradients aren't finite is skipped, for which the host reads one flag a step.
    - casts_inputs: cast the inputs to the weights' dtype.
    """

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scaling: Fp16Config | None = None
    checks_overflow: bool = False
    casts_inputs: bool = True

    def autocasting(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context of layers and loss."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)

    def cast(self, tree: Any) -> Any:
        """Return a pytree of inputs with its floating-point tensors in the weights' dtype, unless they are to stay."""
        if self.weights is None or not self.casts_inputs:
            return tree
        return tree_map(self._cast, tree)

    def _cast(self, leaf: Any) -> Any:
        return leaf.to(self.weights) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def make_precision(config: Config) -> Precision:
    """Resolve the sections fp16, bf16, torch_autocast and amp of a configuration.

    amp has the levels of apex, without apex: O0 changes nothing; O1 is fp16 autocast with a dynamic loss scale; O2 adds fp16
    weights with fp32 masters; O3 has fp16 weights and no loss scale.
    """
    weights = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else None
    autocast = DTYPES[config.torch_autocast.dtype] if config.torch_autocast.enabled else None
    scaling = config.fp16 if config.fp16.enabled else None
    if autocast is torch.float16 and weights is None:
        scaling = config.fp16  # its other keys, or their defaults
    if config.amp.enabled:
        level = config.amp.opt_level
        weights = torch.float16 if level in ("O2", "O3") else None
        autocast = torch.float16 if level in ("O1", "O2") else None
        scaling = {"O0": None, "O3": Fp16Config(loss_scale=1.0)}.get(level, Fp16Config())
    checks = scaling is not None or config.bf16.check_grad_overflow
    return Precision(
        weights, autocast, scaling, checks, (config.fp16 if config.fp16.enabled else config.bf16).auto_cast
    )


class LossScaler:
    """Factor by which losses are multiplied, and gradients divided again (arXiv:1710.03740).

    settings.loss_scale, if not 0, is the constant scale. Otherwise the scale starts at 2^initial_scale_power and adapts:

    - An overflow costs one of `hysteresis` lives. With one life left it halves the scale, but not below min_loss_scale.
    - The scale doubles in the step after loss_scale_window steps without an overflow, and again after each as many.
    - Lives are restored when the scale doubles; with consecutive_hysteresis also by each step without an overflow.

    The attributes have DeepSpeed's names; cur_iter is the number of steps so far.
    """

    def __init__(self, settings: Fp16Config):
        self._settings = settings
        self.dynamic_loss_scale = settings.loss_scale == 0
        self.cur_scale = 2.0**settings.initial_scale_power if self.dynamic_loss_scale else settings.loss_scale
        self.scale_window, self.min_loss_scale = settings.loss_scale_window, settings.min_loss_scale
        self._lives = settings.hysteresis
        self.cur_iter = 0
        self._last_overflow = -1

    @property
    def loss_scale(self) -> float:
        """The scale."""
        return self.cur_scale

    def update(self, overflow: bool) -> None:
        """Update the scale after a step. Raises PrecisionError, and changes nothing, at an overflow that can't lower it."""
        if not self.dynamic_loss_scale:
            return
        settings = self._settings
        if overflow:
            if self._lives > 1:
                self._lives -= 1
            elif self.cur_scale <= settings.min_loss_scale:
                raise PrecisionError(
                    f"gradients overflow at the lowest loss scale, fp16.min_loss_scale = {settings.min_loss_scale:g}: the loss "
                    "or the gradients are not finite whatever the scale; look for NaN in data or layers, lower the learning "
                    "rate, or use bf16"
                )
            else:
                self.cur_scale = max(self.cur_scale / 2, settings.min_loss_scale)
            self._last_overflow = self.cur_iter
        else:
            fine = self.cur_iter - self._last_overflow - 1  # steps without an overflow before this one
            doubles = fine > 0 and fine % settings.loss_scale_window == 0
            if doubles or settings.consecutive_hysteresis:
                self._lives = settings.hysteresis
            if doubles:
                self.cur_scale *= 2
        self.cur_iter += 1

    def state_dict(self) -> dict[str, float]:
        """Return the scale, the lives left, the steps seen and the step of the last overflow."""
        return {
            "scale": self.cur_scale,
            "lives": self._lives,
            "step": self.cur_iter,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the state that `state_dict` returned; a scale that doesn't adapt stays the configuration's."""
        if not self.dynamic_loss_scale:
            return
        self.cur_scale, self._lives = state["scale"], int(state["lives"])
        self.cur_iter, self._last_overflow = int(state["step"]), int(state["last_overflow"])
