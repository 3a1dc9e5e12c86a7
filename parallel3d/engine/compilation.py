"""torch.compile of layers, each by itself.

The graph breaks at every linear whose weight gradient the sink takes (split_backward.py): compiled is what lies between,
so that the gradients of a BACKWARD_INPUT and of its BACKWARD_WEIGHT stay apart, and weight gradients go straight into
their accumulators.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from parallel3d.autograd.split_backward import COMPILE_REASON as SPLIT
from parallel3d.autograd.split_backward import is_split
from parallel3d.comm.collectives import COMPILE_REASON as COLLECTIVE
from parallel3d.config import CompileConfig
from parallel3d.errors import ConfigError
from parallel3d.kernels.reasons import NORM


class Compilation:
    """What is compiled, and where its graphs break. chosen: whether to compile a layer, by its index and itself."""

    def __init__(self, config: CompileConfig, chosen: Callable[[int, Any], bool]):
        self._config = config
        self._chosen = chosen
        self._seen: Counter[str] = Counter()
        self.num_layers = 0
        self.options: dict[str, Any] = {}

    def compile(self, layers: Iterable[tuple[int, nn.Module]], **changes: Any) -> None:
        """Compile these modules in place, but for bare linears and embeddings. changes: of torch.compile's arguments.

        Raises ConfigError for a backend or mode that torch.compile doesn't have.
        """
        given = {"backend": self._config.backend, "mode": self._config.mode, "dynamic": self._config.dynamic, **changes}
        self.options = options = {key: value for key, value in given.items() if value is not None}
        try:
            torch.compile(lambda x: x, **options)
        except Exception as error:
            raise ConfigError(f"compile: torch.compile takes no {options}: {error}") from error
        for place, module in layers:
            if self._chosen(place, module) and not is_split(module):
                module.compile(**options)
                self.num_layers += 1
        self._seen = _graph_breaks()

    def breaks(self) -> Mapping[str, int]:
        """Why graphs broke since the last call, but for split linears and collectives; all compiled code counts.

        Reasons are torch's, without what it tells its own developers.
        """
        now = _graph_breaks()
        new, self._seen = now - self._seen, now
        others: Counter[str] = Counter()
        for reason, count in new.items():
            if not any(own in reason for own in (SPLIT, COLLECTIVE, NORM)):
                others[_short(reason)] += count
        return others


def _short(reason: str) -> str:
    # Of arguments and addresses, which tell one break's reason in many ways.
    return re.sub(r" at 0x[0-9a-f]+", "", reason.partition(" Developer debug context: ")[0])


def _graph_breaks() -> Counter[str]:
    from torch._dynamo.utils import counters  # to import the compiler takes a second

    return Counter({" ".join(str(reason).split()): count for reason, count in counters["graph_break"].items()})
