"""DeepSpeed's FLOPs profiler: its counts are those of the layers' formulas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import parallel3d
from parallel3d.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from parallel3d.pipe import PipelineModule

ROWS, IN, MID, OUT = 32, 8, 16, 4
FIRST, SECOND = 2 * ROWS * IN * MID, 2 * ROWS * MID * OUT
PARAMETERS = (IN + 1) * MID + (MID + 1) * OUT


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, MID), nn.ReLU(), nn.Sequential(nn.Linear(MID, OUT)))


def test_a_models_profile(capsys: pytest.CaptureFixture[str]):
    found = get_model_profile(model(), (ROWS, IN), as_string=False)
    assert found == (FIRST + SECOND, (FIRST + SECOND) // 2, PARAMETERS)
    printed = capsys.readouterr().out
    assert f"depth 1: Sequential.0 {FIRST / 1e3:.2f} KFLOPS" in printed
    header, *rows = printed[printed.index("module") :].splitlines()
    assert header.split() == ["module", "params", "MACs", "forward", "FLOPS", "MFU"]
    table = {row.split()[0]: row for row in rows}
    assert list(table) == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.2", "Sequential.2.0"]
    size, share = (MID + 1) * OUT, SECOND / (FIRST + SECOND)
    cells = rf"    Sequential\.2\.0 +{size}\.00 +{size / PARAMETERS:.1%} +{SECOND / 2e3:.2f} KMACs +{share:.1%}"
    found = re.match(cells + r" +([\d.]+) (\w?)s +([\d.]+)% +([\d.]+) (\w?)FLOPS +-$", table["Sequential.2.0"])
    assert found, table["Sequential.2.0"]
    factors = {"": 1.0, "m": 1e-3, "u": 1e-6, "K": 1e3, "M": 1e6, "G": 1e9}
    seconds, rate = float(found[1]) * factors[found[2]], float(found[4]) * factors[found[5]]
    assert seconds * rate == pytest.approx(SECOND, rel=0.02)
    assert 0 < float(found[3]) < 100


def test_texts_arguments_and_modules_that_are_left_out(tmp_path: Path):
    file = tmp_path / "profile.txt"
    inputs = {"kwargs": {"input": torch.ones(ROWS, IN)}, "ignore_modules": [nn.Sequential], "output_file": file}
    found = get_model_profile(model(), warm_up=0, module_depth=1, **inputs)
    assert found == (f"{FIRST / 1e3:.2f} KFLOPS", f"{FIRST / 2e3:.2f} KMACs", f"{PARAMETERS:.2f} ")
    assert "Sequential.2.0" not in file.read_text()


def test_a_profiler_counts_backwards_too():
    net = model()
    profiler = FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(ROWS, IN)).sum().backward()
    profiler.stop_profile()
    # Gradients of both weights, and of the input of the second layer.
    assert profiler.get_total_flops() == 2 * FIRST + 3 * SECOND
    assert profiler.get_total_duration() > 0
    profiler.end_profile()
    assert profiler.get_total_flops() == 0


def test_a_pipelines_layers_have_their_share_of_its_forwards(tmp_path: Path):
    """The engine calls the layers, not their module, and in the backward recomputes what the last one needs."""
    layers = [nn.Linear(IN, MID), nn.ReLU(), nn.Sequential(nn.Linear(MID, OUT))]
    net = PipelineModule(layers, num_stages=1, loss_fn=nn.functional.mse_loss, activation_checkpoint_interval=3)
    file = tmp_path / "new" / "profile.txt"
    config = {
        "train_batch_size": 2 * ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "flops_profiler": {"enabled": True, "profile_step": 0, "output_file": str(file)},
    }
    engine = parallel3d.initialize(model=net, config=config)[0]
    engine.train_batch(iter([(torch.ones(ROWS, IN), torch.ones(ROWS, OUT))] * 2))
    rows = file.read_text().partition("module ")[2].splitlines()[1:]
    macs = {row.split()[0].removeprefix("PipelineModule"): row.split()[3:6] for row in rows}
    first, second = 2 * (2 * ROWS * IN * MID), 2 * (ROWS * MID * OUT)  # of 2 micro-batches
    for name, number in {"": first + second, ".layers.0": first, ".layers.2": second, ".layers.2.0": second}.items():
        assert macs[name] == [f"{number / 1e3:.2f}", "KMACs", f"{number / (first + second):.1%}"]
    assert len(macs) == 5


@pytest.mark.parametrize("calls", [True, False], ids=["by calls", "train_batch"])
def test_an_engine_profiles_the_step_that_the_configuration_names(tmp_path: Path, calls: bool):
    """A forward, or all micro-batches of a train_batch with their backwards."""
    file = tmp_path / "profile.txt"
    config = {
        "train_batch_size": 2 * ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False, "output_file": str(file)},
    }
    engine = parallel3d.initialize(model=model(), config=config)[0]
    for step in range(3):
        assert file.exists() == (step > 1)
        if calls:
            for _ in range(2):
                engine.backward(engine(torch.ones(ROWS, IN)).sum())
                engine.step()
        else:
            engine.module.register_forward_hook(lambda module, args, output: output.sum())
            engine.train_batch(iter([torch.ones(ROWS, IN)] * 2))
    flops = FIRST + SECOND if calls else 2 * (2 * FIRST + 3 * SECOND)
    assert f"FLOPs profile of step 1, on this rank\nparameters {PARAMETERS:.2f} , FLOPs {flops / 1e3:.2f} K" in (
        file.read_text()
    )


def test_nothing_is_imported_while_the_forwards_are_timed():
    """As torch's counter would at its first operator in a process, for a second."""
    script = """
import sys
import torch
from parallel3d.deepspeed.profiling.flops_profiler import FlopsProfiler
model, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
profiler = FlopsProfiler(model)
profiler.start_profile()
before = set(sys.modules)
model(x)
imported = set(sys.modules) - before
profiler.stop_profile()
print(sorted(imported), profiler.get_total_flops())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[] 32\n"


def test_a_profile_that_is_begun_anew_or_ended_without_a_stop_leaves_nothing_behind(tmp_path: Path):
    counted, file = model(), tmp_path / "profile"
    profiler = FlopsProfiler(counted)
    profiler.start_profile()
    profiler.start_profile()
    counted(torch.ones(ROWS, IN))
    profiler.stop_profile()
    profiler.stop_profile()
    profiler.print_model_profile(output_file=file)
    assert profiler.get_total_flops() == FIRST + SECOND
    assert f"depth 0: Sequential {(FIRST + SECOND) / 1e3:.2f} KFLOPS" in file.read_text()
    profiler.start_profile()
    profiler.end_profile()
    assert not any(module._forward_hooks for module in counted.modules())
    assert not _get_current_dispatch_mode_stack()
