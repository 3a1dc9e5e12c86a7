"""Tensor-parallel ranks sum by the kernel where a group has one, else by the backend, with one warning if it was asked for."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from kernel_stand_ins import GatheredSums
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE, Group, Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.kernels.all_reduce import AllReduce
from parallel3d.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class StandIn(GatheredSums):
    """The kernel's place taken by its reference, which also works on the CPU; counts its calls."""

    def __init__(self, group: Group):
        super().__init__(group)
        self.calls: list[str] = []

    def takes(self, x: Tensor) -> bool:
        return x.dtype == torch.float32

    def start(self, x: Tensor) -> Work:
        self.calls.append("beside")
        super().sum_into(x, x)
        return DONE

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        self.calls.append("in place" if out.data_ptr() == x.data_ptr() else "into another")
        super().sum_into(out, x)


def train(group: Group, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    layers = nn.Sequential(ColumnParallelLinear(6, 8, group=group), nn.GELU(), RowParallelLinear(8, 6, group=group))
    layers.to(dtype)
    x = torch.randn(3, 6, dtype=dtype, requires_grad=True)
    y = layers(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]


def with_and_without() -> tuple[list[str], list[str], bool]:
    group = Group(tuple(range(dist.get_world_size())), dist.group.WORLD)
    plain = train(group, torch.float32)
    stand_in = StandIn(group)
    group.use_all_reduce(stand_in)
    same = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(plain, train(group, torch.float32), strict=True))
    used, stand_in.calls = stand_in.calls, []
    train(group, torch.float64)
    return used, stand_in.calls, same


def test_layers_use_a_groups_kernel_for_what_it_takes(run_ranks) -> None:
    for used, for_float64, same in run_ranks(2, with_and_without):
        assert same
        assert used == ["beside"], "the output; the backend sums the gradient of the input, behind the weight's product"
        assert for_float64 == []


def opened_on_cpu() -> tuple[list[str], bool]:
    groups = ProcessGroups(ProcessTopology(["data", "model"], [1, dist.get_world_size()]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = AllReduce.open(groups, torch.device("cpu"))
    return [str(w.message) for w in caught], kernel is None


def test_on_the_cpu_the_backend_sums_with_one_warning(run_ranks) -> None:
    (said, none), *others = run_ranks(2, opened_on_cpu)
    assert none
    assert others == [([], True)]
    (line,) = said
    assert line.startswith("kernels.all_reduce: ")
    assert "gloo sums over tensor-parallel ranks instead" in line


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_sum_in_place_and_one_that_is_not(requires_grad: bool, run_ranks) -> None:
    for calls, kept, total in run_ranks(2, sums, requires_grad):
        assert calls == ["into another", "in place"]
        assert kept == [1.0, 2.0]
        assert total == [2.0, 4.0]


def sums(requires_grad: bool) -> tuple[list[str], list[float], list[float]]:
    from parallel3d.comm.differentiable import reduce_from_region, reduce_from_region_

    group = Group(tuple(range(dist.get_world_size())), dist.group.WORLD)
    stand_in = StandIn(group)
    group.use_all_reduce(stand_in)
    x = torch.tensor([1.0, 2.0], requires_grad=requires_grad)
    total = reduce_from_region(x, group)
    own = x * 1
    again = reduce_from_region_(own, group)
    assert torch.equal(again, total)
    assert again.data_ptr() == own.data_ptr()
    if requires_grad:
        (gradient,) = torch.autograd.grad(again.sum() + total.sum(), x)
        assert gradient.tolist() == [2.0, 2.0]
    return stand_in.calls, x.tolist(), total.tolist()
