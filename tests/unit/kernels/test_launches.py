"""Arguments of kernel launches: as many as csrc/ declares, each of a type that C accepts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group
from parallel3d.kernels import fused_adamw
from parallel3d.kernels.all_reduce import HALF_BYTES, AllReduce
from parallel3d.kernels.cuda_library import FUNCTIONS, addresses
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.kernels.workspace import SymmetricWorkspace
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import make_buckets
from parallel3d.zero.policy import ZeroPolicy

WORLD = 2


class Library:
    """Converts arguments as ctypes does for the declared types, and keeps them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def p3d_all_reduce_threads(self) -> int:
        return 512

    def __getattr__(self, name: str) -> Callable[..., int]:
        result, types = FUNCTIONS[name]
        prototype = ctypes.CFUNCTYPE(result, *types)

        def keep(*arguments: Any) -> int:
            self.calls.append(arguments)
            return 0

        return prototype(keep)


@pytest.fixture
def workspace() -> SymmetricWorkspace:
    workspace = object.__new__(SymmetricWorkspace)
    parts = {
        "compiled": Library(),
        "group": SimpleNamespace(size=WORLD, index=1, ranks=(0, 1)),
        "device": SimpleNamespace(index=3),
        "limit_s": 2.0,
        "staging": addresses([100, 200]),
        "pads": addresses([10, 20]),
        "state": 7,
        "report": 8,
        "follow": lambda: 9,
    }
    vars(workspace).update(parts)
    return workspace


def test_an_all_reduce_of_two_calls(workspace: SymmetricWorkspace) -> None:
    x = torch.zeros(HALF_BYTES // 4 + 5)
    AllReduce(workspace).sum_into(x, x)
    first, second = cast(Any, workspace.compiled).calls
    assert first[:7] == (1, 0, WORLD, 1, x.data_ptr(), x.data_ptr(), HALF_BYTES // 4)
    assert second[:7] == (0, 0, WORLD, 1, x.data_ptr() + HALF_BYTES, x.data_ptr() + HALF_BYTES, 5)
    assert second[7][:WORLD] + second[8][:WORLD] == [100, 200, 10, 20]
    assert second[9:] == (7, 8, HALF_BYTES, 2 * 10**9, 1, 3, 9)


def test_a_reduce_scatter_that_accumulates(workspace: SymmetricWorkspace) -> None:
    kernel = ReduceScatter(workspace)
    whole, output = torch.zeros(WORLD * 6), torch.zeros(6)
    squares = torch.ones(kernel.squares_size(6, torch.bfloat16), dtype=torch.float64)
    kernel.reduce_into(output, whole, torch.bfloat16, True, squares)
    (call,) = cast(Any, workspace.compiled).calls
    assert call[:7] == (2, 1, WORLD, 1, whole.data_ptr(), output.data_ptr(), squares.data_ptr())
    assert call[7:10] == (6, 6, 1)
    assert call[12:] == (7, 8, 64 * 2**20, 2 * 10**9, 1, 3, 9)
    assert not squares.any()


def test_a_step_that_writes_the_weights_of_all_replicas(
    workspace: SymmetricWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_adamw, "load_library", lambda: workspace.compiled)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    infos = [ParameterInfo("layers.0.weight", nn.Parameter(torch.ones(40)), (0,))]
    (bucket,) = make_buckets(infos, ZeroPolicy(1, 1 << 20, torch.bfloat16), Group((0, 1), None), 0)
    (shard,) = bucket.shards
    optimizer = torch.optim.AdamW([shard.master], lr=0.1, fused=True)
    kernel = fused_adamw.FusedAdamW(optimizer, torch.device("cpu", 0), workspace, {bucket: [1000, 2000]})
    divisor, skip = torch.tensor(2.0, dtype=torch.float64), torch.tensor(False)
    assert kernel.writes_peers(bucket)
    kernel.step([bucket], set(), divisor, skip)
    (call,) = cast(Any, workspace.compiled).calls
    assert call[:4] == (2, 1, WORLD, 1)
    assert call[5] == shard.master.numel() // 8
    assert call[7:11] == (1, divisor.data_ptr(), skip.data_ptr(), 0)
    assert call[11][:WORLD] + call[14][:WORLD] == [1000, 2000, 10, 20]
    assert call[12:14] == (1, 1)
    assert call[15:] == (7, 8, 2 * 10**9, 128, 0, 9)
