"""Optimizers by name: which class with which settings, what is refused, and which of them shards leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parallel3d.ops.adagrad import DeepSpeedCPUAdagrad
from parallel3d.ops.adam import DeepSpeedCPUAdam, FusedAdam
from parallel3d.ops.lion import DeepSpeedCPULion, FusedLion
from torch import Tensor, nn

from parallel3d.comm.collectives import Group
from parallel3d.errors import ConfigError
from parallel3d.optim import Lion, build_optimizer
from parallel3d.parameters import ParameterInfo
from parallel3d.zero.buckets import Bucket, make_buckets
from parallel3d.zero.optimizer import ShardedOptimizer, check_optimizer
from parallel3d.zero.policy import ZeroPolicy

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def parameters(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


@pytest.mark.parametrize(
    ("name", "params", "cls", "settings"),
    [
        ("Adam", {}, torch.optim.AdamW, ADAM),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {**ADAM, "weight_decay": 0.1}),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),
        ("AdamW", {"lr": 2e-4, "betas": [0.9, 0.95]}, torch.optim.AdamW, {**ADAM, "lr": 2e-4, "betas": (0.9, 0.95)}),
        ("ADAMW", {"adam_w_mode": False, "torch_adam": False}, torch.optim.AdamW, ADAM),
        ("AdamW", {"bias_correction": True, "set_grad_none": False, "fp32_optimizer_states": True}, torch.optim.AdamW, {}),
        ("AdamW", {"amsgrad": True, "foreach": True}, torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0}),
        ("Adagrad", {"fp32_optimizer_states": True, "amsgrad": False}, torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-10}),
        ("Lion", {"set_grad_none": True}, Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
        ("rmsprop", {"alpha": 0.9}, torch.optim.RMSprop, {"alpha": 0.9}),
        ("nadam", {}, torch.optim.NAdam, {"lr": 2e-3}),
        ("RAdam", {}, torch.optim.RAdam, {}),
        ("adafactor", {"d": 2.0}, torch.optim.Adafactor, {"d": 2.0}),
        ("Muon", {"momentum": 0.9}, torch.optim.Muon, {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_names_in_any_case_make_their_class(name: str, params: dict[str, Any], cls: type, settings: dict[str, Any]):
    optimizer = build_optimizer(name, parameters((2, 3)), params)
    assert type(optimizer) is cls
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings


@pytest.mark.parametrize(
    ("make", "given", "cls", "same"),
    [
        (DeepSpeedCPUAdam, {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        (DeepSpeedCPUAdam, {"adamw_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        (DeepSpeedCPUAdam, {"amsgrad": True, "betas": (0.5, 0.6)}, torch.optim.AdamW,
         {"amsgrad": True, "betas": (0.5, 0.6), "weight_decay": 0.0}),
        (FusedAdam, {"set_grad_none": False, "weight_decay": 0.1, "eps": 1e-3}, torch.optim.AdamW,
         {"weight_decay": 0.1, "eps": 1e-3}),
        (FusedAdam, {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        (DeepSpeedCPUAdagrad, {"adamw_mode": False}, torch.optim.Adagrad, {}),  # as accelerate calls it
        (DeepSpeedCPUAdagrad, {"eps": 1e-3, "weight_decay": 0.1}, torch.optim.Adagrad, {"eps": 1e-3, "weight_decay": 0.1}),
        (DeepSpeedCPULion, {"weight_decay": 0.1}, Lion, {"weight_decay": 0.1}),
        (FusedLion, {"betas": (0.5, 0.6), "set_grad_none": False}, Lion, {"betas": (0.5, 0.6)}),
    ],
)  # fmt: skip
def test_deepspeeds_optimizers_are_torchs(make: Any, given: dict[str, Any], cls: type, same: dict[str, Any]):
    ours, theirs = parameters((2, 3), (4,)), parameters((2, 3), (4,))
    optimizers = [make(iter(ours), **given), cls(theirs, **same)]
    assert type(optimizers[0]) is cls
    assert all(isinstance(optimizer, (make, str)) for optimizer in optimizers)
    assert not isinstance(torch.optim.SGD(theirs), make)
    check_optimizer(optimizers[0], partitioned=True)
    for step in range(3):
        for p in (*ours, *theirs):
            p.grad = (step + 1) * p.detach() ** 2 - step
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (DeepSpeedCPUAdam, {"bias_correction": False}, "bias_correction can only be true"),
        (FusedAdam, {"bias_correction": False}, "bias_correction can only be true"),
        (DeepSpeedCPUAdam, {"fp32_optimizer_states": False}, "fp32_optimizer_states can only be true"),
        (DeepSpeedCPUAdagrad, {"fp32_optimizer_states": False}, "fp32_optimizer_states can only be true"),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}, "amsgrad can only be false"),
        (DeepSpeedCPULion, {"fp32_optimizer_states": False}, "fp32_optimizer_states can only be true"),
        (FusedLion, {"lr": -1.0}, "lr must not be negative"),
    ],
)
def test_arguments_of_deepspeeds_optimizers_that_change_the_rule_are_refused(
    make: Any, given: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        make(parameters((2, 3)), **given)


def test_every_class_of_torch_optim_is_made_or_refused_for_a_reason():
    names = [n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    assert len(names) > 12
    for name in set(names) - {"Optimizer"}:
        if name in ("LBFGS", "SparseAdam"):
            with pytest.raises(
                ConfigError, match=f"'{name}' (evaluates the model several|takes sparse gradients alone)"
            ):
                build_optimizer(name, parameters((2, 3)), {})
        elif name not in ("Adam", "AdamW"):
            assert type(build_optimizer(name, parameters((2, 3)), {})) is getattr(torch.optim, name)


def test_groups_keep_their_own_settings_whatever_iterates_over_them():
    first, second = parameters((2, 3), (3,))
    groups = [{"params": iter([first]), "weight_decay": 0.5}, {"params": second, "lr": 7.0}]
    optimizer = build_optimizer("Lion", iter(groups), {"lr": 0.1})
    found = [(g["params"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert [(lr, decay) for _, lr, decay in found] == [(0.1, 0.5), (7.0, 0.0)]
    assert found[0][0][0] is first
    assert found[1][0][0] is second


def test_a_rank_without_parameters_gets_an_optimizer_of_nothing():
    for name in ("AdamW", "Lion", "Muon", "Adagrad"):
        optimizer = build_optimizer(name, [], {})
        optimizer.step()
        assert [group["params"] for group in optimizer.param_groups] == [[]]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("AdmaW", {}, r"'AdmaW' is not one of ASGD, .*Lion.*pass your own optimizer to initialize\. Did you mean 'AdamW'"),
        ("Optimizer", {}, "'Optimizer' is not one of"),
        ("OneBitAdam", {}, "'OneBitAdam' is not yet supported; the nearest that is: 'Adam'"),
        ("ZeroOneAdam", {}, "not yet supported; the nearest that is: 'Adam'"),
        ("OneBitLamb", {}, "not yet supported; the nearest that is: 'AdamW'"),
        ("lamb", {}, "not yet supported; the nearest that is: 'AdamW'"),
        ("MuAdam", {}, "not yet supported; the nearest that is: 'Adam'"),
        ("MuSGD", {}, "not yet supported; the nearest that is: 'SGD'"),
        ("AdamW", {"step_size": 1}, r"params of AdamW: there is no 'step_size'; it takes lr, betas.*torch_adam"),
        ("SGD", {"momentun": 1}, r"there is no 'momentun'; it takes lr, momentum.*Did you mean 'momentum'"),
        ("SGD", {"adam_w_mode": True}, r"there is no 'adam_w_mode'; it takes lr"),
        ("Adam", {"max_grad_norm": 1.0}, r"there is no 'max_grad_norm': set gradient_clipping"),
        ("AdamW", {"learning_rate": 1e-3}, r"there is no 'learning_rate': its name is 'lr'"),
        ("Adam", {"freeze_step": 100}, r"there is no 'freeze_step': it is an argument of the 1-bit optimizers"),
        ("Adam", {"bias_correction": False}, r"bias_correction can only be true here"),
        ("Lion", {"fp32_optimizer_states": False}, r"fp32_optimizer_states can only be true here"),
        ("Adagrad", {"amsgrad": True}, r"amsgrad can only be false here"),
        ("DeepSpeedCPUAdam", {}, r"'DeepSpeedCPUAdam' is not one of"),
        ("Adam", {"adam_w_mode": "yes"}, r"adam_w_mode is 'yes'; give true or false"),
        ("AdamW", {"lr": -1.0}, r"optimizer.params of AdamW don't fit it: Invalid learning rate: -1.0"),
        ("AdamW", {"lr": "1e-3"}, r"don't fit it: .*; lr is the text '1e-3', write the number 0.001"),
        ("SGD", {"lr": "10"}, r"lr is the text '10', write the number 10$"),
        ("AdamW", {"lr": None}, r"don't fit it: .* 'NoneType'; they are {'lr': None, "),
        ("AdamW", {"betas": 0.9}, r"not subscriptable; they are {'betas': 0.9, "),
        ("SGD", {"nesterov": True}, r"optimizer.params of SGD don't fit it: Nesterov momentum requires"),
        ("Lion", {"betas": [0.9, 1.5]}, r"betas must be two numbers of \[0, 1\), but are \(0.9, 1.5\)"),
        ("Lion", {"betas": [0.9]}, r"betas must be two numbers of \[0, 1\), but are \(0.9,\)"),
        ("Lion", {"lr": -0.1}, r"lr must not be negative, but is -0.1"),
        ("Lion", {"weight_decay": -0.1}, r"weight_decay must not be negative, but is -0.1"),
        ("Muon", {}, r"'Muon' updates matrices alone, but there is a parameter of shape \[3\]; pass initialize the matrices"),
    ],
)  # fmt: skip
def test_wrong_optimizers_are_refused_with_what_is_right(name: str, params: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(name, parameters((2, 3), (3,)), params)


def test_lion_is_what_its_paper_says():
    """arXiv:2302.06675, algorithm 2, element by element in numpy; a parameter without a gradient is left alone."""
    first, second, idle = parameters((4, 5), (3,), (2,), seed=1)
    groups = [{"params": [first, idle], "weight_decay": 0.3}, {"params": [second], "lr": 0.2, "betas": (0.5, 0.7)}]
    optimizer = build_optimizer("Lion", groups, {"lr": 0.05, "betas": [0.9, 0.99]})
    weights = {p: p.detach().numpy().copy() for p in (first, second, idle)}
    moments = {p: np.zeros(p.shape) for p in (first, second)}
    rules = {first: (0.05, 0.9, 0.99, 0.3), second: (0.2, 0.5, 0.7, 0.0)}
    draw = np.random.default_rng(0)
    for _ in range(6):
        for p, (lr, beta1, beta2, decay) in rules.items():
            gradient = draw.standard_normal(p.shape)
            p.grad = torch.from_numpy(gradient.copy())
            update = np.sign(beta1 * moments[p] + (1 - beta1) * gradient)
            weights[p] = weights[p] - lr * (update + decay * weights[p])
            moments[p] = beta2 * moments[p] + (1 - beta2) * gradient
        assert optimizer.step(lambda: 42.0) == 42.0
        for p, expected in weights.items():
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12)
    assert set(optimizer.state) == {first, second}
    for p, expected in moments.items():
        np.testing.assert_allclose(optimizer.state[p]["exp_avg"].numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fused_sgd_starts_the_momentum_of_late_parameters_and_skips_its_first_step(nesterov: bool):
    """Against momentum by hand. torch's own raises for the late one, and takes uninitialized memory after the skip."""
    early, late = parameters((70,), (33,))
    params = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "fused": True}
    optimizer = build_optimizer("SGD", [early, late], params)
    weights = {p: p.detach().clone() for p in (early, late)}
    moments = {p: torch.zeros_like(w) for p, w in weights.items()}
    for step in range(5):
        skipped = step == 0
        optimizer.found_inf = torch.tensor(float(skipped))
        early.grad = torch.full_like(early, torch.inf if skipped else step)
        late.grad = torch.full_like(late, -2.0 * step) if step >= 3 else None
        optimizer.step()
        for p in () if skipped else (early, late):
            if p.grad is not None:
                moments[p] = 0.9 * moments[p] + p.grad
                weights[p] -= 0.1 * (p.grad + 0.9 * moments[p] if nesterov else moments[p])
        for p, expected in weights.items():
            torch.testing.assert_close(p.detach(), expected, rtol=1e-12, atol=0)


# --- shards


TRIED = sorted(set(vars(torch.optim)) - {"Optimizer", "LBFGS", "SparseAdam"})
CLASSES = [c for n in TRIED if isinstance(c := getattr(torch.optim, n), type) and issubclass(c, torch.optim.Optimizer)]


def after_steps(cls: type[torch.optim.Optimizer], start: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    held = [nn.Parameter(t.clone()) for t in start]
    optimizer = cls(held, lr=0.05)
    for step in gradients:
        for p, gradient in zip(held, step, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in held]


@pytest.mark.parametrize("cls", [*CLASSES, Lion], ids=lambda cls: cls.__name__)
def test_an_optimizer_is_accepted_on_shards_if_and_only_if_they_leave_it_alone(cls: type[torch.optim.Optimizer]):
    """By trial: a matrix whole, and the same matrix as three flat pieces with the same gradients."""
    draw = torch.Generator().manual_seed(5)
    whole = torch.randn(6, 8, generator=draw, dtype=torch.float64)
    gradients = [torch.randn(6, 8, generator=draw, dtype=torch.float64) for _ in range(4)]
    cut = [5, 30, 13]
    expected = after_steps(cls, [whole], [[g] for g in gradients])[0].flatten()
    try:
        pieces = after_steps(cls, list(whole.flatten().split(cut)), [list(g.flatten().split(cut)) for g in gradients])
        elementwise = torch.allclose(torch.cat(pieces), expected, rtol=1e-12, atol=0)
    except ValueError:  # Muon wants matrices
        elementwise = False
    optimizer = cls([nn.Parameter(whole)])
    check_optimizer(optimizer, partitioned=False)
    if elementwise:
        check_optimizer(optimizer, partitioned=True)
    else:
        for allow_untested in (False, True):
            with pytest.raises(ConfigError, match=f"{cls.__name__} works on whole tensors.*zero_optimization.stage 0"):
                check_optimizer(optimizer, partitioned=True, allow_untested=allow_untested)


def test_unknown_optimizers_are_refused_on_shards_unless_they_or_the_user_say_they_may():
    class Mine(torch.optim.SGD):
        pass

    class AdamW(torch.optim.AdamW):
        """A name proves nothing."""

    class Declared(Mine):
        elementwise = True

    for cls in (Mine, AdamW):
        optimizer = cls(parameters((2, 3)))
        check_optimizer(optimizer, partitioned=False)
        with pytest.raises(
            ConfigError, match=f"{cls.__name__} is not known to be elementwise.*elementwise = True or set"
        ):
            check_optimizer(optimizer, partitioned=True)
        with pytest.warns(UserWarning, match=f"{cls.__name__} gets shards.*weights now depend on the layout"):
            check_optimizer(optimizer, partitioned=True, allow_untested=True)
    check_optimizer(Declared(parameters((2, 3))), partitioned=True)


@pytest.mark.parametrize("partitioned", [False, True])
def test_an_optimizer_that_evaluates_the_model_is_refused_everywhere(partitioned: bool):
    with pytest.raises(ConfigError, match=r"LBFGS evaluates the model within its step.*use AdamW"):
        check_optimizer(torch.optim.LBFGS(parameters((2, 3))), partitioned, allow_untested=True)


def buckets_of(held: list[nn.Parameter], ranks: int, rank: int, weight_dtype: torch.dtype | None) -> list[Bucket]:
    infos = [ParameterInfo(f"layers.{k}.weight", p, (0,)) for k, p in enumerate(held)]
    partition = Group(tuple(range(ranks)), None)
    return make_buckets(infos, ZeroPolicy(int(ranks > 1), 70, weight_dtype), partition, rank if ranks > 1 else 0)


@pytest.mark.parametrize("weight_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_state_from_before_sharding_is_cut_with_its_parameter(ranks: int, weight_dtype: torch.dtype | None):
    """Adagrad holds state from the start, and any optimizer may have stepped before."""
    shapes = [(5, 9), (), (7,), (40,)]
    held = [nn.Parameter(p.detach().float()) for p in parameters(*shapes)]
    whole = torch.optim.Adagrad(held, initial_accumulator_value=0.25)
    for p in held:
        p.grad = torch.full_like(p, 2.0) + p.detach()
    whole.step()
    sums = {k: whole.state[p]["sum"].clone() for k, p in enumerate(held)}
    for p in held:
        p.grad = None
    found: dict[int, list[Tensor]] = {k: [] for k in range(len(shapes))}
    for rank in range(ranks):
        copies = [nn.Parameter(p.detach().clone()) for p in held]
        optimizer = torch.optim.Adagrad(copies, initial_accumulator_value=0.25)
        for old, new in zip(held, copies, strict=True):
            optimizer.state[new] = {key: value.clone() for key, value in whole.state[old].items()}
        buckets = buckets_of(copies, ranks, rank, weight_dtype)
        place = {p: k for k, p in enumerate(copies)}
        ShardedOptimizer(optimizer, buckets, copies)
        shards = [shard for bucket in buckets for shard in bucket.shards]
        assert set(optimizer.state) == {shard.master for shard in shards}, "nothing is kept of what is not updated here"
        steps = [optimizer.state[shard.master]["step"] for shard in shards]
        assert all(step == 1.0 for step in steps)
        assert len({step.data_ptr() for step in steps}) == len(steps), "each shard counts its own steps"
        for shard in shards:
            state = optimizer.state[shard.master]["sum"]
            assert (state.shape, state.dtype) == (shard.master.shape, torch.float32)
            found[place[shard.info.parameter]].append(state.flatten())
    for k, expected in sums.items():
        assert torch.equal(torch.cat(found[k]), expected.flatten())
