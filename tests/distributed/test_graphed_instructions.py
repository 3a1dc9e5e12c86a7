"""Instructions captured as CUDA graphs compute the bits that they compute without graphs. Their stand-in replays operators."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import toy
from graphed_runs import ACCUMULATION, DECODER, check, make, stand_in, train, train_plain, train_sliced
from layouts import BASE_SEED, TORCH_SEED, Run, make_engine, make_optimizer, own_iterator, run_reference, run_steps
from layouts import check as check_run
from ranks import RankError
from reference import Item, Reference
from taped_graphs import Tape, TapedGraphs
from torch import Tensor, nn

import parallel3d
from parallel3d.engine import step
from parallel3d.errors import ExecutionError
from parallel3d.failures.neighbours import place_in
from parallel3d.models import causal_lm_loss, decoder
from parallel3d.schedule.instructions import COMPUTE_OPS

MEASURED = 8  # steps of schedule "auto"
BF16 = {"bf16": {"enabled": True}}
# The scale doubles in every step; in the fourth gradients overflow.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1, "hysteresis": 1}}
CHEAP, FULL = ({"activation_checkpointing": {"policy": policy}} for policy in ("cheap", "full"))
SELECTIVE = {
    "compile": {"enabled": True, "backend": "aot_eager"},
    "activation_checkpointing": {"policy": {"Attention": "attention", "default": "cheap"}},
}


@pytest.mark.parametrize(
    ("ranks", "pp", "pipeline", "tied", "config"),
    [
        (1, 1, {"schedule": "1f1b"}, False, FP16),
        (2, 2, {"schedule": "zb-h1", "activation_checkpoint_interval": 2}, True, {}),
        (2, 2, {"schedule": "zbv", "num_chunks": 2, "placement": "v"}, False, {**BF16, **CHEAP}),
        (1, 1, {"schedule": "zb-h1"}, False, {**BF16, "fp8": {"enabled": True}}),
        (2, 1, {"schedule": "1f1b"}, True, {**BF16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500}}),
        (1, 1, {"schedule": "zb-h1"}, False, SELECTIVE),
    ],
)
def test_graphs_train_bitwise_as_without(
    run_ranks, ranks: int, pp: int, pipeline: dict[str, Any], tied: bool, config: dict[str, Any]
):
    compiled = {**config.get("compile", {}), "cuda_graphs": True}
    graphed = run_ranks(ranks, train, pp, pipeline, tied, {**config, "compile": compiled})
    plain = run_ranks(ranks, train, pp, pipeline, tied, config)
    check(graphed, plain)
    overflows = [norm for norm in plain[0][0][1] if not math.isfinite(norm)]
    assert len(overflows) == (config is FP16)


@pytest.mark.parametrize(
    ("sequence_parallel", "pipeline", "config"),
    [(True, {"schedule": "zb-h1"}, FULL), (False, {"schedule": "1f1b"}, {**BF16, "fp8": {"enabled": True}})],
)
def test_tensor_parallel_graphs_train_bitwise_as_without(
    run_ranks, sequence_parallel: bool, pipeline: dict[str, Any], config: dict[str, Any]
):
    graphed = run_ranks(2, train_sliced, sequence_parallel, pipeline, {**config, "compile": {"cuda_graphs": True}})
    check(graphed, run_ranks(2, train_sliced, sequence_parallel, pipeline, config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a CUDA device, and this is cpu; set compile.cuda_graphs to false"),
        (
            {"check_numerics": True, "zero_optimization": {"stage": 3}, **BF16},
            r"with ZeRO-3 \(zero_optimization.stage\), check_numerics; change",
        ),
        (
            {
                "tensor_parallel": {"size": 2, "sequence_parallel": True, "peer_copies": True},
                "comms_logger": {"enabled": True},
            },
            r"with copies between .* \(tensor_parallel.peer_copies\), a log of tensor-parallel collectives",
        ),
        (
            {"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True, "profile": True}},
            r"with activations on the host \(activation_checkpointing.cpu_checkpointing\), timed or synchronized",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_per_micro_batch": True}}, "with reduction in every micro-batch"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(run_ranks, config: dict[str, Any], message: str):
    with pytest.raises(RankError, match=message):
        run_ranks(config.get("tensor_parallel", {}).get("size", 1), refused, config)


def refused(config: dict[str, Any]) -> None:
    make_engine(toy.model(False), compile={"cuda_graphs": True}, **config)


def measure(file: str, loss: str) -> tuple[Run, float, bool, int, int]:
    """Train by schedule "auto", whose plan's file is given, until a step is captured and the next one replayed."""
    with mock.patch.object(step, "CudaGraphs", TapedGraphs):
        engine = make_engine(
            toy.model(False),
            toy.cross_entropy if loss == "plain" else reading,
            accumulation=2,
            pipeline={"stages": 2, "schedule": "auto", "plan": file},
            compile={"enabled": True, "backend": "eager"},
        )
    steps = (0 if engine.schedule_plan else MEASURED) + 4
    run = run_steps(engine, own_iterator(engine, [toy.micro_batch(k) for k in range(2 * steps)]), steps)
    plan, reports = engine.schedule_plan, engine.reports
    own = plan.instructions[engine.pipeline_module.stage_id]
    return run, plan.waits_for_host, reports.replays, len(engine._runner._executor._works), len(own)


def reading(output: Tensor, labels: Tensor) -> Tensor:
    return toy.cross_entropy(output, labels) * float(output.sum().item() > -1e9)


def test_schedule_auto_captures_where_the_host_is_the_limit(run_ranks, tmp_path: Path):
    """On the CPU, an instruction is done when the host has launched it."""
    file = tmp_path / "plan.json"
    ranks = run_ranks(2, measure, str(file), "plain")
    reference = Reference(toy.model(False), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
    check_run([run for run, *_ in ranks], run_reference(reference, [toy.micro_batch(k) for k in range(24)], 2), 1)
    for _, waits, replays, graphs, instructions in ranks:
        assert waits > 0.9
        assert replays
        assert graphs == instructions
    plan = json.loads(file.read_text())
    for share, most in ((0.6, True), (0.4, False)):
        file.write_text(json.dumps({**plan, "waits_for_host": share}))
        for _, waits, replays, graphs, instructions in run_ranks(2, measure, str(file), "plain"):
            assert (waits, replays, graphs) == (share, most, instructions if most else 0)


def test_schedule_auto_captures_nothing_where_graphs_of_the_compiler_break(run_ranks, tmp_path: Path):
    for _, waits, replays, graphs, _ in run_ranks(2, measure, str(tmp_path / "plan.json"), "reading"):
        assert (waits, replays, graphs) == (0.0, False, 0)


def may_capture(tensor_parallel: int) -> bool:
    engine = make(
        decoder(DECODER),
        causal_lm_loss,
        pipeline={"stages": 1, "schedule": "auto"},
        tensor_parallel={"size": tensor_parallel},
        compile={"enabled": True, "backend": "eager"},
    )
    return engine._runner.can_capture


def test_schedule_auto_captures_no_collectives(run_ranks):
    assert run_ranks(1, may_capture, 1) == [True]
    assert run_ranks(2, may_capture, 2) == [False, False]


def test_recomputed_blocks_of_a_plain_module_are_captured_unless_they_draw(run_ranks):
    graphs = {"compile": {"cuda_graphs": True}}
    ((graphed,), (plain,)) = (run_ranks(1, train_plain, 0.0, compiled) for compiled in (graphs, {}))
    assert all(map(torch.equal, graphed, plain))
    with pytest.raises(RankError, match=r"instruction B0@0: .*drawn again in a recomputation"):
        run_ranks(1, train_plain, 0.1, graphs)


class Recomputed(nn.Linear):
    """Recomputed by DeepSpeed's function, which knows no engine."""

    def forward(self, x: Tensor) -> Tensor:
        return parallel3d.checkpointing.checkpoint(super().forward, x).sin()


def train_recomputed(config: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Losses, and the number of captured instructions."""
    engine = make([Item(Recomputed, (8, 8))] * 2, nn.functional.mse_loss, **config)
    micro_batches = iter([(torch.ones(toy.SAMPLES, 8), torch.zeros(toy.SAMPLES, 8))] * 4 * ACCUMULATION)
    losses = [engine.train_batch(micro_batches) for _ in range(4)]
    return losses, len(vars(engine._runner._executor).get("_works", ()))


def test_what_deepspeeds_function_recomputes_is_captured(run_ranks):
    ((graphed, works),) = run_ranks(1, train_recomputed, {"compile": {"cuda_graphs": True}})
    ((plain, none),) = run_ranks(1, train_recomputed, {})
    assert all(map(torch.equal, graphed, plain))
    assert (works, none) == (2 * ACCUMULATION, 0)


def freeze_later(config: dict[str, Any]) -> list[Tensor]:
    """Weights of the first linear layer after each of eight steps; it is frozen after the fourth."""
    with mock.patch.object(step, "CudaGraphs", TapedGraphs):
        engine = make_engine([Item(nn.Linear, (8, 8)), Item(nn.Linear, (8, 8))], nn.functional.mse_loss, **config)
    weights = []
    for k in range(8):
        engine.pipeline_module.layers["0"].requires_grad_(k < 4)
        engine.train_batch(iter([(torch.ones(toy.SAMPLES, 8), torch.zeros(toy.SAMPLES, 8))]))
        weights += [p.detach().clone() for p in engine.pipeline_module.parameters()]
    return weights


def test_parameters_frozen_after_the_capture_stay_as_they_are(run_ranks):
    ((graphed,), (plain,)) = (run_ranks(1, freeze_later, {"compile": {"cuda_graphs": c}}) for c in (True, False))
    assert all(map(torch.equal, graphed, plain))
    assert torch.equal(plain[16], plain[28])


class Tuned(nn.Linear):
    """Reads a number on the host at the first call with a shape, as where kernels are tuned. Long inputs use its bias alone."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.seen: set[torch.Size] = set()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape not in self.seen:
            self.seen.add(x.shape)
            float(x.sum())
        return nn.functional.linear(x, self.weight, self.bias if x.shape[1] > 4 else None)


def train_lengths(lengths: list[list[int]], moves: bool, config: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    """Losses and weights, and the number of graphs replayed in each step.

    lengths: of the micro-batches of each step. moves: whether state leaves the device after the fifth.
    """
    torch.compiler.reset()
    torch.manual_seed(TORCH_SEED)
    with stand_in():
        engine = make_engine(
            [Item(Tuned, (8, 8)), Item(Tuned, (8, 8))], nn.functional.mse_loss, accumulation=len(lengths[0]), **config
        )
    losses, numbers, replay = [], [], Tape.replay
    for own in lengths:
        data = iter([(torch.ones(toy.SAMPLES, n, 8), torch.zeros(toy.SAMPLES, n, 8)) for n in own])
        with mock.patch.object(Tape, "replay", autospec=True, side_effect=replay) as replays:
            losses.append(engine.train_batch(data))
        numbers.append(replays.call_count)
        if len(losses) == 5 and moves:
            engine.offload_states(pin_memory=False)
            engine.reload_states()
    return [t.detach().clone() for t in (*losses, *engine.pipeline_module.parameters())], numbers


def compare_lengths(run_ranks: Any, lengths: list[list[int]], moves: bool = False) -> list[int]:
    """The number of graphs replayed in each step, whose numbers are the same as without graphs."""
    ((graphed, numbers),), ((plain, _),) = (
        run_ranks(1, train_lengths, lengths, moves, {"compile": {"cuda_graphs": graphs}}) for graphs in (True, False)
    )
    assert all(map(torch.equal, graphed, plain))
    return numbers


def train_interrupted(directory: str, config: dict[str, Any]) -> list[Tensor]:
    """Losses of steps and evaluations; in between the number of micro-batches changes and a checkpoint is loaded."""
    engine = make(toy.model(False, dropout=0.2), pipeline={"stages": 1, "schedule": "zb-h1"}, **config)
    losses = []
    for k, number in enumerate((4, 4, 4, 4, 2, 4, 2, 2, 2, 2, 4)):
        data = [toy.micro_batch(4 * k + m) for m in range(number)]
        losses.append(engine.train_batch(iter(data)))
        losses.append(engine.eval_batch(iter(data), num_micro_batches=number))
        if k == 2:
            engine.save_checkpoint(directory)
        if k in (5, 8):
            engine.load_checkpoint(directory)
    return losses


@pytest.mark.parametrize("config", [{}, {**BF16, "fp8": {"enabled": True}}])
def test_graphs_go_on_after_evaluations_short_steps_and_loads(run_ranks, tmp_path: Path, config: dict[str, Any]):
    ((graphed,), (plain,)) = (
        run_ranks(1, train_interrupted, str(tmp_path / str(graphs)), {**config, "compile": {"cuda_graphs": graphs}})
        for graphs in (True, False)
    )
    assert all(map(torch.equal, graphed, plain))


class FailsOnce(nn.Linear):
    """Fails in its backward, after the linear's own, at the third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = super().forward(nn.functional.dropout(x, 0.2))
        if self.calls == 3:
            y.register_hook(fail)
        return y


def fail(_: Tensor) -> None:
    raise ValueError("once")


def train_after_a_failure(config: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Losses of the steps that didn't fail, and the number of graphs that the last one replayed."""
    torch.manual_seed(TORCH_SEED)
    with stand_in():
        engine = make_engine([Item(nn.Linear, (8, 8)), Item(FailsOnce, (8, 8))], nn.functional.mse_loss, **config)
    losses = []
    for k in range(8):
        data = iter([(torch.ones(toy.SAMPLES, 8), torch.zeros(toy.SAMPLES, 8))])
        if k == 2:
            with pytest.raises(ExecutionError, match=r"instruction B0@0: .*once"):
                engine.train_batch(data)
            continue
        with mock.patch.object(Tape, "replay", autospec=True, side_effect=Tape.replay) as replays:
            losses.append(engine.train_batch(data))
    return losses, replays.call_count


def test_a_training_goes_on_after_a_failure_in_a_capture(run_ranks):
    ((graphed, replays),), ((plain, none),) = (
        run_ranks(1, train_after_a_failure, {"compile": {"cuda_graphs": graphs}}) for graphs in (True, False)
    )
    assert all(map(torch.equal, graphed, plain))
    assert (replays, none) == (2, 0)


def test_only_shapes_that_have_run_before_are_captured(run_ranks):
    assert compare_lengths(run_ranks, [[4, 4], [4, 4], [6, 6], [6, 6]]) == [0, 0, 0, 4]


def test_graphs_are_made_anew_for_other_shapes_that_stay(run_ranks):
    assert compare_lengths(run_ranks, [[4]] * 3 + [[6]] * 4) == [0, 0, 2, 0, 0, 2, 2]
    assert compare_lengths(run_ranks, [[4, 6]] * 3 + [[6, 4]] * 4) == [0, 0, 4, 0, 0, 4, 4]


def test_graphs_are_made_anew_where_state_has_left_the_device(run_ranks):
    assert compare_lengths(run_ranks, [[4]] * 9, moves=True) == [0, 0, 2, 2, 2, 0, 0, 2, 2]


def test_gradients_of_other_parameters_than_were_captured_are_refused(run_ranks):
    with pytest.raises(RankError, match="gradients to other parameters than a CUDA graph expects"):
        run_ranks(1, train_lengths, [[6, 6]] * 3 + [[4, 6]], False, {"compile": {"cuda_graphs": True}})


def fail_in_the_fourth_replay() -> tuple[str, str, str]:
    """What instruction that is, the error, and the instruction that a watchdog of this rank would have named."""
    engine = make(toy.model(False), pipeline={"stages": 1, "schedule": "zb-h1"}, compile={"cuda_graphs": True})
    data, places, number = iter([toy.micro_batch(k) for k in range(100)]), [], 0
    activity, find = engine.process_groups.activity, engine._runner.programs.get

    def replay(tape: Tape) -> None:
        nonlocal number
        number += 1
        if number == 4:
            places.append(place_in(activity.slots, 0, find))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        replayed(tape)

    for _ in range(3):
        engine.train_batch(data)
    replayed = Tape.replay
    with mock.patch.object(Tape, "replay", replay), pytest.raises(ExecutionError) as caught:
        engine.train_batch(data)
    fourth = [i for i in find(ACCUMULATION, True).instructions[0] if i.op in COMPUTE_OPS][3]
    return str(fourth), str(caught.value), str(places[0])


def test_a_failure_in_a_replay_names_instruction_and_layers(run_ranks):
    ((wanted, error, place),) = run_ranks(1, fail_in_the_fourth_replay)
    layers = ", ".join(map(str, range(len(toy.model(False)))))
    assert f"rank 0, stage 0, micro-batch {wanted[1]}, instruction {wanted}: RuntimeError: CUDA error" in error
    assert error.endswith(f"encountered, in the CUDA graph of layers {layers}")
    assert place == wanted
