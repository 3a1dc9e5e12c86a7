"""Shards of weights in host memory or on disk: the numbers are those without offload, and of one replica without shards."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from operator import gt, sub
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from late_copies import late_copies
from layouts import copies
from offload_runs import BF16, DEVICE, ON_CPU, Case, data_of, engine_of, on_disk, optimizer_state
from parallel3d.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.errors import ConfigError, OffloadError
from parallel3d.monitor.memory import RunMemory
from parallel3d.pipe import LayerSpec, PipelineModule

PARAM = {"offload_param": {"device": "cpu"}}
HALF = {**DEVICE, "offload_optimizer": {**DEVICE["offload_optimizer"], "ratio": 0.5}}
# How weights, and the optimizer's state, are offloaded; and how the state is in the training that it is compared with.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": (PARAM, {}),
    "some weights": ({"offload_param": {"device": "cpu", "max_in_cpu": 1500, "pin_memory": False}}, {}),
    "weights and state": (PARAM | DEVICE, {}),
    "weights and half of the state": (PARAM | HALF, {}),
    "weights and state, which the CPU updates": (PARAM | ON_CPU, ON_CPU),
}


def nvme(directory: Path, **more: Any) -> dict[str, Any]:
    return {"offload_param": {"device": "nvme", "nvme_path": str(directory), "buffer_count": 2, **more}}


def ways(directory: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    on_nvme = nvme(directory)
    return {
        **WAYS,
        "weights on disk": (nvme(directory, buffer_count=4), {}),
        "weights on disk and in memory": (nvme(directory, max_in_cpu=1500), {}),
        "weights and state on disk": (on_nvme | on_disk(directory), {}),
        "weights on disk, updated by the CPU": (on_nvme | ON_CPU, ON_CPU),
    }


# The first step overflows.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}
CASES = {
    1: [
        Case(stage=3, blocks=2, config=BF16, clipping=0.0),
        Case(stage=3, blocks=2, clipping=0.0, frozen=(1, 4), optimizer=("SGD", {"lr": 0.05, "momentum": 0.9})),
    ],
    2: [
        Case(stage=3, blocks=2, dp=2, config=BF16, per_micro_batch=True),
        Case(stage=3, blocks=2, dp=2, config=FP16, frozen=(2, 4)),
        Case(stage=3, blocks=2, pp=2, clipping=0.0, tied=True, schedule="zb-h1"),
    ],
    3: [Case(stage=3, blocks=2, dp=3, tied=True, frozen=(1,))],
}
STEPS = 2


def run(case: Case, zero: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor], Engine]:
    """Return losses, norms, all weights and state, and the engine, after steps with evaluations between them."""
    engine = engine_of(case, zero)
    losses, norms = [], []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step . skipped")
        for step in range(STEPS):
            losses.append(engine.train_batch(data_of(engine, step, 1)).item())
            norms.append(engine.get_global_grad_norm().item())
            losses.append(engine.eval_batch(data_of(engine, step + 1, 1)).item())
    return losses, norms, {**copies(engine.module), **optimizer_state(engine)}, engine


def compare(cases: list[Case], directory: Path, full: bool) -> list[str]:
    """Return what differs from training without offload of weights, and from the predicted memory.

    full: whether every case is trained in every way; every third one if not, and in every way two cases.
    """
    problems = []
    for number, case in enumerate(cases):
        # One replica has no shards without offload; its other buckets change the last bits of the norm.
        alone = case.dp == 1
        known: dict[str, Any] = {}
        for k, (way, (zero, others)) in enumerate(ways(directory).items()):
            if not full and (number + case.dp * case.pp + k) % 3:
                continue
            if others and alone:
                continue  # the CPU's kernels round the last elements of a span differently
            if str(others) not in known:
                known[str(others)] = run(replace(case, stage=0) if alone else case, others)
            losses, norms, state, _ = known[str(others)]
            own_losses, own_norms, own_state, engine = run(case, zero)
            if engine.skipped_steps != ("fp16" in case.config):
                problems.append(f"{number} {way}: {engine.skipped_steps} skipped steps")
            if not torch.tensor(own_losses).equal(torch.tensor(losses)):
                problems.append(f"{number} {way}: losses {own_losses}, without offload {losses}")
            if own_norms != pytest.approx(norms, rel=1e-12 * alone, abs=0, nan_ok=True):
                problems.append(f"{number} {way}: norms {own_norms}, without offload {norms}")
            different = [k for k in state.keys() | own_state.keys() if not torch.equal(state[k], own_state[k])]
            problems += [f"{number} {way}: {key} differs" for key in different]
            problems += [
                f"{number} {way}: {problem}" for problem in check_memory(engine, way, case.tied and case.pp > 1)
            ]
    return problems


def check_memory(engine: Engine, way: str, has_shared: bool) -> list[str]:
    rows = engine.reports.memory_report()[engine.global_rank]
    # A shard that is padding alone gets masters and no state. State on disk has had no use for some of its buffers so far.
    less = {"disk": 2 * 4096, "host": 3 * 4096 * ("state on disk" in way)}
    problems = [
        f"{row} is {rows[row][1]}, predicted {rows[row][0]}"
        for row in ("weights", "masters", "host", "window", "disk")
        if row in rows and not 0.98 * rows[row][0] - less.get(row, 0) <= rows[row][1] <= 1.02 * rows[row][0]
    ]
    update = engine.update
    shards = [w for bucket in update.reducer.all_buckets() if (w := bucket.sharded) is not None]
    kept = sum(shard.numel() for shard in update.host_shards.kept)
    if ("disk" in way) != (update.host_shards.bytes_on_disk() > 0):
        problems.append(f"{update.host_shards.bytes_on_disk()} bytes of weights are on disk")
    if any(file.rates()[0] == 0 for file in update.disks().values()):
        problems.append("nothing was read from the disk")
    every = [*shards, *(bucket.sharded for bucket in update.frozen_buckets)]
    if way == "some weights":
        on_device = sum(bucket.sharded is None or not bucket.weights_offloaded for bucket in update.sharded.buckets)
        problems += [] if 0 < kept <= 1500 and on_device else [f"{kept} elements are on the host"]
    elif kept != sum(weights.shard.numel() for weights in every) or (rows["weights"][1] != 0) != has_shared:
        problems.append(f"{kept} elements are on the host, {rows['weights'][1]} bytes on the device")
    if update.units.live or not update.units.number:
        problems.append(f"{update.units.live} elements are live after {update.units.number} gathers")
    return problems


def compare_late(cases: list[Case], directory: Path, full: bool) -> list[str]:
    with late_copies():
        return compare(cases, directory, full)


@pytest.mark.parametrize("world", CASES)
def test_the_numbers_are_those_without_offload_also_if_copies_are_late(
    run_ranks, world: int, tmp_path: Path, full: bool
):
    for problems in run_ranks(world, compare_late, CASES[world], tmp_path, full):
        assert not problems, "\n".join(problems)


def gathers_of_steps(case: Case, fills: bool) -> tuple[list[int], list[float], dict[str, Tensor]]:
    """Return the number of gathers of each step, the losses, and all weights and state; each rank has other peaks of memory."""
    engine = engine_of(
        case, {"offload_param": {"device": "cpu", "fill_freed_memory": fills}, "stage3_max_live_parameters": 2600}
    )
    peaks = random.Random(engine.global_rank)
    counts, losses = [engine.update.units.number], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMemory, "_peak", lambda memory: memory._beside + 500 * peaks.randrange(100))
        for step in range(4):
            losses.append(engine.train_batch(data_of(engine, step, 1)).item())
            counts.append(engine.update.units.number)
    engine.set_train_batch_size(engine.train_batch_size() * 2)
    losses.append(engine.train_batch(data_of(engine, 4, 2)).item())
    counts.append(engine.update.units.number)
    return list(map(sub, counts[1:], counts)), losses, {**copies(engine.module), **optimizer_state(engine)}


def fill(cases: list[Case]) -> list[str]:
    problems = []
    with late_copies(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMemory, "can_measure", lambda device: True)
        for case in cases:
            counts, losses, state = gathers_of_steps(case, fills=False)
            own_counts, own_losses, own_state = gathers_of_steps(case, fills=True)
            # The third batch is the first that is planned with the second's memory; the last one has more micro-batches.
            if not all(map(gt, counts[2:4], own_counts[2:4])) or (counts[:2], counts[4]) != (
                own_counts[:2],
                own_counts[4],
            ):
                problems.append(f"{own_counts} gathers, {counts} without filling")
            if own_losses != losses:
                problems.append(f"losses {own_losses}, without filling {losses}")
            problems += [f"{key} differs" for key in state if not torch.equal(state[key], own_state[key])]
    return problems


def test_weights_that_stay_where_activations_leave_room_change_no_bit(run_ranks):
    for problems in run_ranks(2, fill, [replace(CASES[2][0], blocks=4), replace(CASES[2][2], blocks=4)]):
        assert not problems, "\n".join(problems)


WIDTH = 16


class Plain(nn.Module):
    """A module that is no pipeline, with a frozen block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def plain_engine(zero: dict[str, Any], **more: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        "steps_per_print": None,
        **more,
    }
    return parallel3d.initialize(model=Plain(), config=config)[0]


def whole(engine: Engine) -> dict[str, Tensor]:
    with parallel3d.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def steps_of(engine: Engine, first: int, number: int) -> dict[str, Tensor]:
    for step in range(first, first + number):
        torch.manual_seed(100 * step + engine.global_rank)
        engine.backward(engine(torch.randn(3, WIDTH)))
        engine.step()
    return whole(engine)


def plain(directory: Path) -> list[bool]:
    """Train with and without offload, also from the other's checkpoint, and write between steps; return what is equal."""
    found = []
    world = torch.distributed.get_world_size()
    without = {"stage": 3 if world > 1 else 0}
    for offload in (PARAM, PARAM | DEVICE, nvme(directory) | on_disk(directory)):
        offloaded, other = plain_engine({"stage": 3, **offload}), plain_engine(without)
        found.append(same(steps_of(offloaded, 0, 2), steps_of(other, 0, 2)))
        offloaded.save_checkpoint(directory / "on host")
        other.save_checkpoint(directory / "on device")
        back, there = plain_engine({"stage": 3, **offload}), plain_engine(without)
        back.load_checkpoint(directory / "on device")
        there.load_checkpoint(directory / "on host")
        found.append(same(whole(back), whole(there)))
        engines = (offloaded, other, back, there)
        states = [steps_of(engine, 2, 1) for engine in engines]
        found += [same(states[0], state) for state in states[1:]]
        for engine in engines:
            write(engine.module)
        written = [whole(engine) for engine in engines]
        found.append(bool((written[0]["blocks.0.weight"] == 0.5).all() and (written[0]["blocks.1.bias"] == 2.0).all()))
        states = written + [steps_of(engine, 3, 1) for engine in engines]
        found += [same(states[k - k % 4], state) for k, state in enumerate(states)]
        found.append(bool((states[-4]["blocks.2.weight"] - 1.5).abs().max() < 0.1))
    return found


def write(module: nn.Module) -> None:
    """Write a master, weights in a context, of which one is frozen, and weights of a state dict."""
    first, frozen, third = (module.blocks[k] for k in (0, 1, 2))
    safe_set_full_fp32_param(first.weight, torch.full((WIDTH, WIDTH), 0.5))
    with parallel3d.zero.GatheredParameters([frozen.bias, third.weight], modifier_rank=0), torch.no_grad():
        frozen.bias.fill_(2.0)
        third.weight.fill_(1.5)
    with parallel3d.zero.GatheredParameters(module.parameters(), modifier_rank=0):
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    assert (safe_get_full_fp32_param(first.weight) == 0.5).all()


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("world", [1, 2])
def test_a_plain_module_trains_is_written_and_resumed_as_without_offload(run_ranks, tmp_path: Path, world: int):
    for found in run_ranks(world, plain, tmp_path):
        assert all(found), found


class Measured(nn.Linear):
    """Notes the bytes of all tensors outside of slabs when it has been made."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__(256, 256)
        if not self.weight.is_meta:  # a layer is built without memory to know its size
            storages = (t.untyped_storage() for t in gc.get_objects() if isinstance(t, Tensor) and not t.is_meta)
            self.seen.append(sum({s.data_ptr(): s.nbytes() for s in storages if s.resizable()}.values()))


def build(directory: Path) -> dict[str, tuple[float, bool]]:
    """Return, of models built with all weights offloaded, the layers in memory at a time, and whether bits are equal."""
    found = {}
    for offload, remote in ((PARAM, None), (nvme(directory), "nvme")):
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, **offload}}
        for inside in (False, True):

            def make(given: dict[str, Any] | None, inside: bool = inside, remote: str | None = remote) -> nn.Module:
                torch.manual_seed(3)
                stage = given if remote is None else {"zero_optimization": {"stage": 3}}
                enabled = inside and given is not None
                with parallel3d.zero.Init(config_dict_or_path=stage, remote_device=remote, enabled=enabled):
                    if inside:
                        return nn.Sequential(*(Measured() for _ in range(6)))
                    return PipelineModule([LayerSpec(Measured)] * 6, num_stages=1, config=given)

            with torch.no_grad():
                wanted = {name: p.clone() for name, p in make(None).named_parameters()}
            Measured.seen.clear()
            module = make(config)
            layers = [(size - Measured.seen[0]) / (4 * 257 * 256) + 1 for size in Measured.seen]
            engine, *_ = parallel3d.initialize(
                model=module, config=config, optimizer=torch.optim.Adam(module.parameters())
            )
            found[f"{offload}, {inside}"] = max(layers), same(whole(engine), wanted)
    return found


def test_a_model_of_one_replica_is_built_with_one_layer_on_the_device(run_ranks, tmp_path: Path):
    [found] = run_ranks(1, build, tmp_path)
    assert len(found) == 4
    for name, (layers, equal) in found.items():
        assert layers < 1.1, name
        assert equal, name


def order_of_reads(directory: Path) -> list[list[str]]:
    """Return reads of shards from the disk, and their gathers, in the second step of a pipeline and of a plain module."""
    zero = nvme(directory, buffer_count=4)
    pipeline, plain = engine_of(Case(stage=3, blocks=3, config=BF16), zero), plain_engine({"stage": 3, **zero})

    def train_pipeline(step: int) -> None:
        pipeline.train_batch(data_of(pipeline, step, 1))

    def train_plain(_: int) -> None:
        plain.backward(plain(torch.ones(3, WIDTH)))
        plain.step()

    return [second_step(pipeline, train_pipeline), second_step(plain, train_plain)]


def second_step(engine: Engine, train: Callable[[int], None]) -> list[str]:
    train(0)
    engine.update.sharded.settle()
    [file], host, events = engine.update.disks().values(), engine.update.host_shards, list[str]()
    read, gather = file.read, host.gather
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "read", lambda *args: (events.append("read"), read(*args))[1])
        patch.setattr(host, "gather", lambda *args: (events.append("gather"), gather(*args))[1])
        train(1)
    return events


def test_shards_are_read_ahead_of_their_gathers_and_once(run_ranks, tmp_path: Path):
    [(pipeline, plain)] = run_ranks(1, order_of_reads, tmp_path)
    for events in (pipeline, plain):
        assert events.count("read") == events.count("gather") > 8
    # Three reads ahead of the first gather, one more with each, and none is left for the last four.
    assert pipeline == ["read"] * 3 + ["gather", "read"] * (pipeline.count("read") - 3) + ["gather"] * 3
    # The order of a forward and of a backward is known, but not which backward follows a forward.
    assert "".join(event[0] for event in plain).count("rrrg") == 2


def die(directory: Path) -> None:
    """Train with all on disk, and end in the middle of the second step."""
    engine = plain_engine({"stage": 3, **nvme(directory), **on_disk(directory)})
    steps_of(engine, 0, 1)
    calls = count()
    engine.optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) else None)
    steps_of(engine, 1, 1)


def train_anew(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    offloads: list[dict[str, Any]] = [{"stage": 3, **nvme(directory), **on_disk(directory)}, {"stage": 0}]
    first, second = (steps_of(plain_engine(zero), 0, 2) for zero in offloads)
    return first, second


def test_a_kill_within_a_step_leaves_nothing_that_the_next_start_could_take(run_ranks, tmp_path: Path):
    killed = multiprocessing.get_context("forkserver").Process(target=die, args=(tmp_path,))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    [(weights, without)] = run_ranks(1, train_anew, tmp_path)
    assert same(weights, without)


def short_disk(directory: Path) -> str:
    """The file of rank 1 may not have the size that its weights need."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OffloadError) as error:
            plain_engine({"stage": 3, **nvme(directory)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return str(error.value)


def test_a_disk_without_room_for_the_weights_is_an_error_on_all_ranks(run_ranks, tmp_path: Path):
    for error in run_ranks(2, short_disk, tmp_path):
        assert f"can't be made in {tmp_path}" in error
        assert "File too large; free space there, set nvme_path" in error
    assert list(tmp_path.iterdir()) == []


def refusals() -> list[str]:
    errors = []
    for section in (
        {"device": "gpu"},
        {"device": "cpu", "max_in_cpu": -1},
        {"device": "cpu", "buffers": 5},
        {"device": "nvme"},
        {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 1},
    ):
        with pytest.raises(ConfigError) as error:
            plain_engine({"stage": 3, "offload_param": section})
        errors.append(str(error.value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = plain_engine({"stage": 2, **PARAM})
    errors += [str(one.message) for one in caught if "offload_param" in str(one.message)]
    with pytest.raises(parallel3d.Parallel3DError) as refused:
        plain_engine({"stage": 3, **PARAM}).module.state_dict()
    return [*errors, str(refused.value), str(engine.update.host_shards)]


def test_what_cannot_be_offloaded_is_an_error_or_a_warning(run_ranks):
    [(device, most, unknown, no_path, count, stage, state, shards)] = run_ranks(1, refusals)
    assert "offload_param.device" in device
    assert "'gpu'" in device
    assert "offload_param.max_in_cpu" in most
    assert "unknown key 'zero_optimization.offload_param.buffers'" in unknown
    assert "device is nvme, but nvme_path is missing; give a directory on a local disk" in no_path
    assert "offload_param.buffer_count" in count
    assert "offload_param: it needs stage 3, but the stage is 2" in stage
    assert "state_dict() reads whole weights" in state
    assert shards == "None"
