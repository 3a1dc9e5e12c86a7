"""What `p3d plan` says fits trains in that memory, and its peaks are those of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_memory import release_memory
from ranks import RankPools

import parallel3d
from parallel3d import models
from parallel3d.cli import main
from parallel3d.pipe import PipelineModule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SEQ = 2048
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQ,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    pools = RankPools("cuda")
    yield pools
    pools.close()


def plan(directory: Path, num_gpus: int, memory: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the best layout of the model in directory, whose config.json it writes to directory / "plan"."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "given.json").write_text(json.dumps(given))
    gpus = [{"device": "H100", "count": num_gpus, "memory": f"{memory} MiB"}]
    cluster = {"hosts": [{"gpus": gpus, "nvlink": {"bandwidth": "400 GB/s"}}]}
    (directory / "cluster.json").write_text(json.dumps(cluster))
    command = ["plan", "--model", directory, "--cluster", directory / "cluster.json", "--global-batch", 8]
    command += ["--config", directory / "given.json", "--out", directory / "plan"]
    assert main([str(word) for word in command]) == 0
    best: dict[str, Any] = json.loads((directory / "plan" / "plan.json").read_text())["best"][0]
    return best


def train(directory: Path, limits: list[int]) -> tuple[int, int]:
    """Train four steps in limits[stage] bytes. Return the stage, and the most bytes of tensors."""
    release_memory()
    config = json.loads((directory / "plan" / "config.json").read_text()) | {"steps_per_print": None}
    layers = models.from_hf(directory, weights=False, config=config)
    module = PipelineModule(layers, loss_fn=models.causal_lm_loss, config=config)
    stage = module.stage_id
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(limits[stage] / total)
    try:
        engine, *_ = parallel3d.initialize(model=module, config=config)
        ids = torch.randint(LLAMA["vocab_size"], (16, config["train_micro_batch_size_per_gpu"], SEQ))
        data = parallel3d.RepeatingLoader([(x, x) for x in ids])
        for _ in range(4):
            engine.train_batch(iter(data))
        return stage, torch.cuda.max_memory_allocated()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("num_gpus", "memory", "given"),
    [
        (1, 4096, {}),  # with the optimizer's state on the host
        (1, 5120, {}),
        (1, 7168, {"compile": {"enabled": True}}),
        (1, 7680, {"compile": {"enabled": True}}),
        (1, 12288, {}),
        (2, 3584, {}),
        (2, 5120, {"zero_optimization": {"stage": 2}}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_a_plan_that_fits_trains_in_its_memory(
    pools: RankPools, tmp_path: Path, num_gpus: int, memory: int, given: dict[str, Any]
):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices")
    best = plan(tmp_path, num_gpus, memory, {"bf16": {"enabled": True}, **given})
    stages = best["memory"]
    # Without CUDA's context and NCCL's buffers, which PyTorch doesn't allocate.
    limits = [memory * 2**20 - stage["outside"] for stage in stages]
    for stage, allocated in pools.run(num_gpus, train, tmp_path, limits):
        assert allocated == pytest.approx(stages[stage]["allocated"], rel=0.03), best["layout"]
