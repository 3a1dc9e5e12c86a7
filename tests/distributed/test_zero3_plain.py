"""ZeRO-3 of any module: its weights are gathered by hooks, whatever the order of its calls."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hf_models
import pytest
import torch
from hf_models import transformers
from ranks import RankError
from reference import distance
from torch import Tensor, nn
from user_configs import AUTO, FOLDER

import parallel3d
from parallel3d.config import read_source
from parallel3d.pipe import PipelineModule

WIDTH, BLOCKS = 16, 5
ZERO = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 30_000}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).tanh())


class Shuffling(nn.Module):
    """Calls its blocks in an order of the caller's, some of them twice. The root has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = x * self.scale
        for k in order:
            x = self.blocks[k](x)
        return (x * self.scale).square().mean()


class Borrowing(nn.Module):
    """One layer uses the weights of another, one of which it has in a list, and one that it declares."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.other, self.declared = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.borrower = Borrower(self.lender, self.declared)
        self.lister, self.head = Lister(self.other), Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lister(self.borrower(self.lender(x))) + self.other(x)).square().mean()


class Head(nn.Module):
    """Has its linear's bias, and returns the very tensor that the linear returns, as BERT's does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Borrower(nn.Module):
    def __init__(self, lender: nn.Linear, declared: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.borrowed = [{"weight": lender.weight}]
        self.read = lambda: declared.weight  # never run otherwise
        parallel3d.zero.register_external_parameter(self, declared.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.borrowed[0]["weight"] + self.read()) * self.scale


class Lister(nn.Module):
    """Has no parameters of its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.borrowed = (other.weight, other.bias)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, *self.borrowed)


def make(model: nn.Module, zero: dict[str, Any] | None = None, **config: Any) -> parallel3d.DeepSpeedEngine:
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01}},
        "steps_per_print": None,
        "zero_optimization": {**ZERO, **(zero or {})},
        **config,
    }
    return parallel3d.initialize(model=model, config=whole)[0]


def whole_weights(engine: parallel3d.DeepSpeedEngine) -> dict[str, Tensor]:
    with parallel3d.zero.GatheredParameters(engine.module.parameters()):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def on_one_process(model: nn.Module, steps: int, loss_of: Callable[[nn.Module, int, int], Tensor], dp: int) -> Any:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)
    for step in range(steps):
        optimizer.zero_grad()
        for replica in range(dp):
            (loss_of(model, step, replica) / dp).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert {n: d for n, w in wanted.items() if (d := distance(found[n], w)) > 1e-5} == {}


def train(
    model: nn.Module,
    steps: int,
    loss_of: Callable[[nn.Module, int, int], Tensor],
    policy: str | None = None,
    **zero: Any,
) -> Any:
    engine = make(model, zero, activation_checkpointing={"policy": policy})
    for step in range(steps):
        engine.backward(loss_of(engine, step, engine.global_rank))
        engine.step()
    units = engine.update.units
    return whole_weights(engine), units.peak, sum(units.sizes.values()), units.live


def shuffled(module: Any, step: int, replica: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(step)).tolist()
    return module(x, order[: BLOCKS - step % 2] + order[:1])


def shuffling(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Shuffling()


def train_shuffled() -> Any:
    return train(shuffling(), 20, shuffled, stage3_max_live_parameters=3_500)


def test_an_order_that_changes_from_step_to_step_trains_as_one_process(run_ranks):
    wanted = on_one_process(shuffling(), 20, shuffled, 2)
    for found, peak, whole, live in run_ranks(2, train_shuffled):
        compare(found, wanted)
        assert live == 0
        assert peak < 0.7 * whole


def train_apart() -> None:
    engine = make(shuffling())
    order = [0, 1, 2] if engine.global_rank == 0 else [0, 3, 2]
    engine(torch.ones(2, WIDTH), order)


def test_replicas_that_call_other_layers_are_told_which(run_ranks):
    with pytest.raises(
        RankError, match=r"replica \d needs the weights of blocks\.[13] and replica \d those of blocks\.[13]"
    ):
        run_ranks(2, train_apart)


def borrowing() -> nn.Module:
    torch.manual_seed(1)
    return Borrowing()


def lent(module: Any, step: int, replica: int) -> Tensor:
    return module(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica)))


def train_borrowing() -> Any:
    return train(borrowing(), 3, lent)


def test_parameters_of_other_modules_are_gathered_from_lists_and_where_they_are_declared(run_ranks):
    wanted = on_one_process(borrowing(), 3, lent, 2)
    for found, *_ in run_ranks(2, train_borrowing):
        compare(found, wanted)


class PassingBlock(Block):
    def forward(self, x: Tensor, made: Tensor | None) -> tuple[Tensor, Tensor]:
        made = self.first(x).tanh() if made is None else made
        return x + self.second(self.first(x).tanh() + made), made


class Passing(nn.Module):
    """Its blocks pass on what the first one makes, whose gradient comes when theirs are done, as T5's position bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassingBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = None
        for block in self.blocks:
            x, made = block(x, made)
        return x.square().mean()


def passing() -> nn.Module:
    torch.manual_seed(2)
    return Passing()


def train_passing() -> Any:
    engine = make(passing())
    for step in range(3):
        engine.backward(lent(engine, step, engine.global_rank))
        engine.step()
    return whole_weights(engine), engine.update.units.number


def test_a_tensor_that_blocks_pass_on_gathers_none_of_them_again(run_ranks):
    wanted = on_one_process(passing(), 3, lent, 2)
    for found, gathers in run_ranks(2, train_passing):
        compare(found, wanted)
        assert gathers == 3 * 2 * 3


@dataclass
class Wrapped:
    hidden: list[Tensor]


class WrappingBlock(Block):
    def forward(self, x: Any) -> Any:
        return Wrapped([super().forward(x.hidden[0] if isinstance(x, Wrapped) else x)])


def square(output: Wrapped, _: Any) -> Tensor:
    return output.hidden[0].square().mean()


class Wrapping(nn.Module):
    """Its blocks return objects with tensors in them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WrappingBlock() for _ in range(3))

    def forward(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return square(x, None)


def wrapping() -> Wrapping:
    torch.manual_seed(2)
    return Wrapping()


def train_wrapping(in_pipeline: bool) -> list[Tensor]:
    model: nn.Module = wrapping()
    if in_pipeline:
        model = PipelineModule(list(wrapping().blocks), num_stages=1, loss_fn=square)
    engine = make(model)
    for step in range(3):
        output = lent(engine, step, engine.global_rank)
        engine.backward(square(output, None) if in_pipeline else output)
        engine.step()
    return list(whole_weights(engine).values())


@pytest.mark.parametrize("in_pipeline", [False, True])
def test_blocks_that_return_objects_get_their_weights_for_the_backward(run_ranks, in_pipeline: bool):
    wanted = on_one_process(wrapping(), 3, lent, 2)
    for found in run_ranks(2, train_wrapping, in_pipeline):
        compare(dict(zip(wanted, found, strict=True)), wanted)


def copy_model() -> list[float]:
    """Return how far a copy of the gathered model is from one that was never sharded: its loss, gradients and weights."""
    engine = make(shuffling())
    with parallel3d.zero.GatheredParameters(engine.module.parameters()):
        copied = copy.deepcopy(engine.module)
    engine.backward(shuffled(engine, 0, engine.global_rank))
    engine.step()  # which the copy doesn't take part in
    plain, again = shuffling(), pickle.loads(pickle.dumps(copied))
    found = []
    for model in (copied, again):
        losses = [shuffled(each, 2, 0) for each in (model, plain)]
        plain.zero_grad()
        for loss in losses:
            loss.backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found += [distance(losses[0].detach(), losses[1].detach()), max(distance(a.grad, b.grad) for a, b in pairs)]
        found += [max(distance(value, plain.state_dict()[name]) for name, value in model.state_dict().items())]
    return found


def test_a_copy_of_a_gathered_model_is_a_model_of_its_own(run_ranks):
    for found in run_ranks(2, copy_model):
        assert max(found) < 1e-6


# --- Hugging Face's models, as they are


def llama(name: str = "llama") -> Any:
    return hf_models.make_model(name)


def ids_of(step: int, replica: int) -> Tensor:
    return torch.randint(0, hf_models.VOCAB, (2, 8), generator=torch.Generator().manual_seed(100 * step + replica))


def language_loss(module: Any, step: int, replica: int) -> Tensor:
    ids = ids_of(step, replica)
    return module(input_ids=ids, labels=ids).loss


def train_llama(name: str, recomputed: bool | str | None) -> tuple[Any, int]:
    """The training, and the number of calls of feed-forwards. recomputed: by a policy; or by the model, whether reentrant."""
    model, calls = llama(name), Counter[str]()
    for module in model.modules():
        if type(module).__name__.endswith("MLP"):
            module.register_forward_pre_hook(lambda *_: calls.update(["MLP"]))
    if isinstance(recomputed, bool):
        model.gradient_checkpointing_enable({"use_reentrant": recomputed})
        model.train()
    trained = train(model, 3, language_loss, recomputed if isinstance(recomputed, str) else None)
    return trained, calls["MLP"] // (3 * model.config.num_hidden_layers)


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [("llama", None), ("llama", "cheap"), ("llama", True), ("llama-tied", "full"), ("gpt2", False)],
)
def test_a_hugging_face_model_trains_unmodified(run_ranks, name: str, recomputed: bool | str | None):
    transformers()
    wanted = on_one_process(llama(name), 3, language_loss, 2)
    for (found, peak, whole, live), calls in run_ranks(2, train_llama, name, recomputed):
        compare(found, wanted)
        assert live == 0
        assert peak < whole
        assert calls == (1 if recomputed is None else 2)


def generate_apart() -> list[list[int]]:
    """Each replica generates another number of tokens from gathered weights, then training goes on."""
    engine = make(llama())
    with parallel3d.zero.GatheredParameters(engine.module.parameters()):
        made = engine.module.generate(
            ids_of(0, 0)[:1],
            max_new_tokens=3 + 4 * engine.global_rank,
            min_new_tokens=3 + 4 * engine.global_rank,
            do_sample=False,
        )
    engine.backward(language_loss(engine, 0, engine.global_rank))
    engine.step()
    return made.tolist()


def test_replicas_that_generate_different_lengths_all_finish(run_ranks):
    transformers()
    model = llama().eval()
    for replica, found in enumerate(run_ranks(2, generate_apart)):
        length = 3 + 4 * replica
        wanted = model.generate(ids_of(0, 0)[:1], max_new_tokens=length, min_new_tokens=length, do_sample=False)
        assert found == wanted.tolist()


# --- users' configurations of stage 3 with offload


def train_by_file(name: str) -> Any:
    """Batch sizes, and values for "auto", come from the caller."""
    _, given = read_source(FOLDER / name)
    config = {**given, "train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    config["zero_optimization"] = {**config["zero_optimization"], "stage3_max_live_parameters": 30_000}
    model = llama().train()
    sharded = {"zero_optimization.stage3_param_persistence_threshold": 0}
    own = None if config.get("optimizer") else torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = parallel3d.initialize(model=model, config=config, auto={**AUTO[name], **sharded}, optimizer=own)
    losses = []
    for _ in range(8):
        loss = language_loss(engine, 0, engine.global_rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    offloads = [str(w.message) for w in caught if "offload" in str(w.message)]
    on_device = engine.reports.memory_report()[engine.global_rank]["weights"]
    return losses, engine.update.units.peak, engine.update.policy.stage, offloads, on_device


@pytest.mark.parametrize("name", ["zero3_offload_auto_bf16.json", "zero3_offload_fp16.json"])
def test_a_users_configuration_of_stage_3_trains_a_llama(run_ranks, name: str):
    transformers()
    for losses, peak, stage, offloads, on_device in run_ranks(2, train_by_file, name):
        assert losses[-1] < losses[0]
        assert stage == 3
        assert 0 < peak <= 30_000
        assert not offloads, "all is carried out"
        assert on_device == (0, 0)


# --- a part of a block that a script has gathered


def train_while_gathered(name: str) -> tuple[bool, bool, set[str]]:
    """Whether a block's weights are in several buckets, whether the gathered one stays whole, and the states afterwards."""
    engine = make(shuffling(), {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 600})
    block = engine.module.blocks[1]
    weight = block.get_parameter(name)
    with parallel3d.zero.GatheredParameters(weight):
        before = weight.detach().clone()
        engine.backward(shuffled(engine, 0, engine.global_rank))
        stays = torch.equal(weight, before)
    buckets = {id(vars(p)["sharded_weights"]) for p in block.parameters()}
    return len(buckets) > 1, stays, {vars(p)["ds_status"].name for p in engine.module.parameters()}


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_what_a_script_has_gathered_of_a_block_stays_and_the_rest_leaves(run_ranks, name: str):
    assert run_ranks(2, train_while_gathered, name) == [(True, True, {"SHARDED"})] * 2


# --- the whole state of a parameter


def read_and_write_state(zero: dict[str, Any]) -> Any:
    utils = parallel3d.utils
    engine = make(shuffling(), zero)
    weight = engine.module.blocks[1].first.weight
    before = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    engine.backward(shuffled(engine, 0, engine.global_rank))
    gradient = utils.safe_get_full_grad(weight)
    engine.step()
    master, moment = utils.safe_get_full_fp32_param(weight), utils.safe_get_full_optimizer_state(weight, "exp_avg")
    utils.safe_set_full_optimizer_state(weight, torch.zeros_like(master), "exp_avg")
    utils.safe_set_full_fp32_param(weight, torch.full_like(master, 0.5))
    written = whole_weights(engine)["blocks.1.first.weight"]
    cleared = utils.safe_get_full_optimizer_state(weight, "exp_avg")
    unknown = utils.safe_get_full_optimizer_state(weight, "momentum_buffer")
    engine.backward(shuffled(engine, 2, engine.global_rank))
    utils.safe_set_full_grad(weight, torch.zeros_like(master))
    engine.step()
    return before, gradient, master, moment, written, cleared, unknown, utils.safe_get_full_fp32_param(weight)


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"offload_param": {"device": "cpu"}}])
def test_the_whole_state_of_a_parameter_is_read_and_written(run_ranks, zero: dict[str, Any]):
    model = shuffling()
    weight = model.blocks[1].first.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)
    for replica in range(2):
        (shuffled(model, 0, replica) / 2).backward()
    optimizer.step()
    for before, gradient, master, moment, written, cleared, unknown, last in run_ranks(2, read_and_write_state, zero):
        assert before is None
        assert unknown is None
        for found, wanted in ((gradient, weight.grad), (master, weight), (moment, optimizer.state[weight]["exp_avg"])):
            assert distance(found, wanted.detach()) < 1e-5
        assert (written == 0.5).all()
        assert (cleared == 0).all()
        assert torch.allclose(last, torch.full_like(last, 0.5 * (1 - 1e-5)), rtol=1e-6), (
            "no gradient and no moment: weight decay alone"
        )


def read_attributes() -> Any:
    engine = make(llama())
    parameter = engine.module.model.embed_tokens.weight
    outside = parameter.ds_status.name, tuple(parameter.ds_shape), parameter.ds_numel
    with parallel3d.zero.GatheredParameters(parameter):
        inside = parameter.ds_status is type(parameter.ds_status).AVAILABLE
    copied = pickle.loads(pickle.dumps(parameter))
    return outside, inside, copied.isnan().all().item(), engine._zero3_consolidated_16bit_state_dict()


def test_parameters_have_deepspeeds_attributes_and_rank_0_gets_all_weights(run_ranks):
    wanted = llama()
    shape = wanted.model.embed_tokens.weight.shape
    for rank, (outside, inside, copied, state) in enumerate(run_ranks(2, read_attributes)):
        assert outside == ("SHARDED", tuple(shape), shape.numel())
        assert inside
        assert copied, "a copy has what the placeholder has, and not the shards"
        if rank:
            assert state is None
        else:
            assert state.keys() == wanted.state_dict().keys()
            assert all(torch.equal(state[name], value) for name, value in wanted.state_dict().items())


# --- zero.Init


def train_made_inside(name: str, zero: dict[str, Any]) -> Any:
    """The model is built on each rank from another seed; the first rank's values count."""
    torch.manual_seed(7 + parallel3d.comm.get_rank())
    with parallel3d.zero.Init(config_dict_or_path={"zero_optimization": {**ZERO, **zero}}):
        model = Shuffling() if name == "shuffling" else llama_of_config()
    inside = [p.untyped_storage().nbytes() for p in model.parameters()]
    with parallel3d.zero.GatheredParameters(model.parameters()):
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss_of = shuffled if name == "shuffling" else language_loss
    return start, max(inside), *train(model, 3, loss_of, **zero)


def llama_of_config() -> Any:
    hf = transformers()
    kind, settings = hf_models.CONFIGS["llama"]
    return hf.LlamaForCausalLM(getattr(hf, kind)(**settings))


@pytest.mark.parametrize(("name", "world"), [("shuffling", 2), ("llama", 2), ("llama", 1)])
def test_a_model_built_inside_init_is_sharded_and_trains_as_its_whole_self(run_ranks, name: str, world: int):
    model = shuffling() if name == "shuffling" else llama()
    zero = {"offload_param": {"device": "cpu"}} if world == 1 else {}
    ranks = run_ranks(world, train_made_inside, name, zero)
    start = ranks[0][0]
    model.load_state_dict(start, strict=False)
    wanted = on_one_process(model, 3, shuffled if name == "shuffling" else language_loss, world)
    for same, largest, found, _, _, live in ranks:
        assert largest <= 4, "each parameter is a placeholder of one element"
        assert all(torch.equal(same[key], value) for key, value in start.items())
        assert all(bool(value.isfinite().all()) for value in start.values())
        compare(found, wanted)
        assert live == 0


def fill_from_the_first_rank() -> Any:
    """As transformers reads a state dict into a model that was built in Init."""
    torch.manual_seed(1)
    with parallel3d.zero.Init():
        model = Shuffling()
    state = shuffling(9).state_dict()
    for prefix, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        with parallel3d.zero.GatheredParameters(own, modifier_rank=0):
            if parallel3d.comm.get_rank() == 0:
                module._load_from_state_dict(state, f"{prefix}." if prefix else "", {}, True, [], [], [])
    return train(model, 3, shuffled)[0]


def test_a_state_dict_is_read_on_the_first_rank_alone(run_ranks):
    wanted = on_one_process(shuffling(9), 3, shuffled, 2)
    for found in run_ranks(2, fill_from_the_first_rank):
        compare(found, wanted)
