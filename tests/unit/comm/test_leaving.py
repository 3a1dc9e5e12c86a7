"""A process that ends waits until gloo's threads have let go of their tensors."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread

import pytest
import torch.distributed as dist

from parallel3d import comm
from parallel3d.comm import environment


def task(directory: Path, number: int, name: str, state: str) -> Path:
    stat = directory / str(number) / "stat"
    stat.parent.mkdir(exist_ok=True)
    stat.write_text(f"{number} ({name}) {state} 1 2 3")
    return stat


@pytest.fixture
def forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_LEAVE_TIMEOUT_S", float("inf"))


@pytest.mark.usefixtures("forever")
def test_a_thread_at_work_is_waited_for(tmp_path: Path) -> None:
    task(tmp_path, 1, "python", "R")
    task(tmp_path, 2, "pt_gloo_runloop", "S")
    task(tmp_path, 3, "pt_gloo_runloop", "R")
    seen: list[str] = []

    def end_later() -> None:
        time.sleep(0.1)
        seen.append("at rest")
        task(tmp_path, 3, "pt_gloo_runloop", "S")

    ending = Thread(target=end_later)
    ending.start()
    environment._rest(tmp_path)
    assert seen == ["at rest"]
    ending.join()


@pytest.mark.usefixtures("forever")
def test_what_is_not_gloos_and_what_is_not_there_is_not_waited_for(tmp_path: Path) -> None:
    task(tmp_path, 1, "a) (name", "R")
    (tmp_path / "2").mkdir()
    environment._rest(tmp_path)
    environment._rest(tmp_path / "absent")


def test_a_thread_that_never_rests_is_left_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task(tmp_path, 1, "pt_gloo_runloop", "R")
    monkeypatch.setattr(environment, "_LEAVE_TIMEOUT_S", 0.1)
    environment._rest(tmp_path)


class Graph:
    """A CUDA graph that notes whether the world was there when it was reset."""

    def __init__(self) -> None:
        self.reset_in_world: list[bool] = []

    def reset(self) -> None:
        self.reset_in_world.append(dist.is_initialized())


def test_graphs_are_reset_before_the_world_is_destroyed(tmp_path: Path) -> None:
    """NCCL's communicators wait for graphs that hold collectives."""
    comm.destroy()  # a world that an earlier test has left
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    graph, freed = Graph(), Graph()
    for each in (graph, freed):
        environment.reset_before_destroy(each)
    del freed, each
    comm.destroy_process_group(dist.new_group([0]))
    assert graph.reset_in_world == []
    comm.destroy()
    assert graph.reset_in_world == [True]
