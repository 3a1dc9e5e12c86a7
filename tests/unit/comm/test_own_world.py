"""A world that the script has joined itself: the backend of its GPUs says where the engine trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d import comm
from parallel3d.comm.environment import local_device, world_backend


@pytest.mark.parametrize(
    ("config", "backend", "device"),
    [
        ("cpu:gloo,cuda:gloo", "gloo", "cpu"),
        ("cuda:nccl", "nccl", "cuda:0"),
        ("cpu:gloo,cuda:nccl", "nccl", "cuda:0"),
    ],
)
def test_nccl_beside_another_backend_trains_on_gpus(
    monkeypatch: pytest.MonkeyPatch, config: str, backend: str, device: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (world_backend(), local_device()) == (backend, torch.device(device))


def test_a_script_need_not_name_a_backend(tmp_path: Path) -> None:
    comm.destroy()  # a world that an earlier test has left
    dist.init_process_group(init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert local_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        comm.destroy()
