"""Which attention kernels are asked of PyTorch, and which a device can't have."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from parallel3d.engine.attention import attention_context, missing
from parallel3d.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_the_order_holds_inside_and_no_longer():
    before = _cur_sdpa_kernel_backends(with_priority=True)
    make = attention_context(["math", "cudnn", "flash"], CPU)
    for _ in range(2):
        with make():
            inside = _cur_sdpa_kernel_backends(with_priority=True)
        assert inside == [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        assert _cur_sdpa_kernel_backends(with_priority=True) == before
    with attention_context(None, CPU)():
        assert _cur_sdpa_kernel_backends(with_priority=True) == before


@pytest.mark.parametrize(
    ("capability", "lacking"),
    [((9, 0), []), ((8, 0), []), ((7, 5), ["cudnn", "flash"]), ((3, 5), ["cudnn", "flash", "efficient"])],
)
def test_what_a_gpu_is_too_old_for(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], lacking: list[str]):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    names = ["cudnn", "flash", "efficient", "math"]
    assert [name for name in names if missing(name, CUDA)] == lacking
    if lacking:
        with pytest.raises(
            ConfigError, match=rf"capability 8\.0, the device has {capability[0]}\.{capability[1]}.*math"
        ):
            attention_context(lacking, CUDA)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="without cuDNN"):
        attention_context(["cudnn"], CUDA)
