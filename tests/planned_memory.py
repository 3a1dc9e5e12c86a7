"""Layouts whose memory is predicted without running them, and measured in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from layouts import own_iterator

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.config import load
from parallel3d.config.layout import Layout, configuration, parse_layout
from parallel3d.models import CausalLMLoss, DecoderConfig
from parallel3d.models.blocks import decoder
from parallel3d.monitor.memory import LiveStorages, RunMemory
from parallel3d.pipe import PipelineModule
from parallel3d.pipe import units as pipe_units
from parallel3d.planner.predict.chunk_memory import ChunkMemory, MemoryReplay
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.memory import MemoryModel, Room
from parallel3d.planner.predict.profile import ModelProfile, layer_units
from parallel3d.planner.predict.program import Programs, make_buckets
from parallel3d.planner.predict.sharded import sharded_weights
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.builders import placement_of
from parallel3d.schedule.instructions import SEND_OPS, Program
from parallel3d.zero.policy import live_limits

# So much larger than its weights' gradients are a layer's activations, that neither hides an error in the other.
WORDS, HIDDEN, SEQ, SAMPLES = 96, 32, 64, 2
LOSS = CausalLMLoss(chunk=32)


def model(tied: bool, units: str | None) -> list[Any]:
    return decoder(
        DecoderConfig(
            vocab_size=WORDS,
            hidden_size=HIDDEN,
            ffn_size=80,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            max_positions=SEQ,
            tied=tied,
        ),
        units="half" if units == "half" else "block",
    )


def micro_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(WORDS, (samples, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def base(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        **changes,
    }


@dataclass(frozen=True)
class Measured:
    """One rank: its stage and slice, the report of engine.reports.memory_report, most bytes within the batch and the step.

    in_transit: the most bytes that messages sent held; program: every stage's instructions, as the executor has them.
    runs: bytes in each run of a layer, if weights are sharded.
    """

    stage: int
    slice: int
    bounds: tuple[int, ...]
    report: dict[str, tuple[int, int]]
    batch_peak: int
    step_peak: int
    in_transit: int
    program: Program
    runs: list[int]


class CountedRuns(RunMemory):
    """Counts storages, on the CPU; what is gathered is written into those that were there before."""

    storages: ClassVar = LiveStorages()

    def _peak(self) -> int:
        peak, self.storages.peak = self.storages.peak, self.storages.nbytes
        return peak

    def begin(self, beside: int) -> None:
        super().begin(0)

    def reach(self, run: int, beside: int) -> None:
        super().reach(run, 0)


def measure_runs(engine: Engine, data: Any) -> list[int]:
    """Return the bytes in each run of a layer in a batch, if weights are sharded."""
    units = engine._runner._units
    if units is None:
        return []
    with pytest.MonkeyPatch.context() as patch, LiveStorages() as storages:
        patch.setattr(CountedRuns, "storages", storages)
        patch.setattr(pipe_units, "RunMemory", CountedRuns)
        units.measure()
        memory = units._memory
        engine.train_batch(data)
    return memory.most


def measure(words: str, tied: bool, changes: Mapping[str, Any]) -> Measured:
    """On every rank."""
    layout = parse(words)
    config = configuration(layout, base(changes))
    module = PipelineModule(model(tied, layout.units), loss_fn=LOSS, config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    data = own_iterator(engine, [micro_batch(layout.micro_batch)] * 3 * layout.micro_batches * 8)
    engine.train_batch(data)
    engine.reports.profile_next_batch("memory")
    engine.train_batch(data)
    report = engine.reports.memory_report()[module.groups.rank]
    # Every message that this rank's stage sends, as its program has it.
    profile = engine.reports.memory
    assert profile is not None
    sends = sum(i.op in SEND_OPS for i in profile.program.instructions[module.stage_id])
    return Measured(
        module.stage_id,
        module.groups.coordinate("model"),
        module.partition.bounds,
        report,
        profile.batch.peak,
        profile.step.peak,
        sends * layout.micro_batch * SEQ * HIDDEN * (2 if "bf16" in changes else 4),
        profile.program,
        measure_runs(engine, data),
    )


def parse(words: str) -> Layout:
    return parse_layout(words).complete(micro_batch=SAMPLES, micro_batches=4)


def predict(
    words: str, tied: bool, changes: Mapping[str, Any], bounds: tuple[int, ...]
) -> tuple[tuple[StageMemory, ...], list[int], Program, list[list[int]]]:
    """Return each stage's predicted memory, activation bytes between instructions, the program, and bytes of each layer's run.

    In any process.
    """
    layout = parse(words)
    inputs, labels = micro_batch(1)
    config = load({"train_micro_batch_size_per_gpu": 1, **base(changes)})
    profile = ModelProfile(model(tied, layout.units), inputs, labels, LOSS, config, "cpu")
    memory, policy = MemoryModel(profile), profile.policy(layout.zero)
    placement = placement_of(layout.placement, layout.stages, layout.chunks)
    split = Chunks(layout, placement, bounds)
    parameters = profile.stage_parameters(split)
    buckets = make_buckets(parameters, len(placement), policy, layout.replicas)
    profiles = profile.layers(layout, 1)
    units = layer_units(profile.specs, profiles)
    frozen: list[list[Any]] = [[]] * layout.stages
    sharded = sharded_weights(split, [policy] * layout.stages, profiles, units, parameters, frozen)
    given = layout, buckets, policy, layout.micro_batches
    if sharded is None:
        program, gathered = Programs().make(*given).program, [0] * layout.stages
    else:
        limits = live_limits(config.zero_optimization, sharded.elements)[0]
        program = Programs().make(*given, simulate=partial(sharded.simulation, limits, (), 1.0)).program
        gathered = sharded.gathered(program, ())
    replay = MemoryReplay(program)
    between, stage_numbers = [], range(layout.stages)
    for stage in stage_numbers:
        chunks = memory.chunks(replay, split, stage).items()
        held = {c: ChunkMemory(chunk.held, chunk.kept_input, dict) for c, chunk in chunks}
        between.append(replay.peak(stage, held).held)
    stages = tuple(memory.stage(replay, split, k, Room(2**40, 2**40), 1, live) for k, live in enumerate(gathered))
    return stages, between, program, [replay.runs(k, memory.chunks(replay, split, k)) for k in stage_numbers]
