"""How another format stores the parameters of a layer: under other names, several in one tensor, or transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Section:
    """Rows `start` to `start + size` of a stored tensor of `of` rows; all of it by default."""

    name: str
    size: int
    start: int = 0
    of: int | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the stored tensor."""
        return self.size if self.of is None else self.of


@dataclass(frozen=True)
class Stored:
    """How a parameter is stored: it is these sections, one behind the other along its dim 0.

    rest: the parameter's other sizes. transposed: what is a row here is a column in the file, [in, out] for [out, in].
    """

    sections: tuple[Section, ...]
    rest: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, as stored."""
        whole = {section.name: (section.rows, *self.rest) for section in self.sections}
        return {name: shape[::-1] if self.transposed else shape for name, shape in whole.items()}

    def rows_of(self, tensor: Tensor, section: Section) -> Tensor:
        """The section of a stored tensor, as the parameter has it: a view."""
        rows = tensor.t() if self.transposed else tensor
        return rows.narrow(0, section.start, section.size) if rows.dim() else rows


def all_of(name: str, *shape: int) -> Stored:
    """A parameter of this shape that is stored as it is."""
    size, *rest = shape or (1,)
    return Stored((Section(name, size),), tuple(rest))


# Of a parameter by its name in the layer.
LayerNames = Mapping[str, Stored]
