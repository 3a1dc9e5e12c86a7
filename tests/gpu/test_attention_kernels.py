"""On CUDA the first of the attention backends asked for that can run is the one that runs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from parallel3d.engine.attention import attention_context, missing

OPERATORS = {
    "cudnn": "aten::_scaled_dot_product_cudnn_attention",
    "flash": "aten::_scaled_dot_product_flash_attention",
    "efficient": "aten::_scaled_dot_product_efficient_attention",
    "math": "aten::_scaled_dot_product_attention_math",
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("first", OPERATORS)
def test_the_first_choice_runs_and_gives_the_same_numbers(first: str):
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := missing(first, device):
        pytest.skip(reason)
    draw = torch.Generator(device).manual_seed(0)
    query, key, value = (torch.randn(1, 4, 128, 64, device=device, generator=draw) for _ in range(3))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    halves = [t.bfloat16() for t in (query, key, value)]
    names = [first, *(name for name in OPERATORS if name != first)]
    with profile(activities=[ProfilerActivity.CPU]) as seen, attention_context(names, device)():
        got = F.scaled_dot_product_attention(*halves, is_causal=True)
    ran = {event.key for event in seen.key_averages()}
    assert {name for name, operator in OPERATORS.items() if operator in ran} == {first}
    torch.testing.assert_close(got.float(), wanted, rtol=0, atol=0.05)
