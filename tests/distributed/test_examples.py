"""The examples that newcomers read first learn what the same layers learn in plain PyTorch on one process."""

from __future__ import annotations

import ast
import importlib
import os
import re
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from fault_ranks import FaultRanks
from ranks import RankPool
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from warm import WarmProcess, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
SEED, ORDER_SEED = 1234, 1234  # of layer 0, and of the order of samples: the defaults
STEPS, ALL_STEPS = 10, 75  # compared with plain PyTorch; until digits are read well
ADAMW = partial(torch.optim.AdamW, lr=0.01)

Layers = Sequence[Callable[[], nn.Module]]


def example(name: str) -> ModuleType:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def run_main(name: str, *arguments: str) -> tuple[Any, str]:
    """Run a script in this process, whose world it leaves as it is; what its `train` returned, and what it printed."""
    module, returned = example(name), []
    train = module.train
    with (
        patch.object(module, "train", lambda *args: returned.append(train(*args)) or returned[0]),
        patch.object(sys, "argv", [name, *arguments]),
        patch("parallel3d.comm.destroy"),
        redirect_stdout(StringIO()) as printed,
    ):
        module.main()
    return returned[0], printed.getvalue()


def run_all() -> dict[str, tuple[Any, str]]:
    steps = ["--steps", str(STEPS)]
    scripts = {"image_classifier": ["--steps", str(ALL_STEPS)], "custom_schedule": steps, "tensor_slicing": steps}
    return {name: run_main(name, *arguments) for name, arguments in scripts.items()}


@pytest.fixture(scope="module")
def ranks(rank_pool: RankPool, made_once: Any) -> list[dict[str, tuple[Any, str]]]:
    return made_once("examples", lambda _: rank_pool.run(4, run_all))[1]


def learn(
    layers: Layers,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> list[float]:
    """Return the losses of plain PyTorch."""
    net = nn.Sequential()
    for k, layer in enumerate(layers):
        torch.manual_seed(SEED + k)
        net.append(layer())
    used = optimizer(net.parameters())
    schedule = scheduler and scheduler(used)
    losses = []
    for inputs, labels in batches:
        loss = loss_fn(net(inputs), labels)
        used.zero_grad()
        loss.backward()
        used.step()
        if schedule:
            schedule.step()
        losses.append(loss.item())
    return losses


def refuse_layout() -> Any:
    with pytest.raises(SystemExit) as ended:
        run_main("train_gpt", "--layout", "pp3,dp7", "--data", str(EXAMPLES))
    return ended.value.code


def test_a_layout_of_other_processes_ends_a_script_with_its_error_alone(rank_pool: RankPool):
    (said,) = rank_pool.run(1, refuse_layout)
    assert "21 ranks does not fit a world of 1; start 21 processes" in said


def learn_digits() -> list[float]:
    """Return the classifier's first losses in plain PyTorch."""
    module = example("image_classifier")
    layers: Layers = [
        lambda: nn.Conv2d(1, 16, 3, padding=1),
        lambda: module.Residual(16, 16),
        lambda: module.Residual(16, 32, 2),
        lambda: module.Residual(32, 32),
        nn.Flatten,
        lambda: nn.Linear(32 * 4 * 4, 10),
    ]
    training, _ = module.pictures()
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(ORDER_SEED)).split(60)
    batches = [training[samples] for samples in order[:STEPS]]
    return learn(layers, F.cross_entropy, batches, scheduler=lambda o: OneCycleLR(o, 0.005, total_steps=ALL_STEPS))


def test_the_image_classifier_learns_what_one_process_does_and_reads_digits(
    ranks: list[dict[str, Any]], rank_pool: RankPool
):
    (expected,) = rank_pool.run(1, learn_digits)  # in a process that has imported scikit-learn
    for rank in ranks:
        (losses, accuracy), printed = rank["image_classifier"]
        assert losses[:STEPS] == pytest.approx(expected, abs=1e-5)
        assert accuracy is None or (accuracy > 0.95 and f"{accuracy:.1%} of the test pictures" in printed)
    assert sum(rank["image_classifier"][0][1] is not None for rank in ranks) == 1


def test_a_schedule_of_ones_own_is_drawn_and_learns_what_one_process_does(ranks: list[dict[str, Any]]):
    samples = example("custom_schedule").samples()
    batches = [tuple(map(torch.stack, zip(*samples[k : k + 32], strict=True))) for k in range(0, 256, 32)] * 2
    layers: Layers = [lambda: nn.Linear(32, 32), nn.Tanh] * 4
    expected = learn(layers, F.mse_loss, batches[:STEPS])
    for rank in ranks:
        assert rank["custom_schedule"][0] == pytest.approx(expected, abs=1e-5)
    printed = ranks[0]["custom_schedule"][1]
    assert re.findall(r"bubble ([\d.]+)%", printed) == ["27.3", "11.1"]  # 3 / 11 and 3 / 27, the papers' formulas
    assert "stage 3 |   .   .   .   0 (0)   1 (1)   2 (2)   3 (3) <0>" in printed
    assert "activations held: [4, 4, 4, 4]" in printed


def test_slices_of_ones_own_layers_learn_what_one_process_does(ranks: list[dict[str, Any]]):
    module = example("tensor_slicing")
    layers: Layers = [*[lambda: module.GatedMLP(32, 50)] * 3, lambda: module.SlicedHead(32, 50)]
    steps = [map(module.micro_batch, range(4 * k, 4 * k + 4)) for k in range(STEPS)]
    batches = [tuple(map(torch.cat, zip(*micro_batches, strict=True))) for micro_batches in steps]
    expected = learn(layers, F.mse_loss, batches, partial(torch.optim.SGD, lr=0.2, momentum=0.9))
    for rank in ranks:
        assert rank["tensor_slicing"][0] == pytest.approx(expected, abs=1e-5)
    assert "'layers.0.gate_value.weight': (50, 32)" in ranks[0]["tensor_slicing"][1]  # half of 100 rows


def test_two_nodes_train_and_one_goes_on_where_they_were(tmp_path: Path):
    """Two launchers of torchrun on this host stand for two nodes, of two ranks each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = [str(EXAMPLES / "multi_node.py"), "--save", str(tmp_path / "saved"), "--steps"]
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    commands = [[*torchrun, "--master_port", port, "--node_rank", node, *script, "10"] for node in "01"]
    nodes = [WarmProcess(tmp_path, dict(os.environ), "forked_ranks", *command) for command in commands]
    said = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    places = [
        re.findall(r"rank (\d) is local rank (\d) of .*?: stage (\d), replica (\d)", output) for output, _ in said
    ]
    assert [sorted(place) for place in places] == [
        [("0", "0", "0", "0"), ("1", "1", "0", "1")],
        [("2", "0", "1", "0"), ("3", "1", "1", "1")],
    ]
    ended = FaultRanks().run(2, tmp_path, run_script, *script, "15", timeout=200)
    assert ended.codes == [0, 0], ended.outputs
    assert "goes on from step 10" in ended.outputs[0]
    training = example("multi_node").samples()
    layers: Layers = [lambda: nn.Linear(32, 32), nn.Tanh] * 4
    expected = learn(layers, F.mse_loss, [training[k : k + 32] for k in range(0, 256, 32)] * 2)
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (.*)", said[0][0] + ended.outputs[0])
    }
    assert losses == pytest.approx({step: expected[step - 1] for step in (5, 10, 15)}, abs=1e-5)


def test_the_table_lists_each_example_whose_head_says_what_it_shows():
    listed = re.findall(r"^\| \[(\w+\.py)\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    docstrings = {path.name: ast.get_docstring(ast.parse(path.read_text())) for path in EXAMPLES.glob("*.py")}
    assert sorted(listed) == sorted(docstrings.keys() - {"gpt.py", "corpus.py"})  # which train_gpt.py imports
    for name in listed:
        shows, commands = docstrings[name].rsplit("\n\n", 1)
        assert len(list(filter(None, shows.splitlines()))) >= 5
        assert f"examples/{name}" in commands
