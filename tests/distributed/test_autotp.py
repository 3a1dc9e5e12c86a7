"""tensor_parallel.autotp_size: models of transformers train sharded, as they are, like the same models on one process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import make_model, token_ids, transformers
from ranks import RankError
from torch import Tensor, nn

import parallel3d
from parallel3d.errors import ConfigError

STEPS, ROWS, CLIPPING = 3, 4, 0.5
ADAM = {"lr": 0.01, "eps": 1e-4}
# Tied embeddings of an odd vocabulary; fused projections; experts; norms around; adapters.
MODELS = ("llama-tied", "phi3", "mixtral", "gemma2", "lora")


def build(name: str) -> nn.Module:
    if name != "lora":
        model: Any = make_model(name)
        if name == "llama-tied":
            model.enable_input_require_grads()  # a hook of the embedding, as gradient_checkpointing_enable makes it
        return model
    peft = pytest.importorskip("peft", reason="peft, of the test extra, makes the adapters")
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(r=4, target_modules="all-linear"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
    return model


def rows(step: int) -> Tensor:
    return token_ids(ROWS, 9, seed=step)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@cache
def expected(name: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses, gradient norms and weights of plain PyTorch."""
    model = build(name).train()
    optimizer = torch.optim.AdamW(trained(model), **ADAM)
    told = []
    for step in range(STEPS):
        loss = model(input_ids=rows(step), labels=rows(step)).loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trained(model), CLIPPING)
        optimizer.step()
        told.append((loss.item(), float(norm)))
    return told, model.state_dict()


def train(name: str, zero: dict[str, Any], ahead: bool) -> Any:
    """Train on two tensor-parallel ranks and the replicas that are left. ahead: shard the model before `initialize` does."""
    model = build(name)
    optimizer = torch.optim.AdamW(trained(model), **ADAM)
    if ahead:
        assert parallel3d.tp_model_init(model, tp_size=2, dtype=torch.float32, config={}) is model
    replicas = parallel3d.comm.get_world_size() // 2
    config = {
        "train_batch_size": 2 * ROWS,  # of all ranks, as accelerate counts them
        "train_micro_batch_size_per_gpu": ROWS // replicas,
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": 2},
    }
    engine = parallel3d.initialize(model=model, optimizer=optimizer, config=config)[0]
    assert (engine.mp_world_size, engine.dp_world_size, engine.train_batch_size()) == (2, replicas, ROWS)
    told = []
    for step in range(STEPS):
        own = rows(step).chunk(replicas)[engine.get_data_parallel_rank()]
        loss = engine(input_ids=own, labels=own).loss
        engine.backward(loss)
        engine.step()
        told.append((loss.item(), float(engine.get_global_grad_norm())))
    held = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in build(name).parameters())
    return told, held, engine._consolidated_16bit_state_dict(exclude_frozen_parameters=name == "lora")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("ahead", [False, True], ids=["by initialize", "by tp_model_init"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_trains_like_one_process(run_ranks, name: str, ahead: bool):
    ranks, stage = (4, 2) if ahead else (2, 1)
    results = run_ranks(ranks, train, name, {"stage": stage}, ahead)
    wanted, weights = expected(name)
    for told, held, state in results:
        assert held < 0.7
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in wanted], rel=1e-4)
        assert (state is None) == (state is not results[0][2])
    losses = [sum(told[step][0] for told, *_ in results) / ranks for step in range(STEPS)]
    assert losses == pytest.approx([loss for loss, _ in wanted], rel=1e-4)
    state = results[0][2]
    assert all(".lora_" in key for key in state) if name == "lora" else state.keys() == weights.keys()
    for key, tensor in state.items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-3, atol=1e-4, msg=key)


def go_on(name: str, directory: str, shards: int, first: int) -> list[float]:
    """Train one step that loads, or else saves, a checkpoint; return its loss. first: the number of the step."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": shards},
    }
    engine = parallel3d.initialize(model=build(name), config=config)[0]
    if first:
        assert engine.load_checkpoint(directory)[0] is not None
    loss = engine.train_batch(iter([{"input_ids": rows(first), "labels": rows(first)}]))
    if not first:
        engine.save_checkpoint(directory)
    return [loss.item()]


@pytest.mark.parametrize("shards", [(2, 1), (1, 2)], ids=["sharded, then whole", "whole, then sharded"])
def test_a_checkpoint_loads_in_another_number_of_shards(run_ranks, tmp_path: Path, shards: tuple[int, int]):
    wanted = [loss for loss, _ in expected("llama-tied")[0]]
    for step, number in enumerate(shards):
        for (loss,) in run_ranks(number, go_on, "llama-tied", str(tmp_path), number, step):
            assert loss == pytest.approx(wanted[step], rel=1e-4)


def refused(what: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 3 if what == "world" else 2}}
    if what == "plan":
        model: nn.Module = make_model("gpt2")
    elif what == "kind":
        model = nn.Linear(4, 4)
    else:
        model = make_model("llama-tied")
    if what == "twice":
        parallel3d.tp_model_init(model, 2)
        parallel3d.tp_model_init(model, 1)
    elif what == "stages":  # as Hugging Face's Trainer calls it
        parallel3d.tp_model_init(parallel3d.PipelineModule([nn.Linear(4, 4)], num_stages=1), 2)
    elif what == "pipeline":
        model = parallel3d.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2)
    parallel3d.initialize(model=model, config=config)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("world", "2 ranks can't be divided by 3 tensor-parallel ranks"),
        ("plan", "GPT2LMHeadModel has no plan for tensor parallelism"),
        ("kind", "a Linear is not a causal language model of transformers"),
        ("twice", "the model is sharded over 2 ranks already, and can't be over 1"),
        (
            "stages",
            "a PipelineModule is sharded by tensor_parallel.size; set that instead of tensor_parallel.autotp_size",
        ),
        ("pipeline", "the PipelineModule was built with 1 tensor-parallel ranks; set tensor_parallel.size"),
    ],
)
def test_what_cannot_be_sharded_is_refused(run_ranks, what: str, told: str):
    transformers()
    with pytest.raises(RankError, match=re.escape(told)):
        run_ranks(2, refused, what)


def test_a_single_rank_is_not_sharded():
    model = make_model("llama-tied")
    weights = list(model.parameters())
    assert parallel3d.tp_model_init(model, 1) is model
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="1 ranks can't be divided by 2"):
        parallel3d.tp_model_init(model, 2)
