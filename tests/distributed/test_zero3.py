"""ZeRO-3: weights that live as shards, gathered by the program while their layers run."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import toy
from layouts import SHARDED, make_engine, own_iterator, run_steps
from torch import nn

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.schedule.instructions import Op
from parallel3d.zero.weights import WeightState

SCHEDULES: list[dict[str, Any]] = [
    {"stages": 1},
    {"stages": 1, "schedule": "gpipe", "num_chunks": 3, "activation_checkpoint_interval": 2},
    {"stages": 2, "schedule": "1f1b", "activation_checkpoint_interval": 2},
    {"stages": 2, "schedule": "interleaved", "num_chunks": 2},
    {"stages": 2, "schedule": "zb-h1"},
    {"stages": 2, "schedule": "zbv", "num_chunks": 2, "placement": "v"},
    {"stages": 2, "schedule": "zb-looped", "num_chunks": 2},
]
STEPS, ACCUMULATION = 2, 4


def train(pipeline: dict[str, Any], zero: dict[str, Any], clipping: float, optimizer: str) -> Any:
    torch.manual_seed(5)
    engine = make_engine(
        toy.model(tied=True),
        optimizer=optimizer,
        accumulation=ACCUMULATION,
        clipping=clipping,
        pipeline=pipeline,
        zero_optimization={"reduce_bucket_size": 1500, **zero},
    )
    dp = engine.grid.get_data_parallel_world_size()
    data = own_iterator(engine, [toy.micro_batch(g, "tuple") for g in range(STEPS * ACCUMULATION * dp)])
    return engine, run_steps(engine, data, STEPS)


def numbers(*arguments: Any) -> Any:
    return train(*arguments)[1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of the schedules, each in one of the two tests; with --full in both."""
    full, names = metafunc.config.getoption("full"), metafunc.fixturenames
    if "clipping" in names:
        cases = [(pipeline, 0.0) for pipeline in (SCHEDULES if full else SCHEDULES[::2])]
        more = [(SCHEDULES[0], 0.05), (SCHEDULES[5], 0.05)]
        metafunc.parametrize(("pipeline", "clipping"), [*cases, *(more if full else more[1:])])
    elif "ahead" in names:
        cases = [(pipeline, 2000) for pipeline in (SCHEDULES if full else SCHEDULES[1::2])]
        more = [(SCHEDULES[1], 0), (SCHEDULES[2], 0)]
        metafunc.parametrize(("pipeline", "ahead"), [*cases, *(more if full else more[1:])])


def test_stage_3_has_the_bits_of_stage_2(run_ranks, pipeline: dict[str, Any], clipping: float):
    world = 2 * pipeline["stages"]
    two, three = (
        run_ranks(world, numbers, pipeline, zero, clipping, "AdamW") for zero in ({"stage": 2}, {"stage": 3, **SHARDED})
    )
    for (losses, norms, weights), (same_losses, same_norms, same_weights) in zip(two, three, strict=True):
        assert losses == pytest.approx(same_losses, rel=1e-6 if clipping else 0)
        assert norms == pytest.approx(same_norms, rel=1e-6)
        for name, weight in weights.items():
            if clipping:
                torch.testing.assert_close(same_weights[name], weight, rtol=1e-6, atol=1e-8)
            else:
                assert torch.equal(same_weights[name], weight), name


def held(pipeline: dict[str, Any], ahead: int) -> Any:
    zero = {"stage": 3, **SHARDED, "stage3_prefetch_bucket_size": ahead}
    engine, _ = train(pipeline, zero, 0.0, "AdamW")
    units = engine.update.units
    instructions = engine._runner.programs.get(ACCUMULATION, True).instructions[engine.pipeline_module.stage_id]
    own = [w for bucket in engine.update.reducer.all_buckets() if (w := bucket.sharded) is not None]
    return {
        "gathers": (units.number, STEPS * sum(i.op is Op.GATHER_PARAMS and i.run is not None for i in instructions)),
        "peak": units.peak,
        "live": units.live,
        "states": {weights.state for weights in own},
        "whole": sum(
            p.untyped_storage().nbytes() for w in own for p in w.parameters if p.untyped_storage().nbytes() > 4
        ),
        "kept": sum(w._whole.untyped_storage().nbytes() for w in own),
        "shards": sum(w.shard.numel() for w in own),
        "padded": sum(w.numel for w in own),
    }


def test_what_is_gathered_is_what_was_planned(run_ranks, pipeline: dict[str, Any], ahead: int):
    for found in run_ranks(2 * pipeline["stages"], held, pipeline, ahead):
        executed, planned = found["gathers"]
        assert executed == planned > 0
        assert 0 < found["peak"] <= SHARDED["stage3_max_live_parameters"]
        assert (found["live"], found["states"], found["whole"], found["kept"]) == (0, {WeightState.SHARDED}, 0, 0)
        assert found["shards"] * 2 == found["padded"]


def write_and_read(offload: dict[str, Any]) -> Any:
    engine, _ = train({"stages": 1}, {"stage": 3, **SHARDED, **offload}, 0.0, "SGD")
    weight = next(engine.module.parameters())
    outside = bool(weight.isnan().all())
    rank = torch.distributed.get_rank()
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
        weight.fill_(float(rank))
    with parallel3d.zero.GatheredParameters(weight):
        kept = weight.detach().clone()
    with parallel3d.zero.GatheredParameters(weight):  # as PEFT merges adapters for a while: no error, and dropped
        weight.data += 3.0
        merged = weight.detach().clone()
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full_like(weight, 4.0 + rank)
    with parallel3d.zero.GatheredParameters(weight, modifier_rank=0):
        kept = torch.stack([kept, weight.detach() - 3.0])
        weight.data.fill_(1.0)
    errors = []
    try:
        with parallel3d.zero.GatheredParameters(weight), torch.no_grad():
            weight.fill_(7.0)
    except parallel3d.Parallel3DError as error:
        errors.append(str(error))
    try:
        engine.module.state_dict()
    except parallel3d.Parallel3DError as error:
        errors.append(str(error))
    with parallel3d.zero.GatheredParameters(engine.module.parameters(), modifier_rank=0):
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.module.load_state_dict(state)
        untouched = weight.detach().clone()
    try:
        engine.module.load_state_dict(state)
    except parallel3d.Parallel3DError as error:
        errors.append(str(error))
    data = own_iterator(engine, [toy.micro_batch(g, "tuple") for g in range(2 * ACCUMULATION)])
    engine.train_batch(data)
    with parallel3d.zero.GatheredParameters(weight):
        stepped = weight.detach().clone()
    held, weight.data = weight.data, torch.ones(weight.shape, dtype=weight.dtype)
    try:
        with parallel3d.zero.GatheredParameters(weight):
            pass
    except parallel3d.Parallel3DError as error:
        errors.append(str(error))
    weight.data = held
    try:
        with torch.no_grad():
            weight.fill_(7.0)
        with parallel3d.zero.GatheredParameters(weight):
            pass
    except parallel3d.Parallel3DError as error:
        errors.append(str(error))
    *_, last = engine.module.parameters()
    for replica, values in ((2, last.data), (0, torch.ones(3))):
        try:
            with parallel3d.zero.GatheredParameters(last, modifier_rank=replica):
                last.data = values
        except parallel3d.Parallel3DError as error:
            errors.append(str(error))
    return outside, kept, merged, untouched, errors, len(state), stepped


@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu"}}])
def test_whole_weights_are_read_and_written_in_a_context(run_ranks, offload: dict[str, Any]):
    for outside, kept, merged, untouched, errors, names, stepped in run_ranks(2, write_and_read, offload):
        assert outside
        assert (kept == 1.0).all()
        assert (merged == 4.0).all()
        assert (untouched == 1.0).all()
        assert "changed in GatheredParameters without modifier_rank" in errors[0]
        assert "state_dict() reads whole weights" in errors[1]
        assert "load_state_dict() writes whole weights" in errors[2]
        assert "was written while it lived as shards" in errors[3]
        assert "was written while it lived as shards" in errors[4]
        assert errors[5] == "modifier_rank is 2; give the number of a replica, from 0 to 1, or None"
        assert "got data of shape [3] while it was gathered" in errors[6]
        assert len(errors) == 7
        assert names > 0
        assert 0 < (stepped - 1.0).abs().max() < 0.5, "the masters follow what was written"


LAYERS, WIDTH = 5, 256


def build_in_layers(stage: int) -> tuple[list[int], int]:
    """Bytes of all tensors of this process before each layer is built and at the end, from the first; those of a layer."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    held: list[int] = []

    gc.collect()

    def count(_: int) -> None:
        tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and not item.is_meta]
        held.append(sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()))

    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    module = PipelineModule(layers, num_stages=1, seed_layers=True, config=config, seed_fn=count)
    count(LAYERS)
    assert sum(p.numel() for p in module.parameters()) == LAYERS * WIDTH**2
    return [bytes_ - held[0] for bytes_ in held], 4 * WIDTH**2


@pytest.mark.parametrize(("stage", "parts"), [(2, 1), (3, 4)])
def test_a_module_holds_shards_alone_of_the_layers_that_are_built(run_ranks, stage: int, parts: int):
    for held, layer in run_ranks(4, build_in_layers, stage):
        assert len(held) == LAYERS + 1
        for k, bytes_ in enumerate(held):
            assert abs(bytes_ - k * layer // parts) < layer // 8, "besides the shards, placeholders of one element"
