"""Bytes that an optimizer and the buffers of gradients hold, against what torch allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel3d.comm.collectives import Group
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.memory import MOMENTS, moments_of
from parallel3d.zero.optimizer import ShardedOptimizer
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.transient import TransientBuffers, buffer_sizes

SETTINGS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in sorted(MOMENTS.keys() - {"Lion"})] + [
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
]


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_moments_are_the_tensors_that_a_step_leaves(name: str, settings: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(5))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **settings)
    parameter.grad = torch.ones(5)
    optimizer.step()
    state = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor)]
    assert moments_of(optimizer) == sum(t.shape == parameter.shape for t in state)


def test_a_groups_own_settings_count() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(5))]}, {"params": [nn.Parameter(torch.ones(5))], "momentum": 0.9}]
    assert moments_of(torch.optim.SGD(groups, lr=0.1)) == 1


def test_nothing_is_known_of_the_moments_of_other_optimizers() -> None:
    class Own(torch.optim.Optimizer):
        pass

    assert moments_of(Own([nn.Parameter(torch.ones(5))], {"momentum": 0.9})) is None


class Recorded:
    """A Work that counts its waits."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return bool(self.waits)


def buckets(count: int) -> tuple[list[Bucket], list[nn.Parameter]]:
    """The first of two replicas' shards of `count` parameters of 10, a bucket each."""
    parameters = [nn.Parameter(torch.ones(10)) for _ in range(count)]
    infos = [ParameterInfo(f"layers.{k}.weight", p, (k,)) for k, p in enumerate(parameters)]
    return make_buckets(infos, ZeroPolicy(2, 10, torch.float32), Group((0, 1), None), 0), parameters


def test_buckets_that_come_one_by_one_take_two_buffers() -> None:
    first, second, third = buckets(3)[0]
    sizes = buffer_sizes([first, second, third], whole_layers=False)
    assert sizes == [64, 64]
    buffers, work = TransientBuffers(sizes, torch.float32, torch.device("cpu")), Recorded()
    assert buffers.nbytes() == 0
    one = buffers.buffer_of(first)
    assert (one.shape, buffers.nbytes()) == ((64,), 256)
    assert buffers.buffer_of(first).data_ptr() == one.data_ptr()
    buffers.release(first, work.wait)
    other = buffers.buffer_of(second)
    assert (other.data_ptr() != one.data_ptr(), work.waits, buffers.nbytes()) == (True, 0, 512)
    assert (buffers.buffer_of(third).data_ptr(), work.waits, buffers.nbytes()) == (one.data_ptr(), 1, 512)


@dataclass(eq=False)
class Gradients:
    """A bucket, as its gradients pass through a buffer."""

    numel: int
    unit: int
    held: Tensor | None = None  # the buffer, and what was written there

    @property
    def infos(self) -> list[ParameterInfo]:
        return [ParameterInfo("weight", nn.Parameter(torch.empty(0)), (0,), self.unit)]

    def wait(self) -> None:
        """The reduction is over: it has read what was written, and the buffer is free."""
        assert self.held is not None
        assert (self.held == self.unit).all()
        self.held = None


@given(layers=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=5), draw=st.data())
def test_all_buckets_of_a_layer_fill_at_once_while_those_before_are_reduced(
    layers: list[list[int]], draw: st.DataObject
) -> None:
    units = [[Gradients(numel, unit) for numel in sizes] for unit, sizes in enumerate(layers)]
    sizes = buffer_sizes([bucket for unit in units for bucket in unit], whole_layers=True)
    # The bound is that of any way to reuse buffers: each layer's own, and the largest.
    assert sum(sizes) >= max(map(sum, layers)) + max(map(max, layers))
    buffers = TransientBuffers(sizes, torch.float32, torch.device("cpu"))
    for unit in units:
        for bucket in draw.draw(st.permutations(unit)):
            bucket.held = buffers.buffer_of(bucket)
            bucket.held.fill_(bucket.unit)
        for bucket in draw.draw(st.permutations(unit)):
            buffers.release(bucket, bucket.wait)
        assert buffers.nbytes() <= 4 * sum(sizes)
    alike = buffer_sizes([Gradients(numel, unit) for numel in layers[0] for unit in range(3)], whole_layers=True)
    assert sum(alike) == sum(layers[0]) + max(layers[0])


def test_weights_that_were_not_used_are_gathered_before_they_are_updated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    own, parameters = buckets(2)
    works: list[Recorded] = []

    def gather(_: Bucket) -> Recorded:
        works.append(Recorded())
        return works[-1]

    monkeypatch.setattr(Bucket, "gather", gather)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    sharded, seen = ShardedOptimizer(optimizer, own, parameters), []
    optimizer.register_step_pre_hook(lambda *_: seen.append([work.waits for work in works]))
    sharded.step(set())
    sharded.gather()
    sharded.step(set())
    assert seen == [[], [1, 1]]


def test_state_of_frozen_parameters_is_dropped_with_them() -> None:
    own, parameters = buckets(2)
    frozen = nn.Parameter(torch.ones(10), requires_grad=False)
    optimizer = torch.optim.Adagrad([*parameters, frozen])  # which makes state at once
    ShardedOptimizer(optimizer, own, [*parameters, frozen])
    state = optimizer.state_dict()
    assert state["state"].keys() == set(state["param_groups"][0]["params"])
