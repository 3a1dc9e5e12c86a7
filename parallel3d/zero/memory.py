"""Bytes of model state, predicted from shapes, layout and policy, and held by this rank. The planner sums the predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.parameters import ParameterInfo
from parallel3d.zero.disk import in_blocks
from parallel3d.zero.layout import BucketLayout, by_owners, lay_out
from parallel3d.zero.policy import COPIED_NUMEL, STAGED_BYTES, OptimizerOffload, ZeroPolicy
from parallel3d.zero.transient import buffer_sizes


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank's model state by component. All but three are held throughout, and all but the last two on the device.

    weights: the shards of those that live as shards; transient: the gradient buffers of reductions, in use during a backward,
    and those that new weights pass through on their way to the host; update: copies of gradients in the masters' dtype, while
    the optimizer runs; gathered: most bytes of sharded weights that are gathered at a time, while layers run; window: buffers
    that offloaded state passes through, while the optimizer runs; host, disk: offloaded state there, and shards of weights.
    host has the buffers of what is on disk.
    """

    weights: int = 0
    gradients: int = 0
    masters: int = 0
    optimizer: int = 0
    transient: int = 0
    update: int = 0
    gathered: int = 0
    window: int = 0
    host: int = 0
    disk: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def steady(self) -> int:
        """Bytes held between batches."""
        return self.weights + self.gradients + self.masters + self.optimizer

    @property
    def backward(self) -> int:
        """Most bytes held while layers run and gradients are reduced."""
        return self.steady + self.transient + self.gathered

    @property
    def step(self) -> int:
        """Bytes held while the optimizer runs, transient buffers included, without the optimizer's own workspace."""
        return self.steady + self.transient + self.update + self.window


def predict_state(
    parameters: Sequence[ParameterInfo],
    policy: ZeroPolicy,
    data_size: int,
    moments: int = 2,
    early: Collection[nn.Parameter] = (),
    frozen: Sequence[ParameterInfo] = (),
) -> StateBytes:
    """Predict the model state of a rank with these parameters, as built, on `data_size` replicas (arXiv:1910.02054, section 3).

    moments: elements of optimizer state per element, 2 for Adam. With bf16 weights and fp32 accumulators, d replicas and
    P parameters that is 2P + 4P + 12P/d for stage 1, 2P + 16P/d for stage 2 with a reduction per micro-batch, and 18P/d for
    stage 3 with one, without the weights that are gathered at a time: these depend on the program (lifetimes.peak_live).
    early: the parameters that get gradients in a BACKWARD_INPUT, see buffer_sizes.
    frozen: parameters that are not trained, of which shards in host memory count.
    """
    total: Counter[str] = Counter()
    passing: dict[torch.dtype, list[BucketLayout]] = {}  # buckets whose gradients pass through a buffer
    offloaded: list[BucketLayout] = []
    longest = 0
    for layout in _layouts(parameters, policy, data_size):
        padded, shard = layout.numel, layout.shard_numel
        master, accumulator = layout.master_dtype, layout.gradient_dtype
        held = shard if layout.is_sharded else sum(layout.sizes) if layout.is_in_place else padded
        total["weights"] += 0 if layout.weights_offloaded else held * layout.weight_dtype.itemsize
        total["gradients"] += (shard if layout.is_transient else padded) * accumulator.itemsize
        each = shard * master.itemsize
        masters, optimizer = each * layout.has_own_master, each * moments
        if layout.is_offloaded:
            offloaded.append(layout)
            if layout.state_on_disk:
                total["disk"] += in_blocks(each) * (moments + layout.has_own_master)
            else:
                total["host"] += masters + optimizer
        else:
            total["masters"] += masters
            total["optimizer"] += optimizer
            if accumulator != master:
                total["update"] += each
                longest = max(longest, COPIED_NUMEL * master.itemsize, _largest_piece(layout) * master.itemsize)
        if layout.is_transient:
            passing.setdefault(accumulator, []).append(layout)
    total["update"] = min(total["update"], longest)
    for dtype, layouts in passing.items():
        total["transient"] += sum(buffer_sizes(layouts, policy.whole_layers, early)) * dtype.itemsize
    state = StateBytes(**total) + _window(offloaded, policy.offload, moments)
    return state if policy.weight_offload is None else state + predict_shards(parameters, frozen, policy, data_size)


def predict_shards(
    parameters: Sequence[ParameterInfo], frozen: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int
) -> StateBytes:
    """Predict the shards of weights in host memory and on disk, and the buffers that they pass through; see predict_state."""
    trained = [layout for layout in _layouts(parameters, policy, data_size) if layout.weights_offloaded]
    others = [layout for layout in _layouts(_floating(frozen), policy, data_size) if layout.weights_offloaded]
    sizes: dict[bool, list[int]] = {False: [0], True: [0]}  # whether on disk -> bytes of shards
    for layout in (*trained, *others):
        sizes[layout.weights_on_disk].append(_host_shard(layout))
    in_memory, on_disk = sizes[False], [in_blocks(size) for size in sizes[True]]
    buffers = policy.weight_offload.buffers * max(on_disk) if policy.weight_offload is not None else 0
    on_cpu = policy.offload is not None and policy.offload.on_cpu
    written = any(not (on_cpu and layout.is_offloaded) for layout in trained)
    transient = 2 * min(STAGED_BYTES, max(*in_memory, *sizes[True])) if written else 0
    return StateBytes(host=sum(in_memory) + buffers, disk=sum(on_disk), transient=transient)


def _host_shard(layout: BucketLayout) -> int:
    return layout.shard_numel * layout.weight_dtype.itemsize if layout.weights_offloaded else 0


def _floating(infos: Sequence[ParameterInfo]) -> list[ParameterInfo]:
    return [info for info in infos if info.parameter.is_floating_point()]


def _window(layouts: Sequence[BucketLayout], offload: OptimizerOffload | None, moments: int) -> StateBytes:
    """Return the buffers that the state of offloaded buckets passes through, each as long as the longest span."""
    if offload is None or not layouts:
        return StateBytes()
    numel = min(offload.window, max(layout.shard_numel for layout in layouts))
    weights = [layout.weight_dtype.itemsize * (not layout.weights_offloaded) for layout in layouts]
    widest = max(layout.master_dtype.itemsize for layout in layouts)
    copies = any(layout.gradient_dtype != layout.master_dtype for layout in layouts)
    # A step that has fewer spans than there are buffers uses no more of them.
    buffers = min(offload.buffers, sum(_spans(layout, offload) for layout in layouts))
    if offload.on_cpu:
        sent = max(layout.gradient_dtype.itemsize + size for layout, size in zip(layouts, weights, strict=True))
        each = sent + widest * copies
        return StateBytes(host=buffers * numel * each)
    states = moments + any(layout.has_own_master for layout in layouts)
    each = numel * widest
    read = min(offload.host_buffers, sum(_spans(layout, offload) for layout in layouts if layout.state_on_disk))
    return StateBytes(window=buffers * states * each, update=each * copies, host=read * states * in_blocks(each))


def _spans(layout: BucketLayout, offload: OptimizerOffload) -> int:
    """Return the number of a shard's parts that pass through the window one by one."""
    return -(-layout.shard_numel // offload.window)


def _layouts(parameters: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int) -> Iterator[BucketLayout]:
    for infos in by_owners(parameters).values():
        yield from lay_out(infos, policy, policy.num_shards(data_size))


class UnitSize(NamedTuple):
    """Size of a unit of sharded weights while it is gathered, padding included.

    host: bytes of its shard that are copied from host memory; disk: of those, the bytes that are read from disk.
    """

    numel: int
    nbytes: int
    host: int
    disk: int


def unit_sizes(
    parameters: Sequence[ParameterInfo], frozen: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int
) -> dict[int, UnitSize]:
    """Return the units of a rank whose weights live as shards, with their sizes. frozen: see shard_frozen."""
    sizes: dict[int, UnitSize] = {}
    for own in (parameters, _floating(frozen)):
        for layout in _layouts(own, policy, data_size):
            if layout.is_sharded:
                unit, host, numel = layout.infos[0].unit, _host_shard(layout), layout.numel
                nbytes = numel * (1 if layout.gathers_fp8 else layout.weight_dtype.itemsize)
                more = numel, nbytes, host, host * layout.weights_on_disk
                sizes[unit] = UnitSize(*map(add, sizes.get(unit, (0, 0, 0, 0)), more))
    return sizes


class UpdateTraffic(NamedTuple):
    """Bytes that a rank moves from reduced gradients to updated weights, before these are gathered.

    on_device: read and written in the device's memory; copied: over its link to the host, in the direction that has more;
    updated: read and written in host memory by a step on the CPU; on_disk: written to the disk, and no more read from it.
    """

    on_device: int
    copied: int
    updated: int
    on_disk: int


def update_traffic(
    parameters: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int, moments: int
) -> UpdateTraffic:
    """Return the bytes that an update of a rank's parameters moves.

    On the device gradients are read for the norm and for the step, which writes them back clipped, as torch's fused kernels do;
    masters and optimizer state are read and written; weights are written unless they are their own masters. Offloaded state
    counts as if it were there.

    A step on the CPU reads and writes masters and optimizer state. It writes gradients as they arrive, reads them, writes them
    in the masters' dtype, clips them and reads them; it reads masters once more, and writes weights, which are read.
    """
    on_device = copied = updated = on_disk = 0
    for layout in _layouts(parameters, policy, data_size):
        dtypes = layout.gradient_dtype, layout.master_dtype, layout.weight_dtype
        gradient, master, weight = (dtype.itemsize for dtype in dtypes)
        own_weight = weight * (layout.weight_dtype != layout.master_dtype)
        on_device += (3 * gradient + 2 * (1 + moments) * master + own_weight) * layout.shard_numel
        each, states = weight * layout.weights_offloaded, moments + layout.has_own_master
        on_disk += in_blocks(_host_shard(layout)) * layout.weights_on_disk
        if layout.is_offloaded and policy.offload is not None:
            on_disk += states * in_blocks(master * layout.shard_numel) * layout.state_on_disk
            if policy.offload.on_cpu:
                each = gradient
                updated += layout.shard_numel * (2 * gradient + (2 * states + 5) * master + 2 * weight)
            else:
                each += states * master
        copied += each * layout.shard_numel
    return UpdateTraffic(on_device, copied, updated, on_disk)


def communicated_bytes(parameters: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int) -> int:
    """Return the bytes of gradients' copies in the dtype of reductions, which are kept until all reductions are done."""
    sent = policy.communication_dtype
    if sent is None:
        return 0
    layouts = _layouts(parameters, policy, data_size)
    return sent.itemsize * sum(a.numel for a in layouts if sent != a.gradient_dtype)


def piece_sizes(parameters: Sequence[ParameterInfo], policy: ZeroPolicy, data_size: int) -> tuple[int, int]:
    """Return the number of elements that a rank's optimizer updates, and that of its largest tensor on any replica.

    Its tensors are parameters, or the parts of them that lie in one shard.
    """
    total = largest = 0
    for layout in _layouts(parameters, policy, data_size):
        total, largest = total + layout.shard_numel, max(largest, _largest_piece(layout))
    return total, largest


def _largest_piece(layout: BucketLayout) -> int:
    """Return the elements of the largest parameter, or part of one that lies in one shard."""
    places = zip(layout.offsets, layout.sizes, strict=True)
    return max((_largest_part(start, start + size, layout.shard_numel) for start, size in places), default=0)


def _largest_part(start: int, stop: int, shard: int) -> int:
    """Return the size of the largest part of [start, stop) that lies in one shard."""
    if start == stop:
        return 0  # the rank has no part of it, and the shards may be empty
    first, last = (start // shard + 1) * shard, (stop - 1) // shard * shard
    if first >= stop:
        return stop - start
    return shard if first < last else max(first - start, stop - first)


# Elementwise optimizers, and the tensors of an element's own size that they keep for each, whatever their settings.
_BY_NUMBER = {0: "SGD", 1: "ASGD Adagrad Lion RMSprop", 2: "Adadelta Adam AdamW Adamax NAdam RAdam Rprop"}
MOMENTS = {name: number for number, names in _BY_NUMBER.items() for name in names.split()}
# State of these that is one number per parameter. The shape can't tell it apart if the parameter has one element, too.
_NUMBERS = frozenset({"step", "mu_product", "mu", "eta"})


def is_elementwise_state(key: str, shape: Sequence[int], of_parameter: Sequence[int]) -> bool:
    """Return whether the state of this name and shape has an element for each of a parameter, or of a part of one."""
    return key not in _NUMBERS and tuple(shape) == tuple(of_parameter)


def moments_of(optimizer: torch.optim.Optimizer) -> int | None:
    """Return how many elements of state an optimizer keeps per element, at most; None if that isn't known."""
    # Adafactor keeps sums over rows and columns, which are next to nothing, and Muon only its momentum.
    known = {**MOMENTS, "Adafactor": 0, "Muon": 0}.get(type(optimizer).__name__)
    settings = (optimizer.defaults, *optimizer.param_groups)
    more = sum(any(each.get(key) for each in settings) for key in ("amsgrad", "centered", "momentum"))
    return None if known is None else known + more


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of these tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
