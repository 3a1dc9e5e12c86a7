"""The gradient sink: the one way by which gradients reach their flat accumulators."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class GradientSink:
    """Lets autograd accumulate into slices of flat buffers, and says when a parameter has its gradient of this backward.

    autograd adds in place to a `.grad` that is there, so the accumulator takes no copy; its hook fires once per backward,
    however often the parameter was used.
    """

    def __init__(self) -> None:
        self._listener: Callable[[nn.Parameter], None] | None = None
        self._accumulators: list[tuple[nn.Parameter, Tensor]] = []

    def attach(self, parameter: nn.Parameter, accumulator: Tensor) -> None:
        """Gradients of `parameter` go to `accumulator` ([*parameter.shape], same dtype and device) from now on."""
        self._accumulators.append((parameter, accumulator))
        parameter.register_post_accumulate_grad_hook(self._accumulated)

    def open(self) -> None:
        """Point every `.grad` at its accumulator; a user's `zero_grad(set_to_none=True)` may have dropped it."""
        for parameter, accumulator in self._accumulators:
            parameter.grad = accumulator

    def listen(self, listener: Callable[[nn.Parameter], None] | None) -> None:
        """Call `listener` with each parameter whose gradient the backward under way has completed; None to stop."""
        self._listener = listener

    def _accumulated(self, parameter: Tensor) -> None:
        if self._listener is not None:
            assert isinstance(parameter, nn.Parameter)
            self._listener(parameter)
