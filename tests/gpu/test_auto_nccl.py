"""Schedule "auto" on GPUs, timed by events and counted by the allocator: the numbers of one GPU in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from auto_runs import ACCUMULATION, STEPS, check_plan, train
from layouts import BASE_SEED, Run, check, make_optimizer, run_reference
from ranks import RankPools
from reference import Reference

from parallel3d.schedule.auto import Plan


def reference_on_gpu(dp: int) -> Run:
    number = dp * ACCUMULATION * STEPS - dp
    micro_batches = [tuple(t.cuda() for t in toy.micro_batch(g)) for g in range(number)]
    with torch.device("cuda"):
        reference = Reference(toy.model(tied=True), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
        losses, norms, weights = run_reference(reference, micro_batches, dp * ACCUMULATION)
    return losses, norms, {name: weight.cpu() for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("dp", "zero", "pipeline"),
    [(1, 0, {}), (1, 0, {"peer_copies": False, "num_chunks": 3}), (2, 2, {"num_chunks": 2})],
    ids=["peer copies", "NCCL, loops", "replicas"],
)
def test_measuring_and_planning_change_no_number(
    gpu_pool: RankPools, num_gpus: int, dp: int, zero: int, pipeline: dict[str, Any]
):
    if 2 * dp > num_gpus:
        pytest.skip(f"needs {2 * dp} CUDA devices")
    (wanted,) = gpu_pool.run(1, reference_on_gpu, dp)
    results = gpu_pool.run(2 * dp, train, dp, zero, pipeline)
    check([run for run, *_ in results], wanted, dp)
    plans = [Plan.model_validate_json(text) for _, text, _, _ in results]
    assert all(plan == plans[0] for plan in plans), "every rank runs the same plan"
    check_plan(plans[0])
