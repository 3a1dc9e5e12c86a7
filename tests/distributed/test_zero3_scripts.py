"""ZeRO-3 of any module as scripts use it: generation, DeepSpeed's names, parameters of other modules, compilation."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hf_models import transformers
from ranks import RankError
from reference import distance
from test_zero3_plain import (
    BLOCKS,
    WIDTH,
    Block,
    compare,
    ids_of,
    language_loss,
    llama,
    make,
    on_one_process,
    shuffled,
    shuffling,
    train,
    whole_weights,
)
from torch import Tensor, nn

import parallel3d
from parallel3d.deepspeed.runtime import partition_parameters
from parallel3d.errors import ConfigError, ExecutionError

# --- generation


def lengths(replica: int) -> dict[str, Any]:
    length = 3 + 4 * replica
    return {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}


def generate_and_train() -> Any:
    """Generate other lengths on each replica: on demand in step with each other, then without DeepSpeed's hooks."""
    engine = make(llama())
    ids = ids_of(0, 0)[:1]
    engine.eval()
    on_demand = engine.module.generate(ids, synced_gpus=True, **lengths(engine.global_rank))
    held = engine.update.units.live if engine.update.units is not None else 0
    with parallel3d.zero.GatheredParameters(engine.parameters()):
        number = remove_hooks(engine)
        gathered = engine.module.generate(ids, **lengths(engine.global_rank))
        add_hooks(engine)
    with parallel3d.deepspeed.runtime.zero.unwrap_model_for_generation(engine) as unwrapped:
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in unwrapped.module.modules())
        assert unwrapped.module.generate(ids, **lengths(engine.global_rank)).equal(gathered)
    engine.train()
    added = len(engine.optimizer.parameter_offload.forward_hooks)
    found = train_on(engine, 2)
    return on_demand.tolist(), held, gathered.tolist(), number, added, found


def train_on(engine: Any, steps: int) -> dict[str, Tensor]:
    for step in range(steps):
        engine.backward(language_loss(engine, step, engine.global_rank))
        engine.step()
    return whole_weights(engine)


def remove_hooks(engine: Any) -> int:
    """Do to the engine what TRL does before it generates; returns the number of hooks."""
    offload = engine.optimizer.parameter_offload
    assert offload.module is engine.module
    for _, parameter in itertools.chain(offload.module.named_parameters(), offload.module.ds_external_parameters()):
        parameter.ds_active_sub_modules.clear()
    hooks = [*offload.forward_hooks, *offload.backward_hooks]
    for hook in hooks:
        hook.remove()
    offload.forward_hooks, offload.backward_hooks = [], []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in engine.module.modules())
    return len(hooks)


def add_hooks(engine: Any) -> None:
    offload = engine.optimizer.parameter_offload
    offload._register_deepspeed_module(offload.module)


@pytest.mark.parametrize("dp", [1, 2])
def test_replicas_generate_other_lengths_on_demand_and_without_hooks(run_ranks, dp: int):
    transformers()
    model = llama().eval()
    wanted = on_one_process(llama(), 2, language_loss, dp)
    for replica, (on_demand, held, gathered, number, added, found) in enumerate(run_ranks(dp, generate_and_train)):
        made = model.generate(ids_of(0, 0)[:1], **lengths(replica)).tolist()
        assert on_demand == made
        assert gathered == made
        assert held == 0, "nothing stays gathered after the last token"
        assert number == added
        assert (number > 0) == (dp > 1)
        compare(found, wanted)


def generate_unsynced() -> None:
    engine = make(llama())
    engine.module.generate(ids_of(0, 0)[:1], **lengths(engine.global_rank))
    engine.backward(language_loss(engine, 0, engine.global_rank))


def test_a_replica_that_generates_more_is_told_the_remedy(run_ranks):
    transformers()
    with pytest.raises(RankError, match="replicas call layers in different orders") as caught:
        run_ranks(2, generate_unsynced)
    for text in caught.value.tracebacks.values():
        assert "synced_gpus=True" in text
        assert "model.embed_tokens" in text


# --- names


def test_names_that_transformers_and_trl_import():
    found = partition_parameters
    assert parallel3d.runtime.zero.partition_parameters is found
    assert found.ZeroParamStatus.NOT_AVAILABLE is not found.ZeroParamStatus.AVAILABLE
    assert found.Init is parallel3d.zero.Init
    assert found.GatheredParameters is parallel3d.zero.GatheredParameters
    assert found.get_accelerator() is parallel3d.get_accelerator()
    assert found._orig_torch_arange is torch.arange
    assert found.zero_wrapper_for_fp_tensor_constructor(torch.ones, torch.half) is torch.ones


def copy_as_scripts_do(parameter: nn.Parameter) -> Tensor:
    """Copy a weight to save it, as the scripts of FastChat and LLaVA do."""
    if hasattr(parameter, "ds_id"):
        with parallel3d.zero.GatheredParameters([parameter]):
            return parameter.data.detach().cpu().clone()
    return parameter.detach().cpu().clone()


def copy_and_reload(threshold: int, zero: dict[str, Any]) -> Any:
    """Also this rank's elements of each weight, if it is sharded, before and after Init's shards became the engine's."""
    with parallel3d.zero.Init():
        model = shuffling()
    inside = {name: p.ds_tensor.clone() for name, p in model.named_parameters()}
    engine = make(model, {"stage3_param_persistence_threshold": threshold, **zero})
    sharded = {name: p.ds_tensor.clone() for name, p in model.named_parameters() if hasattr(p, "ds_tensor")}
    copies = {name: copy_as_scripts_do(p) for name, p in model.named_parameters()}
    with parallel3d.zero.GatheredParameters(
        [*model.parameters(), None]
    ):  # as transformers gives a bias that isn't there
        model.load_state_dict(copies)  # the same values: no change to lose
    return copies, inside, sharded, whole_weights(engine)


@pytest.mark.parametrize("threshold", [0, 10_000])
@pytest.mark.parametrize("zero", [{}, {"offload_param": {"device": "cpu"}}])
def test_scripts_that_ask_for_ds_id_copy_whole_weights(run_ranks, threshold: int, zero: dict[str, Any]):
    wanted = dict(shuffling().named_parameters())
    ranks = run_ranks(2, copy_and_reload, threshold, zero)
    for copies, _, _, loaded in ranks:
        assert copies.keys() == loaded.keys() == wanted.keys()
        assert all(torch.equal(copies[name], value) for name, value in wanted.items())
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())
    for which, names in (1, wanted), (2, wanted if threshold == 0 else ()):
        assert all(ranks[k][which].keys() == dict.fromkeys(names).keys() for k in range(2))
        for name in names:
            assert torch.cat([ranks[k][which][name] for k in range(2)])[: wanted[name].numel()].equal(
                wanted[name].view(-1)
            )


PARTS = ["0.weight", "0.bias", "2.weight"]


def halved() -> nn.Sequential:
    """A model of which each rank has a part of the first weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, 1))
    model[2].bias.requires_grad_(False)
    return model


def halved_loss(module: Any, step: int, replica: int) -> Tensor:
    return module(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))).square().mean()


def read_and_write_parts(zero: dict[str, Any]) -> Any:
    utils = parallel3d.utils
    module = halved()
    frozen = module[2].bias
    engine = make(module, zero)
    chosen = [module.get_parameter(name) for name in PARTS]
    assert [get(frozen) for get in (utils.safe_get_local_grad, utils.safe_get_full_fp32_param)] == [None, None]
    engine.backward(halved_loss(engine, 0, engine.global_rank))
    gradients = [utils.safe_get_local_grad(p) for p in chosen]
    engine.step()
    masters = [utils.safe_get_local_fp32_param(p) for p in chosen]
    moments = [utils.safe_get_local_optimizer_state(p, "exp_avg") for p in chosen]
    for p, master in zip(chosen, masters, strict=True):
        utils.safe_set_local_fp32_param(p, torch.full_like(master, 0.5 + engine.global_rank))
        utils.safe_set_local_optimizer_state(p, torch.zeros_like(master), "exp_avg")
    written = whole_weights(engine)
    engine.backward(halved_loss(engine, 1, engine.global_rank))
    for p, master in zip(chosen[:2], masters, strict=False):
        utils.safe_set_local_grad(p, torch.zeros_like(master))
    utils.safe_update_full_grad_vectorized([chosen[2], frozen], lambda gradient, _: torch.zeros_like(gradient))
    engine.step()
    last = [utils.safe_get_local_fp32_param(p) for p in chosen]
    with pytest.raises(ConfigError, match=f"has {len(last[0])} elements of 0.weight, but the value has 7"):
        utils.safe_set_local_fp32_param(chosen[0], torch.zeros(7))
    return gradients, masters, moments, [written[name] for name in PARTS], last


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 3}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}])
def test_each_rank_reads_and_writes_its_part_of_a_parameters_state(run_ranks, zero: dict[str, Any]):
    model = halved()
    chosen = [model.get_parameter(name) for name in PARTS]
    optimizer = torch.optim.AdamW(chosen, lr=1e-3, eps=1e-6, weight_decay=0.01)
    for replica in range(2):
        (halved_loss(model, 0, replica) / 2).backward()
    optimizer.step()
    first, second = run_ranks(2, read_and_write_parts, zero)
    for k, p in enumerate(chosen):
        wanted = p.grad, p.detach(), optimizer.state[p]["exp_avg"]
        for own, other, right in zip(first[:3], second[:3], wanted, strict=True):
            assert distance(torch.cat([own[k], other[k]]), right.view(-1)) < 1e-5
        half = torch.cat([torch.full_like(first[1][k], 0.5), torch.full_like(second[1][k], 1.5)])
        assert all(torch.equal(written[k].view(-1), half) for written in (first[3], second[3]))
        # No gradient and no moment: weight decay alone.
        assert torch.allclose(torch.cat([first[4][k], second[4][k]]), half * (1 - 1e-5), rtol=1e-6)
    assert 0 < len(first[1][0]) < 3 * WIDTH**2


class Skipping(nn.Module):
    """Builds layers without initial values, which torch does on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.utils.skip_init(nn.TransformerEncoderLayer, WIDTH, 2)


def build_skipping() -> list[tuple[int, int]]:
    with parallel3d.zero.Init():
        model = Skipping()
    return [(p.untyped_storage().nbytes(), p.ds_tensor.numel()) for p in model.parameters()]


def test_layers_without_initial_values_are_sharded_inside_init(run_ranks):
    wanted = [(4, -(-p.numel() // 2)) for p in Skipping().parameters()]
    assert run_ranks(2, build_skipping) == [wanted, wanted]


def initialize_with_other_data(shape: tuple[int, ...]) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with parallel3d.zero.Init():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.double()  # placeholders of another dtype
    model[0].weight.data = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ExecutionError) as caught:
        parallel3d.initialize(model=model, config=config)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(WIDTH, WIDTH), (2 * WIDTH, WIDTH)])
def test_values_put_into_data_after_init_are_not_lost_in_silence(run_ranks, shape: tuple[int, ...]):
    """As resize_token_embeddings of transformers puts them there, which doesn't know of the shards unless it is told."""
    for message in run_ranks(2, initialize_with_other_data, shape):
        assert f"a parameter of shape {list(shape)} was written while it lived as shards" in message


def train_by_three_engines(stage: int) -> tuple[list[float], int, int]:
    """The losses, the number of hooks that the model has more with the last engine than with the first, and of its tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[0].requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    losses, hooks, tensors = [], [], 0
    for _ in range(3):
        engine, *_ = parallel3d.initialize(model=model, config=config)
        hooks.append(sum(len(module._forward_pre_hooks) for module in model.modules()))
        for _ in range(2):
            loss = engine(torch.ones(1, WIDTH)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        with parallel3d.zero.GatheredParameters(model.parameters()):
            tensors = len(model.state_dict())
        engine.destroy()
    return losses, hooks[-1] - hooks[0], tensors


def test_engines_of_one_model_follow_each_other(run_ranks):
    """Each gathers its own weights alone."""
    assert run_ranks(2, train_by_three_engines, 3) == run_ranks(2, train_by_three_engines, 0)


# --- parameters of other modules


class Lending(nn.Module):
    """Modules use parameters of others: of a block, of a bare layer, and inside torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = x @ self.head.weight + self.blocks[1].second.bias
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x).square().mean()


def lending() -> nn.Module:
    torch.manual_seed(2)
    return Lending()


def lent(module: Any, step: int, replica: int) -> Tensor:
    return module(torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica)))


def train_lending() -> Any:
    module = lending()
    trained = train(module, 4, lent)
    return trained, type(copy.deepcopy(module.head)._parameters)


def test_a_parameter_of_another_module_is_gathered_when_it_is_used(run_ranks):
    wanted = on_one_process(lending(), 4, lent, 2)
    for (found, peak, whole, live), copied in run_ranks(2, train_lending):
        assert copied is dict
        compare(found, wanted)
        assert live == 0
        assert peak < whole


# --- compilation


def train_compiled(kind: str) -> Any:
    """Also the numbers of compiled blocks and of graphs compiled after the second step."""
    module, loss_of = (llama(), language_loss) if kind == "llama" else (shuffling(), shuffled)
    engine = make(module, compile={"enabled": True, "backend": "aot_eager"})
    graphs = 0
    for step in range(4):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
        if step < 2:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    later = torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs
    return whole_weights(engine), engine.compilation.num_layers, graphs, later


@pytest.mark.parametrize("kind", ["shuffling", "llama"])
def test_compiled_blocks_train_as_one_process_and_compile_no_more_after_two_steps(run_ranks, kind: str):
    module, loss_of, blocks = (llama(), language_loss, 2) if kind == "llama" else (shuffling(), shuffled, BLOCKS)
    wanted = on_one_process(module, 4, loss_of, 2)
    for found, number, graphs, later in run_ranks(2, train_compiled, kind):
        compare(found, wanted)
        assert number == blocks
        assert graphs > 0
        assert later == 0
