"""The accelerator's functions are those of the device, also on the CPU, where torch has no module with them."""

from __future__ import annotations

import pytest
import torch

from parallel3d.deepspeed.accelerator import get_accelerator


def test_memory_is_that_of_the_device():
    accelerator, size = get_accelerator(), 2**29  # more than other tests leave in this process for its next tensors
    before = accelerator.memory_allocated()
    held = torch.ones(size, dtype=torch.uint8, device=accelerator.device_name())
    after = accelerator.memory_allocated()
    assert after - before > 0.9 * size
    assert after <= accelerator.max_memory_allocated() <= accelerator.total_memory()
    assert 0 < accelerator.available_memory() < accelerator.total_memory()
    assert accelerator.on_accelerator(held)
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()


def test_random_numbers_repeat_from_a_state():
    accelerator = get_accelerator()
    state = accelerator.get_rng_state()
    drawn = torch.rand(4, device=accelerator.device_name())
    accelerator.set_rng_state(state)
    assert drawn.equal(torch.rand(4, device=accelerator.device_name()))


def test_tensors_and_ranges():
    accelerator = get_accelerator()
    numbers = torch.arange(3)
    assert accelerator.pin_memory(numbers).equal(numbers)
    assert accelerator.FloatTensor([1.0, 2.0]).device.type == accelerator.device_name().partition(":")[0]
    accelerator.range_push("step")
    accelerator.range_pop()
    accelerator.synchronize()
    with pytest.raises(AttributeError, match=r"the accelerator .* has no 'nowhere'"):
        _ = accelerator.nowhere
