import math
import re
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.config import BatchSizes, resolve_batch
from parallel3d.errors import ConfigError

# Busy machines are slow: time is no part of these properties.
timeless = settings(deadline=None)
sizes = st.integers(1, 64)
maybe = st.none() | st.integers(1, 200)
layouts = st.fixed_dictionaries({"pipe": st.integers(1, 8), "data": st.integers(1, 8), "model": st.integers(1, 8)})


@timeless
@given(micro=sizes, accumulation=sizes, layout=layouts)
def test_any_two_sizes_give_the_third(micro, accumulation, layout):
    train = micro * accumulation * layout["data"]
    expected = BatchSizes(train, micro, accumulation)
    assert resolve_batch(train, micro, accumulation, **layout) == expected
    assert resolve_batch(None, micro, accumulation, **layout) == expected
    assert resolve_batch(train, None, accumulation, **layout) == expected
    assert resolve_batch(train, micro, None, **layout) == expected


@timeless
@given(micro=sizes, layout=layouts)
def test_one_size_alone_means_no_accumulation(micro, layout):
    expected = BatchSizes(micro * layout["data"], micro, 1)
    assert resolve_batch(None, micro, None, **layout) == expected
    assert resolve_batch(micro * layout["data"], None, None, **layout) == expected


@timeless
@given(train=maybe, micro=maybe, accumulation=maybe, layout=layouts)
def test_sizes_multiply_up_and_keep_what_was_given_or_are_refused(train, micro, accumulation, layout):
    given_sizes = (train, micro, accumulation)
    try:
        found = astuple(resolve_batch(*given_sizes, **layout))
    except ConfigError:
        return
    assert found[0] == found[1] * found[2] * layout["data"]
    assert min(found) >= 1
    assert all(given_size in (None, size) for given_size, size in zip(given_sizes, found, strict=True))


@timeless
@given(train=st.integers(1, 400), micro=maybe, accumulation=maybe, layout=layouts)
def test_every_fix_that_an_error_offers_works_alone(train, micro, accumulation, layout):
    sizes = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    try:
        resolve_batch(*sizes.values(), **layout)
    except ConfigError as error:
        fixes = re.findall(r"(\w+) to (\d+)(?: or (\d+))?", str(error).partition("Set ")[2])
        assert fixes
        for name, *values in fixes:
            for value in filter(None, values):
                resolve_batch(*(sizes | {name: int(value)}).values(), **layout)


def test_the_error_spells_out_the_world_and_the_equation():
    with pytest.raises(ConfigError) as caught:
        resolve_batch(30, 4, 3, pipe=2, data=2, model=3)
    message = str(caught.value)
    assert "world = tp x pp x dp = 3 x 2 x 2 = 12 ranks" in message
    assert "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp" in message
    assert "30 != 4 x 3 x 2 = 24" in message
    assert "Set train_batch_size to 24; or train_micro_batch_size_per_gpu to 5." in message


def test_the_layouts_other_axes_do_not_change_the_sizes():
    plain = resolve_batch(48, 4, None, pipe=1, data=2, model=1)
    assert resolve_batch(48, 4, None, pipe=4, data=2, model=8) == plain == BatchSizes(48, 4, 6)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ((None, None, None), "give train_batch_size"),
        ((None, None, 4), "gradient_accumulation_steps = 4 alone leaves both open"),
        ((7, None, None), "7 is not a multiple of 2. Set train_batch_size to 6 or 8."),
        ((30, 4, None), "Set train_batch_size to 24 or 32; or train_micro_batch_size_per_gpu to 3."),
        ((24, None, 5), "Set train_batch_size to 20 or 30; or gradient_accumulation_steps to 4."),
        ((3, 4, None), "Set train_batch_size to 8."),
        ((8, 0, None), "train_micro_batch_size_per_gpu is 0; give a whole number >= 1"),
        ((-8, None, None), "train_batch_size is -8"),
        ((None, True, None), "train_micro_batch_size_per_gpu is True"),
        ((8.0, None, None), "train_batch_size is 8.0"),
    ],
)
def test_wrong_sizes(sizes, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        resolve_batch(*sizes, pipe=1, data=2, model=1)


def test_an_axis_must_have_ranks():
    with pytest.raises(ConfigError, match="data is 0"):
        resolve_batch(8, None, None, pipe=1, data=0, model=1)


def test_large_batches_are_explained_without_delay():
    with pytest.raises(ConfigError, match=f"gradient_accumulation_steps to {math.isqrt(10**12)}"):
        resolve_batch(10**12, None, 10**6 + 1, pipe=1, data=1, model=1)
