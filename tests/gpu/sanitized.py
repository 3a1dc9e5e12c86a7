"""Every kernel of csrc/, called a few times with tails and whole vectors, for compute-sanitizer; a process of torchrun's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import parallel3d
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import KernelsConfig
from parallel3d.kernels.all_reduce import AllReduce
from parallel3d.kernels.fused_adamw import FusedAdamW, open_update_kernels
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.kernels.workspace import DTYPES
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.optimizer import ShardedOptimizer
from parallel3d.zero.policy import ZeroPolicy

SIZES = (1, 4099, 2**18 + 3, 2**19)
SHAPES = ((7, 5), (130, 33), (64,), (515, 129), (31,))


def main() -> None:
    """Call all."""
    parallel3d.init_distributed()
    device = torch.device("cuda", torch.cuda.current_device())
    sums(device)
    reductions(device)
    updates(device)
    torch.cuda.synchronize()
    print("all kernels ran", flush=True)
    parallel3d.comm.destroy()


def sums(device: torch.device) -> None:
    """All-reduces, one-shot and two-shot."""
    groups = ProcessGroups(ProcessTopology(["pipe", "data", "model"], [1, 1, dist.get_world_size()]))
    kernel: Any = AllReduce.open(groups, device)
    for dtype in DTYPES:
        for size in SIZES:
            x = torch.ones(size, dtype=dtype, device=device)
            kernel.sum_into(x, x)
            assert (x == groups.model.size).all()


def reductions(device: torch.device) -> None:
    """Reduce-scatters, of fp32 and of what travels."""
    groups = replicas()
    kernel: Any = ReduceScatter.open(groups, device)
    for wire in DTYPES:
        for size in SIZES:
            for dtype in {torch.float32, wire}:
                whole = torch.ones(groups.data.size * size, dtype=dtype, device=device)
                output = torch.zeros(size, dtype=dtype, device=device)
                squares = torch.empty(kernel.squares_size(size, wire), dtype=torch.float64, device=device)
                kernel.reduce_into(output, whole, wire, True, squares)
                assert (output == groups.data.size).all()


def updates(device: torch.device) -> None:
    """Steps that write the weights of all ranks."""
    groups = replicas()
    parameters = [nn.Parameter(torch.ones(shape, device=device)) for shape in SHAPES]
    infos = [ParameterInfo(f"layers.{k}.weight", p, (0,)) for k, p in enumerate(parameters)]
    buckets = make_buckets(infos, ZeroPolicy(1, 2**20, torch.bfloat16), groups.data, groups.rank)
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    opened: list[FusedAdamW | None] = []

    def open_kernel(own: Sequence[Bucket]) -> FusedAdamW | None:
        opened.append(open_update_kernels(optimizer, own, groups, device, KernelsConfig(optimizer_step=True)))
        return opened[0]

    sharded = ShardedOptimizer(optimizer, buckets, parameters, open_kernel=open_kernel)
    assert opened != [None]
    for _ in range(2):
        for bucket in buckets:
            bucket.gradient_shard.fill_(1.0)
        sharded.step(set(), torch.tensor(2.0, dtype=torch.float64, device=device))
        sharded.gather()
        sharded.wait_for_module(nn.ParameterList(parameters))
    assert all((p.float() - 0.8).abs().max() < 0.01 for p in parameters)


def replicas() -> ProcessGroups:
    """All ranks."""
    return ProcessGroups(ProcessTopology(["pipe", "data", "model"], [1, dist.get_world_size(), 1]))


if __name__ == "__main__":
    main()
