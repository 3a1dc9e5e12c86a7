"""DeepSpeed's names of optimizers, which make objects of other classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch


class OptimizerName:
    """A function that makes optimizers, with which isinstance() may ask for one: for any of these classes.

    Use it as a decorator: `@OptimizerName.of(torch.optim.Adam, torch.optim.AdamW)`.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], classes: tuple[type[torch.optim.Optimizer], ...]):
        self._make, self._classes = make, classes
        update_wrapper(self, make)

    @classmethod
    def of(
        cls, *classes: type[torch.optim.Optimizer]
    ) -> Callable[[Callable[..., torch.optim.Optimizer]], OptimizerName]:
        """Return a decorator of the function that makes optimizers of these classes."""
        return lambda make: cls(make, classes)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return self._make(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(vars(self)["__name__"])  # pickled by name, as a class is

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._classes)
