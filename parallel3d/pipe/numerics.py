"""check_numerics: finds the first layer and micro-batch with an inf or a NaN, before the loss becomes NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.activity import PHASE, Phase
from parallel3d.errors import NumericsError
from parallel3d.pipe.module import PipelineModule


class NumericsCheck:
    """Checks the outputs of layers and of the modules inside, losses, and the gradients of activations and parameters.

    A NaN is an error everywhere, an inf only in tensors that require grad: others may be masks. Each check waits for the
    device.

    - checks_gradients: whether to check gradients. A dynamic loss scale finds its limit by overflows, which are no errors.
    - micro_batch: returns the index of the current micro-batch, where the script calls forward and backward itself.
    """

    def __init__(self, model: PipelineModule, checks_gradients: bool, micro_batch: Callable[[], int]):
        self.checks_gradients = checks_gradients
        self._model = model
        self._place = f"rank {model.groups.rank}, stage {model.stage_id}"
        self._micro_batch = micro_batch
        self._names = {info.parameter: info.name for info in model.parameter_infos()}

    def watch_layers(self) -> None:
        """Check the outputs of layers and modules, and their gradients, from now on."""
        model = self._model
        for key, layer in model.layers.items():
            for name, module in layer.named_modules():
                title = f"{model.global_name(int(key), name).rstrip('.')} ({type(module).__name__})".strip()
                module.register_forward_hook(lambda _, __, output, title=title: self._check_output(title, output))
        model.calls.watch(self._watched)

    def gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Check the gradient of a parameter."""
        self._check(f"the gradient of {self._names[parameter]}", gradient)

    def _watched(self, layer: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name = f"layers.{layer} ({self._model.layer_names[layer]})"

        def run(x: Any) -> Any:
            y = function(x)
            self._check_output(name, y)
            return y

        return run

    def _check_output(self, name: str, output: Any) -> None:
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            self._check(f"the output of {name}", leaf, nan_only=not leaf.requires_grad)
            if self.checks_gradients and leaf.requires_grad:
                leaf.register_hook(partial(self._check, f"the gradient of the output of {name}"))

    def loss(self, loss: Tensor) -> None:
        """Check a micro-batch's loss."""
        self._check("the loss", loss)

    def _check(self, what: str, tensor: Tensor, nan_only: bool = False) -> None:
        """Raise NumericsError if `tensor` has a NaN, or an inf unless nan_only."""
        values = tensor.detach()
        wrong = values.isnan() if nan_only else ~values.isfinite()
        count = int(wrong.sum())
        if not count:
            return
        kind = "NaN" if bool(values.isnan().any()) else "inf"
        amount = f"{count} of {values.numel()} values, the first at {wrong.nonzero()[0].tolist()}"
        # In a schedule, the executor adds rank, stage, micro-batch and instruction.
        in_schedule = self._model.groups.activity.slots[PHASE] == Phase.PROGRAM
        place = "" if in_schedule else f"{self._place}, micro-batch {self._micro_batch()}: "
        raise NumericsError(f"{place}{kind} in {what} ({amount}), the first that check_numerics found")
