"""Topology of ranks: the coordinates of each process in the pipeline × data × tensor grid, and the ranks along each axis."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from keyword import iskeyword
from numbers import Integral
from typing import Any

from parallel3d.errors import TopologyError, nearest


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ProcessTopology:
    """A row-major grid of ranks (the last axis varies fastest), immutable, with the methods of DeepSpeed's class.

    Every look-up is arithmetic on strides: O(1) for one rank, O(size of the result) for a list of ranks.
    """

    axes: tuple[str, ...]
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # difference of ranks between neighbours along each axis

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        _check_axes(axes, dims)
        dims = [int(dim) for dim in dims]
        object.__setattr__(self, "axes", tuple(axes))
        object.__setattr__(self, "dims", tuple(dims))
        object.__setattr__(self, "strides", tuple(math.prod(dims[i + 1 :]) for i in range(len(dims))))

    @property
    def ProcessCoord(self) -> Any:
        """Named tuple class of this topology's coordinates, with a field per axis."""
        return _coord_class(self.axes)

    def world_size(self) -> int:
        """Return the number of ranks, the product of all dims."""
        return math.prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the axis names, slowest axis first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along `axis`; 0 for an axis that this topology doesn't have, as in DeepSpeed."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord: int) -> int:
        """Return the rank at `coord`, one index for each axis; TopologyError for a missing or unknown axis or index."""
        self._check_known(coord)
        missing = [axis for axis in self.axes if axis not in coord]
        if missing:
            given = ", ".join(f"{axis}={index}" for axis, index in coord.items())
            raise TopologyError(
                f"get_rank({given}) lacks {', '.join(missing)}: it needs an index for each axis of {self}; "
                f"filter_match({given}) lists all ranks that match"
            )
        for axis, dim in zip(self.axes, self.dims, strict=True):
            if coord[axis] not in range(dim):
                raise TopologyError(f"{axis}={coord[axis]!r} is outside {self}; {axis} must be from 0 to {dim - 1}")
        return self.filter_match(**coord)[0]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of `rank` as a named tuple (`coord.pipe`, `coord.data`); TopologyError if no such rank."""
        if rank not in range(self.world_size()):
            raise TopologyError(f"rank {rank!r} is outside {self}; ranks go from 0 to {self.world_size() - 1}")
        return self.ProcessCoord(*(rank // stride % dim for stride, dim in zip(self.strides, self.dims, strict=True)))

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return the coordinate of `rank` as text for file names, without `omit_axes`: `"model_01"`."""
        omitted = frozenset(omit_axes)
        coord = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in coord.items() if axis not in omitted)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return all ranks, ascending, at the given index of each given axis; TopologyError for an unknown axis."""
        self._check_known(filter_kwargs)
        choices: list[Iterable[int]] = []
        for axis, dim, stride in zip(self.axes, self.dims, self.strides, strict=True):
            index = filter_kwargs.get(axis)
            if index is None:
                choices.append(range(0, dim * stride, stride))
            elif index in range(dim):
                choices.append((int(index) * stride,))
            else:
                return []
        return [sum(offsets) for offsets in product(*choices)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return all ranks, ascending, whose index along `axis` is `idx`; TopologyError for an unknown axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along `axis` only; [] for an unknown axis, as in DeepSpeed."""
        if axis not in self.axes:
            return []
        span = self.strides[self.axes.index(axis)]
        return [[first + i * span for i in range(self.get_dim(axis))] for first in self.get_axis_list(axis, 0)]

    def _check_known(self, coord: Iterable[str]) -> None:
        for axis in coord:
            if axis not in self.axes:
                raise TopologyError(f"no axis {axis!r} in {self}.{nearest(axis, self.axes)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessTopology):
            return NotImplemented
        return (self.axes, self.dims) == (other.axes, other.dims)

    def __hash__(self) -> int:
        return hash((self.axes, self.dims))

    def __repr__(self) -> str:
        return f"ProcessTopology(axes={list(self.axes)}, dims={list(self.dims)})"

    def __str__(self) -> str:
        shape = " x ".join(f"{axis}={dim}" for axis, dim in zip(self.axes, self.dims, strict=True))
        return f"{shape} ({self.world_size()} ranks)"


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline × data topology: data-parallel neighbours are adjacent ranks, so gradient reductions use the fastest links."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline × data × tensor topology: the ranks of a tensor-parallel ("model") group are adjacent."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def pipelines_of(topology: ProcessTopology) -> list[list[int]]:
    """Return the ranks of each pipeline."""
    return topology.get_axis_comm_lists("pipe") or [[rank] for rank in range(topology.world_size())]


@cache  # outside the topology, which would not pickle if it held a class made at run time
def _coord_class(axes: tuple[str, ...]) -> Any:
    return namedtuple("ProcessCoord", axes)


def _check_axes(axes: Sequence[str], dims: Sequence[int]) -> None:
    if len(axes) != len(dims):
        raise TopologyError(f"{len(axes)} axes {list(axes)} but {len(dims)} dims {list(dims)}; give one dim an axis")
    if len(set(axes)) != len(axes):
        raise TopologyError(f"axes {list(axes)} repeat a name; give each axis its own")
    for axis, dim in zip(axes, dims, strict=True):
        if not isinstance(axis, str) or not axis.isidentifier() or axis.startswith("_") or iskeyword(axis):
            raise TopologyError(f"axis {axis!r} can't be a keyword argument; use a plain word such as 'pipe'")
        if not isinstance(dim, Integral) or isinstance(dim, bool) or dim < 1:
            raise TopologyError(f"axis {axis!r} has dim {dim!r}; set it to a whole number of ranks, 1 or more")
