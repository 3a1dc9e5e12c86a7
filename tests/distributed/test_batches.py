"""Batches: trained or evaluated, short, uneven, with unusual contents; and the sources of their data."""

from __future__ import annotations

from collections import UserDict, deque, namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import toy
from layouts import (
    BASE_SEED,
    Run,
    check,
    copies,
    make_engine,
    make_optimizer,
    own_iterator,
    run_reference,
    run_steps,
    specs,
)
from ranks import RankError
from reference import Item, Reference, distance
from torch import Tensor, nn
from torch.utils.data import Dataset
from toy import HIDDEN

import parallel3d
from parallel3d.errors import ConfigError, DataError, Parallel3DError
from parallel3d.pipe import LayerSpec, PipelineModule, ProcessTopology

# The `pipeline` sections that most tests run under: stages alone, several chunks, and both ends on one rank.
PIPELINES = [
    {"stages": 4},
    {"stages": 2, "schedule": "interleaved", "num_chunks": 2},
    {"stages": 2, "schedule": "gpipe", "num_chunks": 2, "placement": "v"},
]


def reference(items: Sequence[Item], loss_fn: Callable[..., Tensor] = toy.cross_entropy) -> Reference:
    return Reference(items, loss_fn, make_optimizer("SGD"), base_seed=BASE_SEED)


# Evaluation


class Noisy(nn.Module):
    """Dropout, and statistics that only training may move."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(hidden)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.norm(x.flatten(0, 1)).view_as(x))


def noisy_model() -> list[Item]:
    items = toy.model(tied=True, num_blocks=2)
    return [items[0], Item(Noisy, (HIDDEN,)), *items[1:7], Item(Noisy, (HIDDEN,)), *items[7:]]


def train_with_evaluations(pipeline: dict[str, Any], evaluate: bool) -> tuple[Run, list[Tensor], list[Any]]:
    torch.manual_seed(5)
    engine = make_engine(noisy_model(), accumulation=3, pipeline=pipeline)
    iterator = own_iterator(engine, [toy.micro_batch(g) for g in range(3 * 3 * 2)])
    seen = []

    def evaluation(number: int, **options: Any) -> None:
        if evaluate:
            times = len(seen) % 3 + 1  # as many samples as in training, then more
            batches = [tuple(t.repeat(times, 1) for t in toy.micro_batch(1000 + g)) for g in range(number * 2)]
            fresh = own_iterator(engine, batches)
            modes = [module.training for module in engine.module.modules()]
            seen.append(engine.eval_batch(fresh, num_micro_batches=number, **options))
            assert [module.training for module in engine.module.modules()] == modes

    losses, norms = [], []
    for step in range(3):
        evaluation((1, 5, 3)[step])
        evaluation((5, 1, 3)[step], return_logits=True)
        evaluation(2, compute_loss=False)
        evaluation(7, reduce_output=None, bcast_loss=False)
        losses.append(engine.train_batch(iterator).item())
        norms.append(engine.get_global_grad_norm().item())
    next(iter(engine.module.layers.values())).eval()  # the user's own choice
    evaluation(4)
    return (losses, norms, copies(engine.module)), [b.clone() for b in engine.module.buffers()], seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_evaluation_changes_nothing_in_training(run_ranks, pipeline: dict[str, Any]):
    n = 4
    without = run_ranks(n, train_with_evaluations, pipeline, False)
    evaluated = run_ranks(n, train_with_evaluations, pipeline, True)
    for (run, buffers, _), (other_run, other_buffers, seen) in zip(without, evaluated, strict=True):
        assert run[:2] == other_run[:2]
        assert run[2].keys() == other_run[2].keys()
        assert all(torch.equal(run[2][name], other_run[2][name]) for name in run[2])
        assert all(torch.equal(a, b) for a, b in zip(buffers, other_buffers, strict=True))
        assert len(seen) == 13


EVALUATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fewer": {"num_micro_batches": 1},
    "more": {"num_micro_batches": 6},
    "logits": {"return_logits": True},
    "logits alone": {"compute_loss": False},
    "own losses": {"reduce_output": None},
    "own losses and logits": {"reduce_output": None, "return_logits": True, "num_micro_batches": 2},
    "no broadcast": {"bcast_loss": False},
}
EVALUATED = [toy.micro_batch(g, "lengths") for g in range(12)]


def evaluate(pipeline: dict[str, Any]) -> tuple[dict[str, Any], int, bool]:
    engine = make_engine(toy.model(tied=False), accumulation=4, pipeline=pipeline)
    results = {name: engine.eval_batch(own_iterator(engine, EVALUATED), **o) for name, o in EVALUATIONS.items()}
    return results, engine.grid.get_data_parallel_rank(), engine.is_last_stage()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_evaluation_gives_what_its_options_ask_for(run_ranks, pipeline: dict[str, Any]):
    model = reference(toy.model(tied=False))
    losses = model.losses(EVALUATED)
    logits = [model.forward(inputs).detach() for inputs, _ in EVALUATED]

    def close(got: Sequence[Tensor], wanted: Sequence[Tensor | float]) -> bool:
        return all(distance(g, torch.as_tensor(w)) <= 1e-5 for g, w in zip(got, wanted, strict=True))

    for results, replica, is_last in run_ranks(pipeline["stages"] * 2, evaluate, pipeline):
        own = [slice(replica, 2 * m, 2) for m in range(7)]  # own[m]: this replica's first m micro-batches
        assert close([results["default"]], [sum(losses[:8]) / 8])
        assert close([results["fewer"]], [sum(losses[:2]) / 2])
        assert close([results["more"]], [sum(losses) / 12])
        assert close(results["own losses"], losses[own[4]])
        assert close([results["logits"][0]], [sum(losses[:8]) / 8])
        assert close(results["own losses and logits"][0], losses[own[2]])
        assert (results["no broadcast"] is not None) == is_last
        if is_last:
            assert close([results["no broadcast"]], [sum(losses[:8]) / 8])
            assert close(results["logits"][1], logits[own[4]])
            assert close(results["logits alone"], logits[own[4]])
            assert close(results["own losses and logits"][1], logits[own[2]])
        else:
            assert results["logits"][1] is None
            assert results["logits alone"] is None
            assert results["own losses and logits"][1] is None


def evaluate_wrongly() -> list[str]:
    engine = make_engine(toy.model(tied=False))
    engine.set_dataiterator(iter(EVALUATED))
    messages = []
    for error, options in [
        (ConfigError, {"data_iter": iter(EVALUATED), "reduce_output": "sum"}),
        (ConfigError, {"data_iter": iter(EVALUATED), "num_micro_batches": 0}),
        (DataError, {}),  # the training data are not for evaluation
    ]:
        with pytest.raises(error) as caught:
            engine.eval_batch(**options)
        messages.append(str(caught.value))
    return messages


def test_wrong_evaluations_say_what_to_do(run_ranks):
    [[output, number, data]] = run_ranks(1, evaluate_wrongly)
    assert "reduce_output is 'sum'; use 'avg', or None" in output
    assert "num_micro_batches is 0" in number
    assert "pass data_iter" in data


# Iterators


class Feed:
    """An iterator that ends, and goes on when it is filled up."""

    def __init__(self, items: Sequence[Any]):
        self.left = deque(items)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.popleft()


# Micro-batches that each of the 2 x 2 ranks can give at first; replicas alternate.
UNEVEN = [6, 7, 9, 8]
STREAM = [toy.micro_batch(g) for g in range(2 * 10)]


def train_on_uneven(pipeline: dict[str, Any]) -> tuple[Run, float]:
    engine = make_engine(toy.model(tied=True), accumulation=4, pipeline=pipeline)
    own = STREAM[engine.grid.get_data_parallel_rank() :: 2]
    feed = Feed(own[: UNEVEN[engine.global_rank]])
    losses, norms = [], []

    def step() -> None:
        losses.append(engine.train_batch(feed).item())
        norms.append(engine.get_global_grad_norm().item())

    step()
    step()  # a short one: rank 0 has two left
    for _ in range(2):
        with pytest.raises(StopIteration):
            engine.train_batch(feed)
    feed.left.extend(own[UNEVEN[engine.global_rank] :])
    evaluated = engine.eval_batch(feed, num_micro_batches=1).item()  # of the several that some ranks have left over
    step()
    if engine.is_first_stage() or engine.is_last_stage():
        assert not feed.left
    assert (engine.global_steps, engine.global_samples) == (3, 2 * toy.SAMPLES * 9)
    return (losses, norms, copies(engine.module)), evaluated


@pytest.mark.parametrize("pipeline", PIPELINES[1:], ids=str)
def test_uneven_iterators_make_short_batches_and_lose_nothing(run_ranks, pipeline: dict[str, Any]):
    ranks = run_ranks(4, train_on_uneven, pipeline)
    model = reference(toy.model(tied=True))
    steps = [model.step(STREAM[:8]), model.step(STREAM[8:12])]
    evaluated = sum(model.losses(STREAM[12:14])) / 2
    steps.append(model.step(STREAM[14:20]))
    wanted = [loss for loss, _ in steps], [norm for _, norm in steps], model.weights()
    check([run for run, _ in ranks], wanted, dp=2)
    assert all(abs(got - evaluated) <= 1e-5 * evaluated for _, got in ranks)


def exhaust(num_micro_batches: int) -> tuple[int, float]:
    engine = make_engine(toy.model(tied=False), accumulation=4, pipeline={"stages": 4})
    iterator = own_iterator(engine, STREAM[:num_micro_batches])
    while True:
        try:
            engine.train_batch(iterator)
        except StopIteration:
            return engine.global_steps, float(next(iter(copies(engine.module).values())).sum())


@pytest.mark.parametrize(("num_micro_batches", "steps"), [(0, 0), (3, 1), (4, 1), (9, 3)])
def test_every_rank_stops_when_the_data_end(run_ranks, num_micro_batches: int, steps: int):
    assert [done for done, _ in run_ranks(4, exhaust, num_micro_batches)] == [steps] * 4


class Faulty(Feed):
    """Raises an exception that it contains, once."""

    def __next__(self) -> Any:
        item = super().__next__()
        if isinstance(item, Exception):
            raise item
        return item


def train_after_a_fault(faulty_rank: int, evaluation: bool) -> tuple[Run, str]:
    engine = make_engine(toy.model(tied=False), accumulation=4, pipeline={"stages": 2})
    own: list[Any] = STREAM[engine.grid.get_data_parallel_rank() :: 2]
    if engine.global_rank == faulty_rank:
        own = [*own[:2], OSError("the disk is gone"), *own[2:]]
    feed = Faulty(own)
    with pytest.raises(Exception, match=r".") as caught:
        engine.eval_batch(feed) if evaluation else engine.train_batch(feed)
    assert isinstance(caught.value, OSError if engine.global_rank == faulty_rank else DataError)
    return run_steps(engine, feed, 2), str(caught.value)


@pytest.mark.parametrize(("faulty_rank", "evaluation"), [(0, False), (3, True)])
def test_a_loader_that_fails_on_one_rank_is_an_error_on_all_and_loses_nothing(
    run_ranks, faulty_rank: int, evaluation: bool
):
    ranks = run_ranks(4, train_after_a_fault, faulty_rank, evaluation)
    for rank, (_, message) in enumerate(ranks):
        assert ("the disk is gone" if rank == faulty_rank else f"ranks [{faulty_rank}] could not load") in message
    check([run for run, _ in ranks], run_reference(reference(toy.model(tied=False)), STREAM[:16], 8), dp=2)


class Unprintable:
    def __repr__(self) -> str:
        raise DataError("it can't be printed")


def give_wrong_data() -> dict[str, str]:
    wrong = {
        "pass an iterator": STREAM,
        "pass data_iter": None,
        "must be (inputs, labels), not Tensor": iter([torch.zeros(2)]),
        "must be (inputs, labels), not tuple": iter([(1, 2, 3)]),
        "it can't be printed": iter([((torch.zeros(2), Unprintable()), torch.zeros(2))]),  # so it has no signature
    }
    engine = make_engine(toy.model(tied=False), pipeline={"stages": 2})
    messages = {}
    for hint, data in wrong.items():
        with pytest.raises(DataError) as caught:
            engine.train_batch(data if engine.is_first_stage() else iter(STREAM))
        messages[hint] = str(caught.value)
    return messages


def test_wrong_data_on_one_rank_are_explained_on_all(run_ranks):
    first, last = run_ranks(2, give_wrong_data)
    for hint, message in first.items():
        assert hint in message
        assert "ranks [0] could not load" in last[hint]


# The loader that `initialize` makes


class Samples(Dataset):
    """Sample k is the k-th of `STREAM`'s single samples; its number travels along as a label."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, k: int) -> tuple[Tensor, tuple[Tensor, int]]:
        ids, labels = toy.micro_batch(k)
        return ids[0], (labels[0], k)


SEEN: list[list[int]] = []


def noting_loss(output: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    SEEN.append(labels[1].tolist())
    return toy.cross_entropy(output, labels[0])


NUM_SAMPLES, GLOBAL_BATCH = 20, 12


def train_on_dataset(pp: int, dp: int, seed: int, drop_last: bool) -> tuple[list[float], list[list[list[int]]], int]:
    """Return losses, the samples of each micro-batch of each step on this rank, and the length of the loader."""
    config = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": 2,
        "seed": seed,
        "dataloader_drop_last": drop_last,
        "dataloader_shuffle": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"stages": pp},
    }
    module = PipelineModule(specs(toy.model(tied=False)), loss_fn=noting_loss, seed_layers=True, config=config)
    engine, _, loader, _ = parallel3d.initialize(model=module, config=config, training_data=Samples(NUM_SAMPLES))
    losses, steps = [], []
    for _ in range(5):
        SEEN.clear()
        losses.append(engine.train_batch().item())
        steps.append(list(SEEN))
    return losses, steps, len(loader)


def in_global_order(replicas: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    return [micro_batch for together in zip(*replicas, strict=True) for micro_batch in together]


def test_steps_see_the_same_samples_in_every_layout(run_ranks):
    """Over epochs' ends too, of which a step never holds two."""
    [[losses, steps, length]] = run_ranks(1, train_on_dataset, 1, 1, 7, False)
    assert length == 2 * 6
    for epoch in (steps[0] + steps[1], steps[2] + steps[3]):
        samples = [k for micro_batch in epoch for k in micro_batch]
        assert samples[NUM_SAMPLES:] == samples[: 24 - NUM_SAMPLES]  # filled up from the epoch's start
        assert sorted(samples[:NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert steps[0] + steps[1] != steps[2] + steps[3]
    for pp, dp in [(1, 2), (1, 3), (2, 1), (2, 3)]:
        ranks = run_ranks(pp * dp, train_on_dataset, pp, dp, 7, False)
        for step in range(5):
            assert in_global_order([own[step] for _, own, _ in ranks[-dp:]]) == steps[step]
        for own, _, _ in ranks:
            assert all(abs(a - b) <= 1e-5 * b for a, b in zip(own, losses, strict=True))


def test_the_seed_fixes_the_order_and_drop_last_leaves_short_steps_out(run_ranks):
    [[_, steps, _]] = run_ranks(1, train_on_dataset, 1, 1, 7, False)
    [[_, again, _]] = run_ranks(1, train_on_dataset, 1, 1, 7, False)
    [[_, other, _]] = run_ranks(1, train_on_dataset, 1, 1, 8, False)
    assert steps == again != other
    [[_, dropped, length]] = run_ranks(1, train_on_dataset, 1, 1, 7, True)
    assert length == 6
    assert dropped[0] == steps[0]
    assert len({k for micro_batch in dropped[1] for k in micro_batch}) == GLOBAL_BATCH


# Weights


def initial_weights(pipeline: dict[str, Any], seed: int | None) -> dict[str, Tensor]:
    if seed is None:
        torch.manual_seed(torch.distributed.get_rank())  # of no matter for layers seeded by base_seed
        return copies(make_engine(toy.model(tied=True), pipeline=pipeline).module)
    torch.manual_seed(seed)
    before = torch.random.get_rng_state()
    config = {"pipeline": pipeline}
    module = PipelineModule(specs(toy.model(tied=True)), loss_fn=toy.cross_entropy, config=config)
    assert torch.equal(torch.random.get_rng_state(), before), "building the module draws no random number"
    return copies(module)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(("pipeline", "dp"), [({"stages": 1}, 3), *[(p, 1) for p in PIPELINES], (PIPELINES[1], 2)])
def test_initial_weights_are_bitwise_those_of_one_process(
    run_ranks, pipeline: dict[str, Any], dp: int, seed: int | None
):
    ranks = run_ranks(pipeline["stages"] * dp, initial_weights, pipeline, seed)
    items = toy.model(tied=True)
    wanted = Reference(
        items, toy.cross_entropy, make_optimizer("SGD"), 0, BASE_SEED if seed is None else seed
    ).weights()
    assert set().union(*ranks) == set(wanted)
    for own in ranks:
        assert all(torch.equal(copy, wanted[name]) for name, copy in own.items())


def weights_of_unlike_seeds() -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    return copies(PipelineModule(specs(toy.model(tied=True)), num_stages=2, loss_fn=toy.cross_entropy))


def test_copies_start_equal_even_if_ranks_are_seeded_unlike(run_ranks):
    ranks = run_ranks(4, weights_of_unlike_seeds)
    for name in set().union(*ranks):
        one, *others = [own[name] for own in ranks if name in own]
        assert others
        assert all(torch.equal(other, one) for other in others)


# Odd things between stages


def squares(output: Any, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


Pair = namedtuple("Pair", ["x", "y"])


class Line(nn.Linear):
    """A linear layer that passes on what comes with its input."""

    def forward(self, state: Any) -> Any:
        if isinstance(state, Tensor):
            return super().forward(state)
        x, *rest = state
        made = (super().forward(x), *rest)
        return Pair(*made) if isinstance(state, Pair) else made


class FrozenLine(Line):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.requires_grad_(False)


class Branch(nn.Module):
    """x -> x and other forms of it, made as the class attribute `how` says."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: Any) -> Any:
        x = state if isinstance(state, Tensor) else state[0]
        y = self.inner(x)
        return {
            "no gradient": (y, y.detach() * 2, torch.ones(3)),
            "unused": (y, torch.tanh(y), y[:0], y.sum()),
            "twice": (y, y),
            "input": (y, x),
            "named": Pair(y, {"deep": [None, (torch.tanh(y), "text", 2.5, True)]}),
            "dtypes": (
                y,
                (y > 0),
                (y * 9).to(torch.int8),
                y.bfloat16(),
                y.double(),
                torch.complex(y, -y),
                y.half().sum(),
            ),
            "views": (y.transpose(0, 1), y[..., ::2], y[0, 0].expand(3, HIDDEN)),
            # Tensors whose values are not yet those in memory: torch conjugates and negates when it next computes with them.
            "conjugates": (y, torch.complex(y, 2 * y).conj(), torch.complex(y, y).mean().conj().imag),
            "nothing passes": (y.detach(), torch.zeros(0, 5)),
            "times": (y * state[1], state[1] + 1) if not isinstance(state, Tensor) else None,
            "a parameter": (y, self.inner.weight),
        }[self.how]


class Join(nn.Module):
    """Output of `Branch` -> x."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: Any) -> Any:
        x = state[0]
        match self.how:
            case "no gradient":
                x = x + state[1] + state[2].sum()
            case "twice":
                x = x + torch.tanh(state[1])
            case "input":
                x = x * torch.sigmoid(state[1])
            case "named":
                x = state.x + state.y["deep"][1][0] * state.y["deep"][1][2]
            case "dtypes":
                _, mask, byte, brain, double, number, half = state
                x = (
                    x * mask
                    + byte * 0.01
                    + brain.float()
                    + double.float()
                    + number.imag
                    + number.abs()
                    + half.float() * 0.1
                )
            case "views":
                x = x.transpose(0, 1) + state[1].repeat_interleave(2, -1) + state[2].mean(0)
            case "conjugates":
                x = x + state[1].conj().imag + state[2]  # the gradient that goes back is conjugated too
            case "a parameter":
                x = x @ state[1]
            case "nothing passes":
                assert state[1].shape == (0, 5)
            case "times":
                x = x * state[1]
        return self.inner(x)


class Bump(nn.Module):
    """Works in place on its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x.relu_()


def line() -> Item:
    return Item(Line, (HIDDEN, HIDDEN))


def branched(how: str) -> list[Item]:
    """Two layers per stage, so that branch and join lie on neighbouring stages, or with one stage between."""
    branch, join = Item(Branch, (how,)), Item(Join, (how,))
    return [line(), branch, join, branch, line(), line(), join, line()]


FROZEN = Item(FrozenLine, (HIDDEN, HIDDEN))
# Eight layers each, two on a stage or chunk.
ODD_MODELS = {
    **{
        how: branched(how)
        for how in ["no gradient", "unused", "twice", "input", "named", "dtypes", "views", "conjugates", "a parameter"]
    },
    "nothing passes": branched("nothing passes"),
    "stages without parameters": [line(), line(), *[Item(toy.halve)] * 4, line(), line()],
    "first stage frozen": [FROZEN, FROZEN, *[line()] * 6],
    "middle stages frozen": [line(), line(), *[FROZEN] * 4, line(), line()],
    "last stage frozen": [*[line()] * 6, FROZEN, FROZEN],
    "in place": [line(), line(), Item(Bump), line(), Item(Bump), line(), Item(Bump), line()],
}


def odd_batch(g: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(g)
    shape = (2, 3 + g % 2, HIDDEN)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


ODD_BATCHES = [odd_batch(g) for g in range(3 * 5)]


def train_odd(model: str, pipeline: dict[str, Any]) -> Run:
    pipeline = {**pipeline, "partition": "uniform"}
    engine = make_engine(ODD_MODELS[model], squares, accumulation=5, pipeline=pipeline)
    return run_steps(engine, own_iterator(engine, ODD_BATCHES), 3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("model", ODD_MODELS)
def test_whatever_travels_the_numbers_are_those_of_one_process(run_ranks, model: str, pipeline: dict[str, Any]):
    ranks = run_ranks(pipeline["stages"], train_odd, model, pipeline)
    items = ODD_MODELS[model]
    wanted = run_reference(reference(items, squares), ODD_BATCHES, 5)
    frozen = {f"layers.{k}." for k, item in enumerate(items) if item.make is FrozenLine}
    trained = {name: w for name, w in wanted[2].items() if not name.startswith(tuple(frozen))}
    check(ranks, (wanted[0], wanted[1], trained), dp=1)


# Which layers are frozen in each step: those of the first stage, none again, those of the last, all but those, and none.
FROZEN_LAYERS = [(), (0, 1), (), (6, 7), (0, 1, 2, 3, 4, 5), ()]


def freeze(layers: Mapping[int, nn.Module], frozen: Sequence[int]) -> None:
    for k, layer in layers.items():
        layer.requires_grad_(k not in frozen)


def train_thawing(pipeline: dict[str, Any]) -> Run:
    pipeline = {**pipeline, "partition": "uniform"}
    # Momentum would move a frozen layer of the reference.
    changes = {"momentum": 0.0}
    engine = make_engine([line()] * 8, squares, accumulation=2, pipeline=pipeline, optimizer_changes=changes)
    data, losses, norms = own_iterator(engine, ODD_BATCHES), [], []
    for frozen in FROZEN_LAYERS:
        freeze({int(k): layer for k, layer in engine.module.layers.items()}, frozen)
        (loss,), (norm,), weights = run_steps(engine, data, 1)
        losses.append(loss)
        norms.append(norm)
    return losses, norms, weights


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_layers_that_are_frozen_and_thawed_between_steps_are_those_of_one_process(run_ranks, pipeline: dict[str, Any]):
    plain = Reference([line()] * 8, squares, make_optimizer("SGD", momentum=0.0), base_seed=BASE_SEED)
    steps = []
    for k, frozen in enumerate(FROZEN_LAYERS):
        freeze({k: layer for k, layer in enumerate(plain.modules) if layer is not None}, frozen)
        steps.append(plain.step(ODD_BATCHES[2 * k : 2 * k + 2]))
    losses, norms = zip(*steps, strict=True)
    check(run_ranks(pipeline["stages"], train_thawing, pipeline), (list(losses), list(norms), plain.weights()), dp=1)


INTEGERS = [((x, 1 + g % 4), y) for g, (x, y) in enumerate(ODD_BATCHES)]
SPARSE = [(x[0, 0].diag().to_sparse(), y[0, 0]) for x, y in ODD_BATCHES]
NO_ROWS = [(x[:0], y[:0]) if g % 5 == 2 else (x, y) for g, (x, y) in enumerate(ODD_BATCHES)]


def sum_of_squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().sum()


class FromSparse(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight) + self.bias


ODD_DATA: dict[str, tuple[list[Item], Callable[..., Tensor], list[Any]]] = {
    "changing ints": (
        [line(), Item(Branch, ("times",)), line(), Item(Branch, ("times",)), line(), Item(Join, ("times",)), line()],
        squares,
        INTEGERS,
    ),
    "sparse inputs": ([Item(FromSparse, (HIDDEN, HIDDEN)), *[line()] * 6], squares, SPARSE),
    "micro-batches without a row": ([line()] * 7, sum_of_squares, NO_ROWS),
}


def train_odd_data(case: str, pipeline: dict[str, Any]) -> Run:
    items, loss_fn, data = ODD_DATA[case]
    engine = make_engine(items, loss_fn, accumulation=5, pipeline=pipeline, optimizer_changes={"lr": 0.01})
    return run_steps(engine, own_iterator(engine, data), 3)


@pytest.mark.parametrize("pipeline", PIPELINES[:1], ids=str)
@pytest.mark.parametrize("case", ODD_DATA)
def test_odd_data_give_the_numbers_of_one_process(run_ranks, case: str, pipeline: dict[str, Any]):
    items, loss_fn, data = ODD_DATA[case]
    model = Reference(items, loss_fn, make_optimizer("SGD", lr=0.01), base_seed=BASE_SEED)
    check(run_ranks(pipeline["stages"], train_odd_data, case, pipeline), run_reference(model, data, 5), dp=1)


class Top(nn.Module):
    """Keeps a number of rows given by its input's values: the shape depends on the data."""

    def __init__(self, hidden: int):
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y[:, : 1 + int(x[0, 0, 0] > 0)]


def first_rows(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels[:, : output.shape[1]]).square().mean()


TOP = [line(), Item(Top, (HIDDEN,)), line(), line()]


def train_data_dependent(shapes: str) -> Run:
    engine = make_engine(TOP, first_rows, accumulation=5, pipeline={"stages": 2, "shapes": shapes})
    return run_steps(engine, own_iterator(engine, ODD_BATCHES), 3)


def test_shapes_that_depend_on_the_data_are_an_error_when_static(run_ranks):
    error = r'rank 0, stage 0, .*SA\d@0: CommunicationError: chunk 0 returned .*set pipeline.shapes to "dynamic"'
    with pytest.raises(RankError, match=error):
        run_ranks(2, train_data_dependent, "static", patience=0.5)  # the other waits for it


def test_shapes_that_depend_on_the_data_work_when_dynamic(run_ranks):
    ranks = run_ranks(2, train_data_dependent, "dynamic")
    check(ranks, run_reference(reference(TOP, first_rows), ODD_BATCHES, 5), dp=1)


class OwnLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean().view(1)


def train_without_loss_fn() -> Run:
    engine = make_engine([line(), line(), line(), Item(OwnLoss)], None, accumulation=5, pipeline={"stages": 2})
    return run_steps(engine, own_iterator(engine, ODD_BATCHES), 3)


def test_the_last_layer_may_be_the_loss(run_ranks):
    model = reference([line(), line(), line(), Item(OwnLoss)], lambda output, labels: output.squeeze())
    check(run_ranks(2, train_without_loss_fn), run_reference(model, ODD_BATCHES, 5), dp=1)


# Parameter groups and topologies


def decayed(parameters: Any) -> list[dict[str, Any]]:
    """Parameter groups with weight decay on matrices only, as scripts often have."""
    parameters = list(parameters)
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 0.05}]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def sgd_in_groups(parameters: Any) -> torch.optim.Optimizer:
    return sgd(decayed(parameters))


GROUPED = ODD_MODELS["stages without parameters"]


def train_in_groups(how: str) -> Run:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
        "pipeline": {"stages": 4, "partition": "uniform"},
    }
    module = PipelineModule(specs(GROUPED), loss_fn=squares, seed_layers=True, base_seed=BASE_SEED, config=config)
    options: dict[str, Any] = {
        "by configuration": {"model_parameters": decayed(module.parameters())},
        "by callable": {"model_parameters": decayed(module.parameters()), "optimizer": sgd},
        "in the callable": {"model_parameters": module.parameters(), "optimizer": sgd},
        "by hand": {"optimizer": sgd_in_groups(module.parameters())},
    }[how]
    engine, optimizer, *_ = parallel3d.initialize(model=module, config=config, **options)
    assert engine.optimizer is optimizer
    return run_steps(engine, own_iterator(engine, ODD_BATCHES), 3)


@pytest.mark.parametrize("how", ["by configuration", "by callable", "in the callable", "by hand"])
def test_parameter_groups_work_on_stages_without_parameters_too(run_ranks, how: str):
    optimizer = sgd if how == "in the callable" else sgd_in_groups
    model = Reference(GROUPED, squares, optimizer, base_seed=BASE_SEED)
    check(run_ranks(4, train_in_groups, how), run_reference(model, ODD_BATCHES, 5), dp=1)


def train_on_topology(axes: list[str], dims: list[int]) -> Run:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}},
    }
    module = PipelineModule(
        specs(toy.model(tied=True)),
        topology=ProcessTopology(axes, dims),
        loss_fn=toy.cross_entropy,
        seed_layers=True,
        base_seed=BASE_SEED,
    )
    engine, *_ = parallel3d.initialize(model=module, config=config)
    return run_steps(engine, own_iterator(engine, STREAM[:12] if "data" in axes else STREAM[:6]), 2)


@pytest.mark.parametrize(
    ("axes", "dims"), [(["data", "pipe"], [2, 2]), (["pipe", "model", "data"], [2, 1, 2]), (["pipe"], [4])]
)
def test_a_topologys_axes_may_have_any_order(run_ranks, axes: list[str], dims: list[int]):
    per_step = 6 if "data" in axes else 3
    wanted = run_reference(reference(toy.model(tied=True)), STREAM[: 2 * per_step], per_step)
    check(run_ranks(4, train_on_topology, axes, dims), wanted, dp=per_step // 3)


def train_over_another_axis(axis: str) -> str:
    with pytest.raises(ConfigError) as error:
        train_on_topology(["pipe", axis, "data"], [1, 2, 1])
    return str(error.value)


def test_axes_that_nothing_trains_over_are_refused(run_ranks):
    for message in run_ranks(2, train_over_another_axis, "expert"):
        assert message.startswith("the topology has axes {'expert': 2} besides pipe, data and model")


# Conflicts and other mistakes, at initialize


def attempt(module_options: dict[str, Any], pipeline: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return the error of a module with these options, or of an engine with these sections in its configuration."""
    whole = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": pipeline,
        **config,
    }
    layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
    try:
        module = PipelineModule(layers, **{"num_stages": 1, "loss_fn": squares, **module_options})
        parallel3d.initialize(model=module, config=whole)
    except Parallel3DError as error:
        return f"{type(error).__name__}: {error}"
    return None


class TrainedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("module_options", "pipeline", "config", "wanted"),
    [
        ({}, {"stages": 2}, {}, "ConfigError: pipeline.stages is 2, but the PipelineModule was built with 1"),
        ({"num_chunks": 2}, {"num_chunks": 4, "schedule": "gpipe"}, {}, "ConfigError: pipeline.num_chunks is 4"),
        (
            {"num_chunks": 2},
            {},
            {},
            "ConfigError: the PipelineModule has 2 chunks a stage, which schedule '1f1b' can't",
        ),
        (
            {"num_chunks": 2, "placement": "v"},
            {"schedule": "gpipe", "placement": "loop"},
            {},
            "ConfigError: pipeline.placement is 'loop'",
        ),
        ({"num_chunks": 2, "placement": "v"}, {"schedule": "interleaved"}, {}, 'ScheduleError: schedule "interleaved"'),
        ({"partition_method": "uniform"}, {"partition": "parameters"}, {}, "ConfigError: pipeline.partition"),
        ({"partition_method": [0, 4]}, {"partition": [0, 4]}, {}, None),
        ({"partition_method": {"weights": [1, 2, 3, 4]}}, {"partition": {"weights": [1, 2, 3, 4]}}, {}, None),
        ({"activation_checkpoint_interval": 1}, {"activation_checkpoint_interval": 2}, {}, "ConfigError"),
        ({"seed_layers": True}, {"seed_layers": False}, {}, "ConfigError: pipeline.seed_layers is False"),
        ({"seed_layers": False}, {"seed_layers": True}, {}, None),  # random masks are seeded by layer anyway
        ({}, {"schedule": [["F0@0", "B0@0"]]}, {}, "ScheduleError: schedule 'custom' is written for 1 micro-batches"),
        ({}, {"schedule": [["F0@0", "F1@0", "B0@0", "B0@0"]]}, {}, "ScheduleError: B0@0 occurs 2 times"),
        ({}, {"schedule": [["F0@0", "I0@0", "W0@0", "F1@0", "B1@0"]]}, {}, None),
        ({"loss_fn": TrainedLoss()}, {}, {}, "PartitionError: loss_fn TrainedLoss has parameters to train, ['weight']"),
        ({"config": {"pipeline": {"stages": 2}}}, {}, {}, "ConfigError: num_stages is 1 in one place and 2 in another"),
        ({}, {}, {"train_batch_size": 7}, "ConfigError: world = tp x pp x dp = 1 x 1 x 1"),
    ],
)
def test_what_can_not_be_run_is_refused_at_once(
    run_ranks, module_options: dict[str, Any], pipeline: dict[str, Any], config: dict[str, Any], wanted: str | None
):
    [message] = run_ranks(1, attempt, module_options, pipeline, config)
    assert (message is None) if wanted is None else message.startswith(wanted)


def received_of_a_user_dict() -> tuple[str, str, torch.dtype]:
    """Types of inputs and labels that are given as UserDict, and the dtype of their numbers."""
    seen: list[Any] = []

    def unpack(x: Any) -> Tensor:
        seen.append(x)
        return x["x"]

    def loss_fn(output: Tensor, labels: Any) -> Tensor:
        seen.append(labels)
        return squares(output, labels["y"])

    config = {"train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    module = PipelineModule([unpack, nn.Linear(4, 4)], num_stages=1, loss_fn=loss_fn)
    engine = parallel3d.initialize(model=module, config=config)[0]
    engine.train_batch(iter([(UserDict(x=torch.ones(2, 4)), UserDict(y=torch.ones(2, 4)))]))
    return type(seen[0]).__name__, type(seen[1]).__name__, seen[0]["x"].dtype


def test_mappings_that_are_no_pytrees_arrive_as_dicts_with_their_tensors_cast(run_ranks):
    assert run_ranks(1, received_of_a_user_dict) == [("dict", "dict", torch.bfloat16)]
