"""`p3d doctor` says for each kernel whether it runs, or why it doesn't and what to do."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from parallel3d.cli import main
from parallel3d.cli.kernels import examine
from parallel3d.comm.peer import streams
from parallel3d.config import load
from parallel3d.errors import KernelError
from parallel3d.kernels import cuda_library, workspace

Host = Callable[..., None]
ASKED = load({"kernels": {"all_reduce": True}})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Makes this host one with so many GPUs, and what else is said of it."""

    def make(
        gpus: int = 4,
        capability: tuple[int, int] = (9, 0),
        compiled: bool = True,
        nvcc: str | None = "/cuda/bin/nvcc",
        unreached: frozenset[tuple[int, int]] = frozenset(),
        driver: bool = True,
    ) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: "H100")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b) not in unreached)
        monkeypatch.setattr(streams, "_driver", lambda: ctypes.CDLL("absent.so" if not driver else None))
        monkeypatch.setattr(workspace, "load_library", object if compiled else cuda_library.load_library.__wrapped__)
        monkeypatch.setattr(cuda_library, "find_library", lambda: None)
        monkeypatch.setattr(cuda_library, "find_nvcc", lambda: nvcc)

    return make


def told(tensor_ranks: int, config=ASKED, kernel: str = "all_reduce", replicas: int = 1, stages: int = 1) -> list[str]:
    """Return the doctor's row of a kernel."""
    findings = examine(config, tensor_ranks, replicas, stages)
    (found,) = [finding for finding in findings if finding.kernel.startswith(f"{kernel} (")]
    return [f"{reason.reason} | {reason.remedy}" for reason in found.reasons]


@pytest.mark.parametrize("tensor_ranks", [2, 4, 8])
def test_on_where_nothing_is_in_the_way(host: Host, tensor_ranks: int) -> None:
    host(gpus=8)
    assert told(tensor_ranks) == []


@pytest.mark.parametrize(
    ("what", "tensor_ranks", "why", "remedy"),
    [
        ({"gpus": 0}, 2, "no CUDA device", "no action is needed"),
        ({"capability": (7, 5)}, 2, "compute capability 7.5", "A100"),
        ({"compiled": False}, 2, "not compiled", "run: p3d build-kernels"),
        ({"compiled": False, "nvcc": None}, 2, "not compiled, and there is no nvcc", "CUDA_HOME"),
        ({"gpus": 4}, 8, "8 tensor-parallel ranks are on 2 hosts", "no more tensor-parallel ranks"),
        ({"gpus": 4}, 3, "3 tensor-parallel ranks", "for 2, 4, 8"),
        ({"gpus": 4, "unreached": {(2, 1)}}, 4, "device 2 doesn't reach", "NVLink"),
    ],
)
def test_what_is_in_the_way_is_told_with_a_remedy(
    host: Host, what: dict, tensor_ranks: int, why: str, remedy: str
) -> None:
    host(**what)
    (line,) = told(tensor_ranks)
    assert why in line.partition(" | ")[0]
    assert remedy in line.partition(" | ")[2]


def test_replicas_are_reported_apart_from_slices(host: Host) -> None:
    host()
    kernel = "reduce_scatter"
    config = load({"kernels": {kernel: True}})
    assert told(2, config, kernel, replicas=4) == []
    assert told(2, config, kernel, replicas=8) == [
        "the 8 replicas are on 2 hosts | use no more replicas than a host has GPUs"
    ]
    assert "3 replicas" in told(3, config, kernel, replicas=3)[0]
    (off,) = told(2, load({}), kernel, replicas=4)
    assert off == "off by default | set kernels.reduce_scatter to true, if steps become shorter"


STAGES, SHARDS = "send/receive of stages", "send/receive of shards"


def test_messages_need_no_compiled_kernel_and_any_number_of_ranks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host(gpus=3, compiled=False, nvcc=None)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    shared = load({"tensor_parallel": {"size": 3, "sequence_parallel": True, "peer_copies": True}})
    assert told(3, shared, SHARDS) == told(3, shared, STAGES, stages=3) == []
    assert told(3, shared, STAGES, stages=6) == [
        "the 6 stages are on 2 hosts | use no more stages than a host has GPUs"
    ]
    assert [finding.kernel for finding in examine(shared, 6, 1, 6) if finding.missed] == [f"{SHARDS} (copies)"]
    (off,) = told(3, load({}), SHARDS)
    assert "tensor_parallel.peer_copies" in off
    zero = load({"zero_optimization": {"stage": 3, "peer_copies": True}})
    assert told(1, zero, "gathers of weights", replicas=3) == []
    (off,) = told(1, load({}), "gathers of weights", replicas=3)
    assert "zero_optimization.peer_copies" in off
    (off,) = told(3, load({"pipeline": {"peer_copies": False}}), STAGES, stages=3)
    assert off.endswith("set pipeline.peer_copies to true")


def test_what_keeps_messages_from_being_copied_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load({})
    host(unreached=frozenset({(1, 0)}))
    (reach,) = told(1, config, STAGES, stages=2)
    assert "device 1 doesn't reach" in reach
    host(driver=False)
    assert told(1, config, STAGES, stages=2)[0].endswith("install a later driver")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1" in told(1, config, STAGES, stages=2)[0]
    host(gpus=0)
    assert "no CUDA device" in told(1, config, STAGES, stages=2)[0]


def test_nccls_switch_turns_off_all_that_reaches_the_memory_of_peers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load({"kernels": dict.fromkeys(("all_reduce", "reduce_scatter", "optimizer_step"), True)})
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    host()
    for value, off in (("0", False), ("1", True)):
        monkeypatch.setenv("NCCL_P2P_DISABLE", value)
        for kernel in (STAGES, "all_reduce", "reduce_scatter"):
            lines = told(4, config, kernel, replicas=4, stages=4)
            assert any("NCCL_P2P_DISABLE is 1" in line and "set it to 0" in line for line in lines) == off
        assert told(1, config, "optimizer_step") == [], "nor is a single GPU concerned"


def test_one_stage_sends_nothing(host: Host) -> None:
    host(gpus=1)
    assert told(1, load({}), STAGES, stages=1) == ["the number of stages is 1 | copies need at least 2 stages"]


def test_the_pipeline_and_the_zero_stage_of_a_configuration_file_are_used(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"

    def doctor(gpus: int, zero: Mapping[str, object] = {}, **pipeline: object) -> tuple[int, str]:
        host(gpus=gpus)
        path.write_text(json.dumps({"pipeline": pipeline, "optimizer": "auto", "zero_optimization": zero}))
        return main(["doctor", "--config", str(path)]), capsys.readouterr().out

    code, text = doctor(2, stages=4)
    assert code == 0
    assert "the 4 stages are on 2" in text
    assert "set pipeline.peer_copies to true" in doctor(4, stages=4, peer_copies=False)[1]
    off = "set it to true, if steps become shorter"
    assert off in doctor(4, {"stage": 3})[1]
    assert off not in doctor(4, {"stage": 3, "peer_copies": True})[1]


def test_the_optimizers_step_needs_no_peers(host: Host) -> None:
    host(gpus=1)
    assert told(8, load({"kernels": {"optimizer_step": True}}), "optimizer_step", replicas=8) == []
    assert "set kernels.optimizer_step to true" in told(1, load({}), "optimizer_step")[0]


def test_a_device_out_of_reach_is_no_matter_to_fewer_slices(host: Host) -> None:
    host(unreached=frozenset({(2, 1)}))
    assert told(2) == []


@pytest.mark.parametrize("value", [False, "auto"])
def test_a_kernel_is_off_by_default(host: Host, value: bool | str) -> None:
    host()
    (line,) = told(2, load({"kernels": {"all_reduce": value}}))
    assert line == "off by default | set kernels.all_reduce to true, if steps become shorter"


def test_a_library_that_does_not_load_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host()

    def fail() -> None:
        raise KernelError("library.so can't be loaded: odd; remove it and run: p3d build-kernels")

    monkeypatch.setattr(workspace, "load_library", fail)
    assert told(2) == ["library.so can't be loaded: odd | remove it and run: p3d build-kernels"]


def test_the_exit_code_is_1_where_what_is_asked_for_is_off(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host(gpus=2)
    path = tmp_path / "config.json"
    for asked, sizes, code in ((True, 2, 0), (True, 8, 1), ("auto", 8, 0)):
        # A key that the doctor need not know may be "auto".
        given = {"kernels": {"all_reduce": asked}, "tensor_parallel": {"size": sizes}, "optimizer": "auto"}
        path.write_text(json.dumps(given))
        assert main(["doctor", "--config", str(path)]) == code
        text = capsys.readouterr().out
        assert ("on 4 hosts" in text) == (sizes == 8)
        assert "2 x H100" in text
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--config", str(path), "--tensor_parallel", "0"])
    assert "'0' is not a number of ranks: give an integer of at least 1" in capsys.readouterr().err
