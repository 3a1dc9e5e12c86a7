"""The step by the kernel, which torch's own of the same gradients follows; the kernel's place is taken by its reference."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_stand_ins import Part, adamw_ref
from torch import Tensor, nn

from parallel3d.comm.collectives import DONE, Group
from parallel3d.errors import ConfigError
from parallel3d.kernels import fused_adamw
from parallel3d.kernels.fused_adamw import FusedAdamW
from parallel3d.parameters import ParameterInfo
from parallel3d.zero import reducer as reducer_module
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.optimizer import ShardedOptimizer
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.reducer import GradientReducer

PAIR = Group((0, 1), None)
# Of a reduction per micro-batch: gradients in shards of their own.
POLICY = ZeroPolicy(2, 1 << 20, torch.bfloat16, reduce_per_micro_batch=True)


def at(address: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory as a tensor."""
    return torch.frombuffer((ctypes.c_char * (numel * dtype.itemsize)).from_address(address), dtype=dtype)


class Reference:
    """The library, on the CPU: of fp32 gradients and bf16 weights."""

    def p3d_adamw(self, *arguments: Any) -> int:
        _, wide, world, _, parts, vectors, groups, _, divisor, skip, clear, weights, *_ = arguments
        assert wide
        assert (world, skip) == (1, None)
        taken = 0
        while taken < vectors:
            *tensors, step, size, place, end, group = at(parts, 9, torch.int64).tolist()
            assert end == taken + -(-size // 8), "vectors of 16 bytes, one part after the other"
            taken = end
            master, gradient, average, square_average = (at(address, size, torch.float32) for address in tensors)
            part = Part(master, gradient, average, square_average, at(step, 1, torch.float32), place, group)
            rate, beta1, beta2, epsilon, decay, decoupled = groups[6 * group : 6 * group + 6]
            settings = {"lr": rate, "betas": (beta1, beta2), "eps": epsilon}
            settings |= {"weight_decay": decay, "decoupled_weight_decay": bool(decoupled)}
            scale = None if divisor is None else at(divisor, 1, torch.float64)
            at(weights[0] + 2 * place, size, torch.bfloat16).copy_(adamw_ref(part, settings, scale, torch.bfloat16))
            if clear:
                gradient.zero_()
            parts += 72
        assert taken == vectors
        return 0


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_adamw, "load_library", Reference)
    monkeypatch.setattr(FusedAdamW, "takes", lambda self, bucket: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def built(by_kernel: bool, held: slice, dtype: torch.dtype = torch.float32) -> tuple[ShardedOptimizer, Bucket]:
    """The first of two replicas' shard of three parameters, of which the optimizer holds some."""
    generator = torch.Generator().manual_seed(2)
    parameters = [nn.Parameter(torch.randn(n, generator=generator, dtype=dtype)) for n in (40, 7, 33)]
    infos = [ParameterInfo(f"layers.{k}.weight", p, (0,)) for k, p in enumerate(parameters)]
    (bucket,) = make_buckets(infos, POLICY, PAIR, 0)
    optimizer = torch.optim.AdamW(parameters[held], lr=0.1, fused=True)

    def open_kernel(_: object) -> FusedAdamW | None:
        return FusedAdamW(optimizer, torch.device("cpu")) if by_kernel else None

    return ShardedOptimizer(optimizer, [bucket], parameters, open_kernel=open_kernel), bucket


@pytest.mark.parametrize("held", [slice(0, 3), slice(0, 1), slice(1, 3)], ids=["all", "the first", "not the first"])
def test_the_kernel_steps_what_the_optimizer_holds_and_says_whether_all_is_cleared(held: slice) -> None:
    (sharded, bucket), (plain, its) = built(True, held), built(False, held)
    assert len(bucket.shards) > 1
    for number in range(3):
        gradient = torch.randn(bucket.gradient_shard.shape, generator=torch.Generator().manual_seed(number))
        for one, other in ((sharded, bucket), (plain, its)):
            other.gradient_shard.copy_(gradient)
            one.step(set(), torch.tensor(2.0, dtype=torch.float64))
        assert bucket.master is not None
        assert its.master is not None
        assert torch.allclose(bucket.master, its.master, atol=1e-6)
        for shard in bucket.shards:
            assert torch.equal(bucket.weights_of(shard), shard.master.bfloat16())
        assert bucket.is_cleared == (held == slice(0, 3))
        if bucket.is_cleared:
            assert not any(shard.gradient.any() for shard in bucket.shards)


def test_settings_that_the_kernel_does_not_take_are_refused_when_they_come_later() -> None:
    sharded, _ = built(True, slice(0, 3))
    sharded.step(set())
    sharded.optimizer.param_groups[0]["amsgrad"] = True  # as a checkpoint has it
    with pytest.raises(ConfigError, match=r"kernels.optimizer_step: AdamW has amsgrad=True; .* to false"):
        sharded.step(set())


def test_settings_are_free_where_the_kernel_steps_no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, bucket = built(True, slice(0, 3))
    monkeypatch.setattr(FusedAdamW, "takes", lambda self, bucket: False)
    sharded.optimizer.param_groups[0]["amsgrad"] = True
    bucket.gradient_shard.fill_(1.0)
    sharded.step(set())
    assert all("max_exp_avg_sq" in sharded.optimizer.state[shard.master] for shard in bucket.shards)


def test_masters_in_float64_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.ones(5, dtype=dtype))
        policy = ZeroPolicy(2, 1 << 20, torch.bfloat16, gradient_dtype=torch.float32)
        (bucket,) = make_buckets([ParameterInfo("layers.0.weight", parameter, (0,))], policy, PAIR, 0)
        bucket.device = torch.device("cuda")
        fused = FusedAdamW.__new__(FusedAdamW)
        assert fused.takes(bucket) == (dtype == torch.float32)


def test_what_other_slices_left_of_a_batch_that_failed_is_no_part_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a reduction was through; here nothing had begun since a step that cleared."""
    parameter = nn.Parameter(torch.ones(5))
    vars(parameter)["partial_over"] = Group((0, 2), None)

    def all_reduce(x: Tensor, group: Group) -> Any:
        assert group.ranks == (0, 2)
        x += 1.0
        return DONE

    infos = [ParameterInfo("layers.0.weight", parameter, (0,))]
    monkeypatch.setattr(reducer_module, "all_reduce", all_reduce)
    reducer = GradientReducer(infos, POLICY, 0, PAIR, {})
    (bucket,) = reducer.all_buckets()
    bucket.mark_gradients(is_cleared=True)
    reducer.start_step()
    assert not bucket.gradient_shard.any()
