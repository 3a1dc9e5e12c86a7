"""Layers chosen to be recomputed are, no others are, and no number changes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import (
    BASE_SEED,
    TORCH_SEED,
    Run,
    check,
    enter_layer,
    make_optimizer,
    own_iterator,
    run_reference,
    run_steps,
    specs,
)
from ranks import RankError
from reference import Item, Reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import parallel3d
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.comm.environment import get_world_size
from parallel3d.errors import ConfigError
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.pipe.calls import policy_rule
from parallel3d.schedule.instructions import COMPUTE_OPS

HIDDEN, STEPS, ACCUMULATION = 8, 2, 3
CALLS: Counter[int] = Counter()


class Embed(nn.Module):
    def __init__(self, k: int):
        super().__init__()
        self.k, self.table = k, nn.Embedding(7, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        CALLS[self.k] += 1
        return self.table(ids)


class Block(nn.Module):
    """rate: of its dropout."""

    def __init__(self, k: int, rate: float):
        super().__init__()
        self.k, self.linear, self.dropout = k, nn.Linear(HIDDEN, HIDDEN), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self.k] += 1
        return x + torch.tanh(self.dropout(self.linear(x)))


class Head(Block):
    pass


def items(rate: float) -> list[Item]:
    return [Item(Embed, (0,)), *(Item(Block, (k, rate)) for k in range(1, 7)), Item(Head, (7, rate))]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def micro_batch(g: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(g)
    return torch.randint(7, (2, 3), generator=generator), torch.randn(2, 3, HIDDEN, generator=generator)


def odd_blocks(k: int, layer: nn.Module) -> bool:
    return isinstance(layer, Block) and layer.k == k and k % 2 == 1


def train(arguments: dict[str, Any], rate: float, dp: int, changes: dict[str, Any]) -> tuple[Run, dict[int, int]]:
    """Numbers and forward calls a layer of STEPS steps. arguments: of the module; changes: of the configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "steps_per_print": None,
        **changes,
    }
    pipeline = {"stages": 1, **config.pop("pipeline", {})}
    config["pipeline"] = pipeline
    module = PipelineModule(
        specs(items(rate)), loss_fn=squares, seed_layers=True, base_seed=BASE_SEED, config=config, **arguments
    )
    torch.manual_seed(TORCH_SEED)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    CALLS.clear()
    iterator = own_iterator(engine, [micro_batch(g) for g in range(STEPS * ACCUMULATION * dp)])
    return run_steps(engine, iterator, STEPS), dict(CALLS)


def wanted(rate: float, dp: int) -> Run:
    reference = Reference(items(rate), squares, make_optimizer("SGD"), base_seed=BASE_SEED, enter=enter_layer)
    return run_reference(reference, [micro_batch(g) for g in range(STEPS * ACCUMULATION * dp)], ACCUMULATION * dp)


CHOICES: list[tuple[dict[str, Any], dict[str, Any], set[int]]] = [
    ({}, {}, set()),
    ({"activation_checkpoint_interval": 3}, {}, set(range(8))),
    ({"checkpointable_layers": ["Block"]}, {}, set(range(1, 7))),
    ({"checkpointable_layers": ["Block"], "activation_checkpoint_interval": 0}, {}, set()),
    ({}, {"checkpointable_layers": "^Emb|Head", "activation_checkpoint_interval": 2}, {0, 7}),
    ({}, {"checkpointable_layers": ["Head", "Block"], "activation_checkpoint_interval": 4}, set(range(1, 8))),
    ({"checkpointable_layers": odd_blocks}, {}, {1, 3, 5, 7}),
    ({}, {"policy": {"Block": "cheap", "Head": "none", "default": "full"}}, set(range(7))),
    ({"checkpointable_layers": ["Block", "Head"]}, {"policy": {"Head": "attention", "Embed": "full"}}, {7}),
]


@pytest.mark.parametrize(
    ("arguments", "pipeline", "recomputed"), CHOICES, ids=lambda value: str(value).split(" at ")[0]
)
def test_exactly_the_chosen_layers_run_twice_with_the_same_masks(
    run_ranks, arguments: dict[str, Any], pipeline: dict[str, Any], recomputed: set[int]
):
    pipeline = dict(pipeline)
    section = {"policy": pipeline.pop("policy", None)}
    changes = {"pipeline": pipeline, "activation_checkpointing": section}
    ((run, calls),) = run_ranks(1, train, arguments, 0.3, 1, changes)
    check([run], wanted(0.3, 1), 1)
    forwards = STEPS * ACCUMULATION
    assert calls == {k: forwards * (2 if k in recomputed else 1) for k in range(8)}


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
@pytest.mark.parametrize(
    "section", [{}, {"cpu_checkpointing": True, "partition_activations": True, "profile": True}], ids=str
)
def test_recomputation_under_zero_2_and_split_backwards(run_ranks, schedule: str, section: dict[str, Any]):
    pipeline = {
        "stages": 2,
        "schedule": schedule,
        "checkpointable_layers": "Block",
        "activation_checkpoint_interval": 2,
    }
    changes = {
        "pipeline": pipeline,
        "activation_checkpointing": section,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 100},
    }
    ranks = run_ranks(4, train, {}, 0.0, 2, changes)
    check([run for run, _ in ranks], wanted(0.0, 2), 2)
    total = sum((Counter(calls) for _, calls in ranks), Counter())
    forwards = STEPS * ACCUMULATION * 2
    assert total == {k: forwards * (2 if 1 <= k <= 6 else 1) for k in range(8)}


def train_with_own_function() -> tuple[dict[int, int], dict[int, int], bool]:
    """Forward calls without and with a function of the user's, and whether the configuration's was used without."""
    section = {"activation_checkpointing": {"profile": True}, "pipeline": {"activation_checkpoint_interval": 1}}
    module = PipelineModule(specs(items(0.0)), num_stages=1, loss_fn=squares, config={"pipeline": section["pipeline"]})
    engine, *_ = parallel3d.initialize(
        model=module, config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **section}
    )
    checkpointer = engine.module.activation_checkpoint_func
    used = isinstance(checkpointer, Checkpointer) and checkpointer.settings.profile
    plain = train({"activation_checkpoint_func": lambda function, x: function(x)}, 0.0, 1, section)[1]
    return plain, train({"activation_checkpoint_func": Checkpointer()}, 0.0, 1, section)[1], used


def test_a_function_of_the_users_runs_the_groups(run_ranks):
    ((plain, recomputing, configured),) = run_ranks(1, train_with_own_function)
    forwards = STEPS * ACCUMULATION
    assert plain == dict.fromkeys(range(8), forwards)
    assert recomputing == dict.fromkeys(range(8), 2 * forwards)
    assert configured


class Adding(nn.Module):
    """Layer of a pair, the second of which it adds to its linear's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.linear(x[0]) + x[1], x[1]


def gradients_of_pairs(activation_checkpoint_func: Callable[..., Any] | None) -> list[Tensor]:
    """Gradients of layers whose activations are pairs."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), lambda x: (x, 2 * x), LayerSpec(Adding), LayerSpec(Adding), lambda x: x[0]]
    module = PipelineModule(
        layers,
        num_stages=1,
        activation_checkpoint_interval=1,
        activation_checkpoint_func=activation_checkpoint_func,
        checkpointable_layers=["Adding"],
    )
    module(torch.ones(2, 4)).square().sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def test_a_function_of_the_users_gets_each_tensor_of_a_pair():
    # Reentrant recomputation differentiates by its own arguments alone.
    reentrant = gradients_of_pairs(partial(checkpoint, use_reentrant=True))
    assert all(map(torch.equal, reentrant, gradients_of_pairs(None)))


Memory = dict[str, tuple[int, int]]


def train_decoder(
    schedule: Any, policy: Any, budget: float | None, compiled: bool = False, **pipeline: Any
) -> tuple[list[float], list[str], dict[int, int], list[list[str]], Memory]:
    """Losses, and of this rank the policies of its layers, what each layer holds, the first program, and its memory.

    Of schedule "auto" it is the memory of the planned program.
    """
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "pipeline": {"stages": get_world_size(), "schedule": schedule, "partition": "uniform", **pipeline},
        "activation_checkpointing": {"policy": policy, "memory_budget": budget},
        "compile": {"enabled": compiled, "backend": "aot_eager", "layers": ["Block"]},
    }
    sizes = DecoderConfig(vocab_size=32, hidden_size=32, ffn_size=80, num_layers=6, num_heads=4, max_positions=64)
    tokens = torch.randint(32, (2, 65), generator=torch.Generator().manual_seed(0))
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    sample = {"sample_input": inputs, "sample_labels": labels}
    module = PipelineModule(decoder(sizes), loss_fn=causal_lm_loss, seed_layers=True, config=config, **sample)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    data = own_iterator(engine, [(inputs, labels)] * 9 * ACCUMULATION)
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    program = engine._runner.programs.get(ACCUMULATION, training=True)
    lists = [[str(i) for i in rank if i.op in COMPUTE_OPS] for rank in program.instructions]
    while schedule == "auto" and engine.schedule_plan is None:
        engine.train_batch(data)
    engine.reports.profile_next_batch("memory")
    losses.append(float(engine.train_batch(data)))
    rule = policy_rule(None, module.policies, module.layer_names)
    policies = [rule(k, None) for chunk in module.own_chunks for k in module.partition.layers(chunk)]
    held = {k: nbytes for (k,), _, nbytes in engine.reports.layer_memory()[module.groups.rank]}
    return losses, policies, held, lists, engine.reports.memory_report()[module.groups.rank]


@pytest.mark.parametrize(("ranks", "schedule"), [(1, "1f1b"), (2, "zb-h1")])
def test_auto_fits_its_budget_and_changes_no_number(run_ranks, ranks: int, schedule: str):
    """In a pipeline, without what gloo holds of messages until the batch ends."""

    def most(report: Memory) -> int:
        return report["backward"][1] if ranks == 1 else report["steady"][1] + report["activations"][1]

    plain = run_ranks(ranks, train_decoder, schedule, "none", None)
    budget = 0.9 * max(most(report) for *_, report in plain)
    policy = "auto" if ranks == 1 else {"Block": "auto", "TokenEmbedding": "full"}
    chosen = run_ranks(ranks, train_decoder, schedule, policy, budget / 2**30)
    assert [losses for losses, *_ in chosen] == [losses for losses, *_ in plain]
    embedding, *blocks, _, _ = [own for _, policies, *_ in chosen for own in policies]
    assert embedding == ("none" if ranks == 1 else "full")
    assert len(set(blocks)) > 1
    assert 0.75 * budget < max(most(report) for *_, report in chosen) <= budget
    with pytest.raises(RankError, match=r'"auto" traces the layers on a sample.* pass sample_input='):
        run_ranks(ranks, train, {}, 0.0, 1, {"activation_checkpointing": {"policy": "auto", "memory_budget": 1}})


def warning_of_auto(budget: float, **pipeline: Any) -> str:
    with redirect_stderr(StringIO()) as told:
        train_decoder("1f1b", "auto", budget, **pipeline)
    return told.getvalue()


def test_auto_says_what_to_do_where_nothing_fits(run_ranks):
    assert run_ranks(1, warning_of_auto, 1.0) == [""]
    (told,) = run_ranks(1, warning_of_auto, 1e-6)
    assert told.startswith("recomputation for 1e-06 GiB:\nstage 0: layers ")
    assert "more than the budget" in told
    assert "raise activation_checkpointing.memory_budget" in told
    # An interval of 0 recomputes nothing, whatever the policy.
    assert run_ranks(1, partial(warning_of_auto, activation_checkpoint_interval=0), 1e-6) == [""]


def test_schedule_auto_chooses_policies_and_program_for_one_budget(run_ranks):
    train, budget = partial(train_decoder, num_chunks=2, placement="v"), 2.6 * 2**20
    chosen = run_ranks(2, train, "auto", "auto", budget / 2**30)
    assert max(report["steady"][1] + report["activations"][1] for *_, report in chosen) <= budget
    assert len({policy for _, policies, *_ in chosen for policy in policies}) > 1
    plain = run_ranks(2, train, chosen[0][3], "none", None)
    assert [losses[:2] for losses, *_ in chosen] == [losses[:2] for losses, *_ in plain]


def test_the_report_tells_what_each_layer_holds_under_its_policy(run_ranks):
    policy = {"Block": "cheap", "1": "full", "2": "none", "3": "attention"}
    ((_, policies, held, *_),) = run_ranks(1, train_decoder, "1f1b", policy, None)
    assert policies == ["none", "full", "none", "attention", "cheap", "cheap", "cheap", "none", "none"]
    element, products = (
        2 * 64 * 4,
        5 * 32 + 2 * 80,
    )  # bytes of one a position; input, queries, keys, values, sum, gate and up
    wanted = {1: 32, 3: products, 4: products + 32 + 4}
    assert {k: held[k] // element for k in wanted} == wanted
    assert held[2] > held[4] == held[5]
    ((_, _, compiled, *_),) = run_ranks(1, train_decoder, "1f1b", {"Block": "cheap"}, None, True)
    assert compiled[4] // element == wanted[4]


def bench() -> tuple[list[dict[str, Any]], list[str]]:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))
    import recomputation
    from planned_run import model_of

    model = model_of("tiny", {"bf16": {"enabled": True}})
    rows = recomputation.measure(model, recomputation.Workload("tiny", 64, 2, 4, 1, 1), "eager", False)
    return rows, recomputation.verdicts(rows)


def test_the_benchmark_measures_what_is_predicted(run_ranks):
    ((rows, verdicts),) = run_ranks(1, bench)
    held = {row["policy"]: row["gib"] for row in rows if row["policy"] != "auto"}
    assert held == pytest.approx({p: row["predicted_gib"] for p, row in zip(held, rows, strict=False)}, rel=0.03)
    assert held["none"] > held["cheap"] > held["attention"] > held["full"] > 0
    assert all(len(row["ms"]) == 1 for row in rows)
    cheap, roomy, tight = verdicts
    assert cheap.startswith(f"eager cheap: bytes of none {held['cheap'] / held['none']:.3f} (")
    for row, verdict, best in zip(rows[4:], (roomy, tight), ("(cheap|attention|full)", "full"), strict=True):
        assert re.match(rf"eager auto: GiB [\d.]+ \(limit [\d.]+\), time of {best} ", verdict)
        assert len(row["policies"]) > 1


def refusal(arguments: dict[str, Any], pipeline: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        train(arguments, 0.0, 1, {"pipeline": pipeline})
    return str(caught.value)


def test_a_choice_that_fits_nothing_or_is_made_twice_is_refused(run_ranks):
    (message,) = run_ranks(1, partial(refusal, {}, {"checkpointable_layers": ["Blok"]}))
    assert "Did you mean 'Block'?" in message
    (message,) = run_ranks(1, partial(refusal, {"checkpointable_layers": ["Head"]}, {"checkpointable_layers": "Block"}))
    assert "give it once" in message
