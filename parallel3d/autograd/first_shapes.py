"""Functions compiled for the shapes of their first call, which run other shapes as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Graphs of one code object, in place of torch's limit against endless compilation. A layer compiles once in training and once
# in evaluation, but many kinds of layers share their code.
_MOST_GRAPHS = 1024
Around = Callable[[Callable[..., Any]], Callable[..., Any]]


class FirstShapes:
    """A function that torch.compile compiles for the shapes of its first call, in training and in evaluation.

    Other shapes, such as those of a dataset's last and short batch, run the function itself: compiling again would take longer
    than what it saves, and torch gives up after a few times. With `dynamic` true there is one graph for all shapes.

    - name: of the layer.
    - around: returns what to compile in place of the function, which computes the same.
    - others: shapes -> number of calls that ran uncompiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        around: Around | None = None,
        **options: Any,
    ):
        self.name, self.others = name, Counter[str]()
        self._function = function if around is None else around(function)
        self._dynamic = bool(options.get("dynamic"))
        self._compiled = torch.compile(self._function, **{**options, "dynamic": self._dynamic})
        self._first: dict[bool, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function, or the function itself."""
        if torch._dynamo.eval_frame._stance.stance != "default":  # for example while text is generated
            return self._function(*args, **kwargs)
        shapes = None if self._dynamic else _shapes_of((args, kwargs) if kwargs else args)
        learns = torch.is_grad_enabled()
        is_first = learns not in self._first
        if shapes == self._first.setdefault(learns, shapes):
            try:
                if is_first:
                    with torch._dynamo.config.patch(recompile_limit=_MOST_GRAPHS):
                        return self._compiled(*args, **kwargs)
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.TorchRuntimeError:  # its first line doesn't say which operator failed, and why
                self._compiled = self._function
                return self._function(*args, **kwargs)
        self.others[_text_of(shapes)] += 1
        return self._function(*args, **kwargs)

    @property
    def shapes(self) -> str:
        """The shapes of the first call in training, as text."""
        return _text_of(self._first.get(True, ()))


def _shapes_of(value: Any) -> Any:
    """Return the shapes of the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, Mapping):
        value = list(value.values())
    return tuple([_shapes_of(item) for item in value]) if isinstance(value, (tuple, list)) else None


def _text_of(shapes: Any) -> str:
    """Format shapes: "[2, 8, 16], [8, 4]"."""
    if isinstance(shapes, torch.Size):
        return str(list(shapes))
    return ", ".join(filter(None, map(_text_of, shapes or ())))
