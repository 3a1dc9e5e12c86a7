"""ZeRO-3 beside the training itself: frozen layers, small shards, evaluation, failures, and memory that is poisoned."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import adapted
import pytest
import torch
import torch.distributed as dist
from layouts import BASE_SEED, Run, check, copies, make_engine, make_optimizer, own_iterator, run_reference, run_steps
from reference import Reference
from torch import Tensor

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.comm.collectives import DONE, Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.gathers import mapped_bytes
from parallel3d.engine import update
from parallel3d.zero.weights import ShardedWeights, WeightState

ACCUMULATION, STEPS, CLIPPING = 3, 2, 0.05
STAGE_2, STAGE_3 = {"stage": 2}, {"stage": 3, **adapted.LIMITS}


def engine_of(
    zero: dict[str, Any], optimizer: str = "SGD", clipping: float = 0.0, items: Any = None, **pipeline: Any
) -> Engine:
    return make_engine(
        items or adapted.ITEMS,
        adapted.squares,
        optimizer=optimizer,
        accumulation=ACCUMULATION,
        clipping=clipping,
        pipeline=pipeline,
        zero_optimization={"reduce_bucket_size": 100, **zero},
    )


def data_of(engine: Engine, steps: int = STEPS, seed: int = 0) -> Iterator[Any] | None:
    return own_iterator(engine, adapted.micro_batches(steps * ACCUMULATION * engine.dp_world_size, seed))


def check_released(engine: Engine) -> None:
    """Nothing is gathered, by the states and by the memory of the parameters."""
    units = engine.update.units
    buckets = [*engine.update.reducer.all_buckets(), *engine.update.frozen_buckets]
    sharded = [bucket.sharded for bucket in buckets if bucket.sharded is not None]
    assert sharded
    assert {weights.state for weights in sharded} == {WeightState.SHARDED}
    assert units.live == 0
    assert all(p.untyped_storage().nbytes() <= 8 for weights in sharded for p in weights.parameters)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())


# --- shards smaller than a parameter, and empty ones


def train_small(stages: int) -> Run:
    zero = {**STAGE_3, "stage3_max_live_parameters": 800}  # the two largest layers and their padding
    engine = engine_of(zero, "AdamW", CLIPPING, stages=stages)
    return run_steps(engine, data_of(engine), STEPS)


@pytest.mark.parametrize(("stages", "dp"), [(1, 3), (1, 5), (2, 3)])
def test_uneven_and_empty_shards_train_as_one_process(run_ranks, stages: int, dp: int):
    reference = Reference(adapted.ITEMS, adapted.squares, make_optimizer("AdamW"), CLIPPING, BASE_SEED)
    data = adapted.micro_batches(STEPS * ACCUMULATION * dp)
    losses, norms, weights = run_reference(reference, data, ACCUMULATION * dp)
    assert min(norms) > CLIPPING, "clipping must have an effect to be tested"
    trained = {name: weight for name, weight in weights.items() if name in adapted.TRAINED}
    check(run_ranks(stages * dp, train_small, stages), (losses, norms, trained), dp)


class Shelf:
    """Memory of this many bytes in place of that which replicas map; gathers by gloo."""

    def __init__(self, groups: ProcessGroups, device: torch.device, nbytes: int):
        self._memory, self._free, self._data = torch.zeros(nbytes, dtype=torch.uint8), nbytes, groups.data
        self.gathers = 0

    def keep(self, shard: Tensor) -> Tensor:
        end, self._free = self._free, self._free - mapped_bytes(shard.nbytes)
        assert self._free >= 0, "shards take more than was said"
        return self._memory[self._free : end][: shard.nbytes].view(shard.dtype).copy_(shard)

    def holds(self, shard: Tensor) -> bool:
        return shard.untyped_storage().data_ptr() == self._memory.data_ptr()

    def gather(self, whole: Tensor, shard: Tensor) -> Work:
        self.gathers += 1
        dist.all_gather(list(whole.chunk(self._data.size)), shard, group=self._data.handle)
        return DONE


def train_mapped(optimizer: str) -> tuple[Run, bool, int]:
    """Also whether the memory is full, and the number of gathers."""
    shelves: list[Shelf] = []

    def opened(*given: Any) -> Shelf:
        shelves.append(Shelf(*given))
        return shelves[-1]

    with mock.patch.object(update, "open_gather_copies", opened):
        engine = engine_of({**STAGE_3, "peer_copies": True}, optimizer, CLIPPING)
    return run_steps(engine, data_of(engine), STEPS), shelves[0]._free == 0, shelves[0].gathers


def test_shards_in_mapped_memory_train_as_one_process(run_ranks):
    """In fp32, where the shards of weights are the masters too, with frozen layers."""
    reference = Reference(adapted.ITEMS, adapted.squares, make_optimizer("AdamW"), CLIPPING, BASE_SEED)
    losses, norms, weights = run_reference(reference, adapted.micro_batches(STEPS * ACCUMULATION * 2), ACCUMULATION * 2)
    trained = {name: weight for name, weight in weights.items() if name in adapted.TRAINED}
    runs = run_ranks(2, train_mapped, "AdamW")
    check([run for run, *_ in runs], (losses, norms, trained), 2)
    assert all(full and gathers for _, full, gathers in runs)


# --- recomputation, evaluation


PIPELINES: list[dict[str, Any]] = [
    {"stages": 1},
    *({"stages": 2, "schedule": "1f1b", "activation_checkpoint_interval": interval} for interval in (1, 2, 4)),
    {"stages": 2, "schedule": "zb-h1", "activation_checkpoint_interval": 2},
    {"stages": 2, "schedule": "1f1b", "partition": [0, 1, 6]},  # a first stage that is frozen
]


def train_with_evaluations(pipelines: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    """Stage 2, and stage 3 with evaluations between its steps."""
    results = []
    for pipeline in pipelines:
        two = engine_of(STAGE_2, **pipeline)
        wanted = run_steps(two, data_of(two), STEPS)
        engine = engine_of(STAGE_3, **pipeline)
        data, losses, norms = data_of(engine), [], []
        for _ in range(STEPS):
            engine.eval_batch(data_of(engine, 1, seed=9))
            engine.eval_batch(data_of(engine, 1, seed=9), num_micro_batches=1)
            check_released(engine)
            loss, norm, weights = run_steps(engine, data, 1)
            check_released(engine)
            losses += loss
            norms += norm
        results.append((wanted, (losses, norms, weights)))
    return results


@pytest.mark.parametrize("stages", [1, 2])
def test_frozen_layers_recomputation_and_evaluation_leave_the_bits_of_stage_2(run_ranks, stages: int):
    pipelines = [pipeline for pipeline in PIPELINES if pipeline["stages"] == stages]
    for results in run_ranks(2 * stages, train_with_evaluations, pipelines):
        for (losses, norms, weights), found in results:
            assert found[0] == losses
            assert found[1] == pytest.approx(norms, rel=1e-6)
            assert same(weights, found[2])


# --- a failure in a batch


def fail_and_go_on(zero: dict[str, Any]) -> tuple[str, dict[str, Tensor], dict[str, Tensor], list[float]]:
    engine = engine_of(zero, stages=1, activation_checkpoint_interval=2)
    data = data_of(engine)
    engine.train_batch(data)
    before = copies(engine.module)
    scale = next(m for m in engine.module.modules() if isinstance(m, adapted.Scale))
    scale.fails = True
    message = ""
    try:
        engine.train_batch(data)
    except parallel3d.Parallel3DError as error:
        message = str(error)
    if zero["stage"] == 3:
        check_released(engine)
    scale.fails = False
    kept = copies(engine.module)
    assert same(before, kept)
    losses, _, weights = run_steps(engine, data_of(engine, seed=4), 2)
    return message, kept, weights, losses


def test_after_a_failed_batch_all_is_released_and_training_goes_on_as_at_stage_2(run_ranks):
    two, three = (run_ranks(2, fail_and_go_on, zero) for zero in (STAGE_2, STAGE_3))
    for (message, kept, weights, losses), (same_message, same_kept, same_weights, same_losses) in zip(
        two, three, strict=True
    ):
        assert "ValueError: told to fail" in message
        assert same_message == message
        assert same_losses == losses
        assert same(kept, same_kept)
        assert same(weights, same_weights)


def fail_while_a_peer_is_gone() -> str:
    engine = engine_of(STAGE_3, stages=1)
    data = data_of(engine)
    engine.train_batch(data)
    scale = next(m for m in engine.module.modules() if isinstance(m, adapted.Scale))
    scale.fails = True
    wait = ShardedWeights.wait

    def fail(self: ShardedWeights) -> None:
        if scale.has_failed:
            raise RuntimeError("Connection closed by peer")
        wait(self)

    with mock.patch.object(ShardedWeights, "wait", fail):
        try:
            engine.train_batch(data)
        except parallel3d.Parallel3DError as error:
            return str(error)
    return "nothing was raised"


def test_gathers_that_fail_after_an_error_do_not_hide_it(run_ranks):
    for message in run_ranks(2, fail_while_a_peer_is_gone):
        assert "ValueError: told to fail" in message


# --- calls of the script's own


def train_by_calls(zero: dict[str, Any]) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Of a model whose first layer is trained, and gathered last in each backward."""
    engine = engine_of(zero, items=[adapted.LINEAR, *adapted.ITEMS[1:]], stages=1)
    data, losses = data_of(engine), []
    for _ in range(STEPS * ACCUMULATION):
        inputs, labels = next(data)
        loss = adapted.squares(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        output = engine(torch.ones(2, adapted.WIDTH))
    if zero["stage"] == 3:
        check_released(engine)
    return losses, output, copies(engine.module)


def test_calls_of_a_list_of_layers_have_the_bits_of_stage_2(run_ranks):
    two, three = (run_ranks(2, train_by_calls, zero) for zero in (STAGE_2, STAGE_3))
    for (losses, output, weights), found in zip(two, three, strict=True):
        assert found[0] == losses
        assert torch.equal(found[1], output)
        assert same(weights, found[2])


# --- poisoned memory


@contextmanager
def poisoned(seed: int) -> Iterator[None]:
    """Released weights become NaN, in memory that stays, and gathers begin late, on each rank at other times."""
    gather, release, rng = ShardedWeights.gather, ShardedWeights.release, random.Random(seed)

    def late(self: ShardedWeights) -> Any:
        time.sleep(rng.choice((0.0, 0.0, 0.003)))
        return gather(self)

    def poison(self: ShardedWeights) -> None:
        was_whole = self.state is not WeightState.SHARDED
        release(self)
        if was_whole:
            self._whole.untyped_storage().resize_(self.nbytes)
            self._whole.detach().fill_(torch.nan)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ShardedWeights, "gather", late))
        stack.enter_context(mock.patch.object(ShardedWeights, "release", poison))
        yield


def train_poisoned(pipelines: list[dict[str, Any]]) -> list[tuple[Run, Run]]:
    results = []
    for pipeline in pipelines:
        runs = []
        for seed in (None, torch.distributed.get_rank()):
            with poisoned(seed) if seed is not None else ExitStack():
                engine = engine_of(STAGE_3, **pipeline)
                runs.append(run_steps(engine, data_of(engine), STEPS))
        results.append((runs[0], runs[1]))
    return results


def test_released_weights_are_never_read(run_ranks, full: bool):
    schedules = ["zbv", "zb-looped", "interleaved"]
    chunked = [
        {"stages": 2, "schedule": s, "num_chunks": 2, "placement": "v" if s == "zbv" else "loop"} for s in schedules
    ]
    pipelines = [*PIPELINES[2:], *chunked]
    for results in run_ranks(4, train_poisoned, pipelines if full else pipelines[1::2]):
        for (losses, norms, weights), found in results:
            assert (found[0], found[1]) == (losses, norms)
            assert same(weights, found[2])
