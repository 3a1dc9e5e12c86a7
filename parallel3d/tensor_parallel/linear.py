"""Linear layers sharded over ranks: by their outputs (column) and by their inputs (row). arXiv:1909.08053, section 3.

y = f(x A) B with A cut by columns and B by rows needs no communication between the two: rank r computes f(x A_r) B_r, and
the sum over r, an all-reduce, is y. Backward, dL/dx = sum_r dL/d(x A_r) A_r^T, another all-reduce, runs while dL/dA_r is
computed. With sequence parallelism x and y are shards of the sequence: an all-gather before A and a reduce-scatter after
B, and their transposes backward, move the same bytes as the two all-reduces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from parallel3d.autograd.fp8 import Fp8Linear, fp8_linears
from parallel3d.autograd.products import NO_BOUNDARY, Pair, RegionBoundary
from parallel3d.autograd.split_backward import SplittableLayer, has_hooks, linears, row_linear
from parallel3d.comm.collectives import Group
from parallel3d.errors import PartitionError
from parallel3d.parameters import sliced
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel.regions import (
    boundary,
    gather_features,
    scatter_features,
    sequence_length,
    slicing_group,
    sum_gradients_over,
)
from parallel3d.tensor_parallel.slicing import Segments, cut


class SlicedLayer(SplittableLayer, ABC):
    """Layer that is sharded over `group`; attributes of its parameters describe this rank's part."""

    group: Group
    _fp8: Fp8Linear | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None
    # Names of the attributes that the layer's text shows.
    shown: ClassVar[tuple[str, ...]]

    @abstractmethod
    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hold this rank's part of a whole layer's parameters: weight [out, in] or [words, dim], bias [out] or None."""

    def use_fp8(self, fp8: Fp8Linear) -> None:
        """Compute the products of this linear layer in fp8."""
        self._fp8 = fp8

    @property
    def _pair(self) -> Pair:
        """The weight and the bias. They are not read as attributes, which would gather an fp8 weight in its own dtype."""
        weight = self._parameters.get("weight")
        assert weight is not None
        return weight, self._parameters.get("bias")

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.register_parameter("weight", cast(nn.Parameter, weight))
        self.register_parameter("bias", cast("nn.Parameter | None", bias))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SlicedLayer:
        """Do the same as nn.Module, for `to`, `cuda`, `to_empty`, and keep the parameters' attributes if it replaces them."""
        before = {name: dict(vars(p)) for name, p in self._parameters.items() if p is not None}
        super()._apply(fn, recurse)
        for name, attributes in before.items():
            vars(self._parameters[name]).update(attributes)
        return self

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer, and the rank's index."""
        shown = [f"{name}={getattr(self, name)}" for name in self.shown]
        return f"{', '.join(shown)}, bias={self.bias is not None}, shard {self.group.index} of {self.group.size}"


class ColumnParallelLinear(SlicedLayer):
    """y = x W^T + b, rank r computing the outputs of its rows of W and b: x: [..., in] -> [..., this rank's out].

    x is replicated; with sequence_parallel it is a shard [..., ceil(seq / tp), in], and y has the whole sequence. With
    gather_output y is the whole [..., out]. Several layers of one input save communication with in_region: x is then what
    `enter_region` returned. segments: sizes of the fused parts of out (q, k, v or gate, up), or Segments
    (AttentionHeads(...).query), each sharded by itself; a rank's output has its parts of them in that order. Where ranks
    share rows (fewer kv heads than ranks) each keeps the whole weight and uses its own rows. Weight and bias are
    those that nn.Linear would have drawn. Raises PartitionError.
    """

    shown = ("in_features", "out_features", "gather_output", "sequence_parallel")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        in_region: bool = False,
        segments: Segments | None = None,
        group: Group | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel, self.in_region = gather_output, sequence_parallel, in_region
        self.group = slicing_group(group, context)
        self.cut = cut(out_features, segments, self.group.size)
        if self.cut.shared and len(self.cut.ranges[0]) > 1:
            raise PartitionError(
                f"fused segments in which {self.group.size} ranks share heads can't be sharded; use separate query, key and "
                "value layers, or as many key and value heads as ranks"
            )
        whole = nn.Linear(in_features, out_features, bias)
        self.take(whole.weight, whole.bias)

    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's rows of a whole weight and bias; all of them if ranks share rows."""
        if self.cut.shared:
            self._hold(weight, bias)
            sum_gradients_over(self.parameters(), self.group)
            return
        slicing = self.cut.slicing(0, self.group.index)
        self._hold(sliced(weight, slicing), None if bias is None else sliced(bias, slicing))

    def forward(self, x: Tensor, length: int | None = None) -> Tensor:
        """Compute this rank's outputs.

        length: of the whole sequence, with sequence_parallel if it may be padded; see regions.py.
        """
        (y,) = _outputs([self], x, length)
        return y

    def _boundary(self, length: int | None) -> RegionBoundary:
        return NO_BOUNDARY if self.in_region else boundary(self.group, self.sequence_parallel, length)

    def _output(self, y: Tensor) -> Tensor:
        """Return a rank's outputs, or all, from y: [..., rows of the weight that is held]."""
        if self.cut.shared:
            ((start, stop),) = self.cut.ranges[self.group.index]
            y = y.narrow(-1, start, stop - start)
        return gather_features(y, self.cut, self.group) if self.gather_output else y


def column_outputs(layers: Sequence[ColumnParallelLinear], x: Tensor, length: int | None = None) -> tuple[Tensor, ...]:
    """Return `layer(x, length)` of each of these layers, which differ only in their segments.

    x enters their region once. In the backward its gradient is summed in one buffer and communicated once, overlapped with
    all of the layers' weight gradients.
    """
    first = layers[0]
    # A replaced layer, or one with hooks, must be called itself.
    own = all(type(layer) is ColumnParallelLinear and not has_hooks(layer) for layer in layers)
    if not own or any(
        (layer.group is not first.group and layer.group != first.group)  # a graph of PyTorch 2.11 can't compare them
        or layer.sequence_parallel != first.sequence_parallel
        or layer.in_region != first.in_region
        or (layer._fp8 is None) != (first._fp8 is None)
        for layer in layers
    ):
        return tuple(layer(x, length) for layer in layers)
    return _outputs(layers, x, length)


def _outputs(layers: Sequence[ColumnParallelLinear], x: Tensor, length: int | None) -> tuple[Tensor, ...]:
    before, pairs = layers[0]._boundary(length), [layer._pair for layer in layers]
    fp8, ports = [layer._fp8 for layer in layers if layer._fp8 is not None], [layer.port for layer in layers]
    outputs = fp8_linears(fp8, ports, x, pairs, before) if fp8 else linears(ports, x, pairs, before)
    return tuple(layer._output(y) for layer, y in zip(layers, outputs, strict=True))


class RowParallelLinear(SlicedLayer):
    """y = sum_r x_r W_r^T + b, W_r being rank r's columns of W: x: [..., this rank's in] -> [..., out], replicated.

    With sequence_parallel y is a shard [..., ceil(seq / tp), out] of the sequence. The bias is added once, after the sum.
    With input_is_parallel=False x is the whole [..., in], replicated. segments: as those of the column layer before it.
    Weight and bias are those that nn.Linear would have drawn. Raises PartitionError.
    """

    shown = ("in_features", "out_features", "input_is_parallel", "sequence_parallel")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        segments: Segments | None = None,
        group: Group | None = None,
        context: BuildContext | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel
        self.group = slicing_group(group, context)
        self.cut = cut(in_features, segments, self.group.size)
        if self.cut.shared:
            raise PartitionError(
                "a row layer's inputs can't be shared by ranks; shard it as the query heads: AttentionHeads(...).query"
            )
        whole = nn.Linear(in_features, out_features, bias)
        self.take(whole.weight, whole.bias)

    def take(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's columns of a whole weight, and the whole bias."""
        self._hold(sliced(weight, self.cut.slicing(1, self.group.index)), bias)
        if bias is not None and self.sequence_parallel:
            sum_gradients_over([bias], self.group)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's features and reduce over the ranks."""
        if not self.input_is_parallel:
            x = scatter_features(x, self.cut, self.group)
        length = sequence_length(x) if self.sequence_parallel else None
        after = boundary(self.group, self.sequence_parallel, length)
        if self._fp8 is not None:
            (y,) = fp8_linears([self._fp8], [self.port], x, [(self._pair[0], None)], after=after)
        else:
            y = row_linear(self.port, x, self.weight, after)
        return y if self.bias is None else y + self.bias.to(y.dtype)


L = TypeVar("L", ColumnParallelLinear, RowParallelLinear)


def from_linear(cls: type[L], whole: nn.Linear, **options: Any) -> L:
    """Return a layer that holds this rank's part of `whole`'s weights. options: those of the class."""
    with torch.device("meta"):
        layer = cls(whole.in_features, whole.out_features, whole.bias is not None, **options)
    layer.take(whole.weight, whole.bias)
    return layer.train(whole.training)
