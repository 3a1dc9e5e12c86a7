"""What torch.compile saves of a region: not all that eager layers would, since its backward makes some of it anew."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import UntypedStorage

# Computed again like what is element-wise.
_COPIES = {"aten::_to_copy", "aten::clone"}


class Remade:
    """Follows what compiled regions make of what, by the keys (_cdata) of storages.

    The compiler's partitioner cuts a region's graph where the fewest bytes pass from the forward to the backward, which
    computes again what is element-wise (torch._functorch.partitioners). Of that this
    finds what needs no other cut than eager layers': what follows from tensors that are kept anyway is dropped for nothing.
    """

    def __init__(self) -> None:
        # What a region made, and nothing outside it has read -> what it entered the region as.
        self._sources: dict[int, Mapping[int, weakref.ref[UntypedStorage]]] = {}

    def read(self, storages: Sequence[UntypedStorage], region: Collection[int]) -> None:
        """Something reads these. region: keys of what the region under way has made; others of these have to be in memory."""
        for storage in storages:
            if storage._cdata not in region:
                self._sources.pop(storage._cdata, None)

    def made(self, key: int, function: Any, storages: Sequence[UntypedStorage], region: Collection[int]) -> None:
        """The region under way makes, or changes, `key` of these by an operator."""
        found: dict[int, weakref.ref[UntypedStorage]] = dict(self._sources.pop(key, {}))
        for storage in storages:
            if storage._cdata not in region:
                found[storage._cdata] = weakref.ref(storage)
            elif storage._cdata in self._sources:
                found.update(self._sources[storage._cdata])
            elif storage._cdata != key:
                return
        if _is_made_anew(function):
            self._sources[key] = found

    def freed(self, key: int) -> None:
        """Nothing keeps it."""
        self._sources.pop(key, None)

    def take(self, but: Collection[int]) -> list[int]:
        """At the end of a forward: what its backward makes anew, none of `but`, which others are given."""
        followed, self._sources = self._sources, {}
        anew = {key for key, sources in followed.items() if all(ref() is not None for ref in sources.values())}
        return sorted(anew.difference(but))


def _is_made_anew(function: Any) -> bool:
    """Whether the partitioner may compute an operator twice: element-wise ones that draw no random numbers."""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return False
    return torch.Tag.pointwise in function.tags or function._schema.name in _COPIES
