"""A checkpoint of commit a149018 (2 stages x 2 replicas, ZeRO-2, bf16) loads bitwise, in its own layout and in others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import toy3d
from layouts import BASE_SEED, OPTIMIZERS, specs
from test_checkpoint_layouts import check_same, whole_tensors

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule

SAVED = Path(__file__).parents[1] / "data" / "checkpoint-a149018"
STEPS = 2


def make(stages: int, replicas: int, stage: int) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": toy3d.SAMPLES,
        "gradient_accumulation_steps": 4 // replicas,
        "optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1500},
        "pipeline": {"stages": stages},
        "steps_per_print": None,
    }
    items = specs(toy3d.model(tied=True))
    layers = [*items[:3], *items[-2:]]
    loss = LayerSpec(toy3d.SlicedLoss, False)
    module = PipelineModule(layers, loss_fn=loss, seed_layers=True, base_seed=BASE_SEED, config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def load_and_save(stages: int, replicas: int, stage: int, target: str) -> tuple[object, ...]:
    engine = make(stages, replicas, stage)
    path, client_state = engine.load_checkpoint(str(SAVED))
    engine.save_checkpoint(target, tag="again")
    return path, client_state, engine.global_steps, engine.global_samples, engine.get_lr()


@pytest.mark.parametrize(("stages", "replicas", "stage"), [(2, 2, 2), (1, 2, 1), (1, 1, 0)])
def test_it_loads_bitwise(run_ranks, tmp_path: Path, stages: int, replicas: int, stage: int) -> None:
    loaded = run_ranks(stages * replicas, partial(load_and_save, stages, replicas, stage), str(tmp_path))
    samples = STEPS * 4 * toy3d.SAMPLES
    for result in loaded:
        assert result == (str(SAVED / "global_step2"), {"epoch": 3}, STEPS, samples, [OPTIMIZERS["AdamW"]["lr"]])
    before, after = whole_tensors(SAVED / "global_step2"), whole_tensors(tmp_path / "again")
    assert {name.split("/")[0] for name in before} == {"model", "master", "optimizer"}
    check_same(before, after)
