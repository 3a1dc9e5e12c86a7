"""Loaders, the sampler and the micro-batches of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel3d.utils import RepeatingLoader as FromUtils
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import parallel3d
from parallel3d.errors import DataError
from parallel3d.pipe import PipelineModule
from parallel3d.pipe.batch import MicroBatchSource
from parallel3d.pipe.data import MicroBatchSampler, RepeatingLoader, ReplicaSamples

# A loaded machine is no failure.
unhurried = settings(deadline=None)


# RepeatingLoader


class Epochs:
    """A loader whose epochs differ."""

    generator = "of names"  # no torch.Generator

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[str]:
        self.epoch += 1
        return iter([f"{self.epoch}{name}" for name in "abc"])


def test_a_repeating_loader_starts_its_loader_anew():
    assert list(islice(RepeatingLoader(Epochs()), 7)) == ["1a", "1b", "1c", "2a", "2b", "2c", "3a"]
    assert FromUtils is RepeatingLoader


def test_a_repeating_loader_goes_on_where_it_was():
    loader = RepeatingLoader([1, 2, 3])
    assert iter(loader) is loader
    assert list(islice(loader, 2)) == [1, 2]
    assert list(islice(loader, 2)) == [3, 1]


def test_a_repeating_loader_of_nothing_says_so():
    with pytest.raises(DataError, match="yields nothing"):
        next(RepeatingLoader([]))
    once = RepeatingLoader(iter([1]))  # an iterator has one epoch only
    assert next(once) == 1
    with pytest.raises(DataError, match="yields nothing"):
        next(once)


# MicroBatchSampler


sizes = {
    "num_samples": st.integers(1, 60),
    "micro_batch_size": st.integers(1, 4),
    "seed": st.integers(0, 5),
    "drop_last": st.booleans(),
}


def epochs(dp: int, per_step: int, number: int, num_samples: int, micro_batch_size: int, **options: bool | int):
    """Return the global order of micro-batches in some epochs, joined from the replicas."""
    samplers = [MicroBatchSampler(num_samples, micro_batch_size, r, dp, per_step // dp, **options) for r in range(dp)]
    result = []
    for _ in range(number):
        replicas = [list(sampler) for sampler in samplers]
        assert [len(own) for own in replicas] == [len(sampler) for sampler in samplers]
        result.append([micro_batch for together in zip(*replicas, strict=True) for micro_batch in together])
    return result


@unhurried
@given(**sizes)
def test_the_order_is_the_same_for_every_number_of_replicas(**options):
    step = 12 * options["micro_batch_size"]
    if options["drop_last"] and options["num_samples"] < step:
        with pytest.raises(
            DataError, match=f"can't fill one step of 1 replicas x 12 micro-batches x .* = {step} samples"
        ):
            epochs(1, 12, 1, **options)
        return
    [one, *others] = [epochs(dp, 12, 3, **options) for dp in (1, 2, 3, 4, 6, 12)]
    assert all(other == one for other in others)


@unhurried
@given(**sizes, dp=st.integers(1, 4), accumulation=st.integers(1, 3))
def test_an_epoch_holds_every_sample_once_and_whole_steps(dp: int, accumulation: int, **options):
    n, step = options["num_samples"], dp * accumulation * options["micro_batch_size"]
    if options["drop_last"] and n < step:
        return
    for epoch in epochs(dp, dp * accumulation, 2, **options):
        samples = [k for micro_batch in epoch for k in micro_batch]
        assert len(epoch) % (dp * accumulation) == 0
        assert all(len(micro_batch) == options["micro_batch_size"] for micro_batch in epoch)
        if options["drop_last"]:
            assert len(samples) == n - n % step
            assert len(set(samples)) == len(samples)
        else:
            assert len(samples) - n < step
            assert sorted(samples[:n]) == list(range(n))
            assert samples[n:] == [samples[j % n] for j in range(n, len(samples))]


def test_the_seed_and_the_epoch_make_the_order():
    def order(seed: int) -> list[list[int]]:
        return [[k for [k] in epoch] for epoch in epochs(1, 1, 3, 40, 1, seed=seed)]

    first, second, third = order(1)
    assert order(1) == [first, second, third]
    assert first != second != third != first
    assert order(2)[0] != first


def test_shuffling_leaves_torchs_own_generator_alone():
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    list(MicroBatchSampler(10, 2, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)


# The loader of initialize


def made_loader(data: Any, **options: Any) -> DataLoader:
    """The loader that `initialize` makes on one process, in micro-batches of two samples."""
    model, config = nn.Linear(1, 1), {"train_micro_batch_size_per_gpu": 2, "seed": 3}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, loader, _ = parallel3d.initialize(
        model=model, optimizer=optimizer, training_data=data, config=config, **options
    )
    return loader


def test_a_loader_collates_the_samples_of_its_sampler():
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = made_loader(data)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 4
    sampler = MicroBatchSampler(8, 2, 0, 1, seed=3)
    for _ in range(2):  # epochs
        assert [labels.tolist() for _, labels in loader] == list(sampler)
    own = made_loader(data, collate_fn=lambda samples: [int(label) for _, label in samples])
    assert list(own) == list(MicroBatchSampler(8, 2, 0, 1, seed=3))


def test_a_pipelines_samples_come_in_the_datasets_order_unless_it_is_to_shuffle():
    data, config = TensorDataset(torch.arange(8.0), torch.arange(8)), {"train_micro_batch_size_per_gpu": 2, "seed": 3}
    shuffled = list(MicroBatchSampler(8, 2, 0, 1, seed=3))
    for chosen, wanted in ({}, [[0, 1], [2, 3], [4, 5], [6, 7]]), ({"dataloader_shuffle": True}, shuffled):
        model = PipelineModule([nn.Linear(1, 1)], num_stages=1)
        *_, loader, _ = parallel3d.initialize(model=model, training_data=data, config={**config, **chosen})
        assert [labels.tolist() for _, labels in loader] == wanted


class Counted(IterableDataset[int]):
    """A stream that knows its length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        return 5


def test_a_stream_that_knows_its_length_is_read_in_its_own_order():
    assert [batch.tolist() for batch in made_loader(Counted())] == [[0, 1], [2, 3]]


def test_data_with_neither_length_nor_iterator_are_refused():
    with pytest.raises(DataError, match="training_data object has neither a length nor __iter__"):
        made_loader(object())


# MicroBatchSource


def test_a_source_takes_what_is_there():
    source, iterator = MicroBatchSource(), iter(range(5))
    assert source.take(iterator, 3) == [0, 1, 2]
    assert source.take(iterator, 3) == [3, 4]
    assert source.take(iterator, 3) == []


def test_what_is_given_back_comes_first_and_goes_to_its_own_iterator():
    source, one, two = MicroBatchSource(), iter(range(9)), iter("abcdef")
    source.give_back(one, source.take(one, 4)[2:])
    source.give_back(two, source.take(two, 2)[1:])
    assert source.take(two, 3) == ["b", "c", "d"]
    assert source.take(one, 1) == [2]  # fewer than there are left over
    assert source.take(one, 4) == [3, 4, 5, 6]


def test_an_iterator_that_raises_loses_nothing():
    def failing() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("gone")

    source, iterator = MicroBatchSource(), failing()
    with pytest.raises(OSError, match="gone"):
        source.take(iterator, 3)
    assert source.take(iterator, 3) == [1, 2]


def test_an_iterator_that_the_script_drops_is_not_kept():
    source, iterator = MicroBatchSource(), (k for k in range(3))  # uneven evaluations leave some micro-batches
    source.give_back(iterator, source.take(iterator, 2))
    assert source.num_left(iterator) == 2
    dropped = weakref.ref(iterator)
    del iterator
    assert dropped() is None


def test_what_is_no_iterator_is_refused():
    with pytest.raises(DataError, match=r"data_iter is a list, .* iter\(loader\), or RepeatingLoader"):
        MicroBatchSource().take([1, 2], 1)


@unhurried
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6))), st.integers(0, 30))
def test_every_micro_batch_is_used_once_and_in_order(rounds: list[tuple[int, int]], total: int):
    """rounds: (number of micro-batches to take, number of them that other ranks have too)."""
    source, iterator = MicroBatchSource(), iter(range(total))
    used: list[int] = []
    for most, others in rounds:
        taken = source.take(iterator, most)
        assert len(taken) == min(most, total - len(used))
        used += taken[:others]
        source.give_back(iterator, taken[others:])
    assert used == list(range(len(used)))


@unhurried
@given(**sizes, before=st.sampled_from([1, 2, 4]), after=st.sampled_from([1, 2, 4]), data=st.data())
def test_a_saved_position_goes_on_with_any_number_of_replicas(before: int, after: int, data, **options):
    step = 4 * options["micro_batch_size"]
    if options["drop_last"] and options["num_samples"] < step:
        return

    def samplers(dp: int, seed: int) -> list[MicroBatchSampler]:
        changed = {**options, "seed": seed}
        return [MicroBatchSampler(replica=r, num_replicas=dp, num_micro_batches=4 // dp, **changed) for r in range(dp)]

    order = [micro_batch for epoch in epochs(1, 4, 4, **options) for micro_batch in epoch]
    steps = data.draw(st.integers(0, len(order) // 4 // 2))

    def deal(dp: int, loaders: list[RepeatingLoader], number: int) -> list[list[int]]:
        return [next(loader) for _ in range(number * 4 // dp) for loader in loaders]

    first = samplers(before, options["seed"])
    loaders = [RepeatingLoader(DataLoader(range(60), batch_sampler=s, collate_fn=list)) for s in first]
    assert deal(before, loaders, steps) == order[: 4 * steps]
    # As if the last step's micro-batches had come back unused.
    unused = 4 // before if steps else 0
    state = loaders[0].state_dict(unused)
    done = steps - 1 if steps else 0
    others = [
        RepeatingLoader(DataLoader(range(60), batch_sampler=s, collate_fn=list))
        for s in samplers(after, options["seed"] + 7)
    ]
    if data.draw(st.booleans()):  # one that is under way jumps
        deal(after, others, 1)
    for loader in others:
        loader.load_state_dict(state)
    assert deal(after, others, 2) == order[4 * done : 4 * done + 8]


def test_positions_of_other_data_or_between_micro_batches_are_refused():
    sampler = MicroBatchSampler(12, 2, 0, 3)
    for change, words in (
        ({"num_samples": 13}, "saved with 13 samples"),
        ({"samples": 4}, "no micro-batches of 3 replicas x 2"),
    ):
        with pytest.raises(DataError, match=words):
            sampler.load_state_dict({**sampler.state_dict(), **change})
    with pytest.raises(DataError, match="another kind"):
        RepeatingLoader([1, 2]).load_state_dict({"sampler": sampler.state_dict()})


@unhurried
@given(st.integers(0, 40), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_a_stream_is_dealt_alike_for_any_number_of_replicas(total: int, micro_batch_size: int, dp: int):
    step = 4 * micro_batch_size
    replicas = [list(ReplicaSamples(range(total), micro_batch_size, r, dp, 4 // dp)) for r in range(dp)]
    whole = total // step * step
    assert all(len(own) == whole // dp for own in replicas)
    dealt = [
        k for m in range(0, whole // dp, micro_batch_size) for own in replicas for k in own[m : m + micro_batch_size]
    ]
    assert dealt == list(range(whole))


def test_a_loader_with_its_own_position_is_not_read_again():
    def loader(read: list[int]) -> RepeatingLoader:
        def collate(samples: list[int]) -> list[int]:
            read.extend(samples)
            return samples

        return RepeatingLoader(StatefulDataLoader(range(9), batch_size=2, shuffle=True, collate_fn=collate))

    torch.manual_seed(1)
    one = loader([])
    [next(one) for _ in range(7)]
    state, generator = one.state_dict(), torch.get_rng_state()
    with pytest.warns(UserWarning, match="2 micro-batches that were read, but not used, are left out"):
        one.state_dict(2)
    wanted = [next(one) for _ in range(9)]
    torch.manual_seed(2)
    read: list[int] = []
    other = loader(read)
    next(other)
    read.clear()
    other.load_state_dict(state)
    assert read == []
    torch.set_rng_state(generator)
    assert [next(other) for _ in range(9)] == wanted


@pytest.mark.parametrize("batches", [2, 7], ids=["first epoch", "second epoch"])
@pytest.mark.parametrize(
    ("kind", "own", "more"),
    [
        (DataLoader, False, {}),
        (DataLoaderShard, False, {}),  # accelerate's has a state_dict that raises
        (DataLoader, True, {}),
        (DataLoader, False, {"num_workers": 1, "persistent_workers": True}),  # they read ahead
    ],
    ids=["torch's", "accelerate's", "own generator", "workers"],
)
def test_a_loader_that_shuffles_is_brought_back(kind: type[DataLoader], own: bool, more: dict[str, Any], batches: int):
    def loader() -> RepeatingLoader:
        generator = {"generator": torch.Generator().manual_seed(3)} if own else {}
        return RepeatingLoader(kind(range(9), batch_size=2, shuffle=True, collate_fn=list, **generator, **more))

    torch.manual_seed(1)
    one = loader()
    [next(one) for _ in range(batches)]
    state, generator = one.state_dict(), torch.get_rng_state()
    rest = [next(one) for _ in range(9)]
    torch.manual_seed(2)
    other = loader()
    if not more:
        next(other)
    other.load_state_dict(state)
    torch.set_rng_state(generator)
    assert [next(other) for _ in range(9)] == rest


def test_unused_micro_batches_of_the_epoch_before_are_left_out_with_a_warning():
    loader = RepeatingLoader(DataLoader(range(3), batch_size=1, collate_fn=list))
    [next(loader) for _ in range(4)]
    assert loader.state_dict(1)["taken"] == 0
    with pytest.warns(UserWarning, match="1 micro-batches that were read, but not used, are left out"):
        loader.state_dict(2)
