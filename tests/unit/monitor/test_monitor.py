"""A step's line, the bar, and the logger."""

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import parallel3d
from parallel3d.costs.operators import step_flops
from parallel3d.monitor import progress, steps

SAMPLES, TOKENS, WORDS, WIDTH, PEAK = 2, 8, 16, 4, 1e9


def train(number: int, **config: Any) -> None:
    """Train a bigram model, whose forward is one product of [tokens, width] x [width, words]."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    config = {"train_batch_size": SAMPLES, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **config}
    engine = parallel3d.initialize(model=model, config={"monitor": {"peak_flops": PEAK}, **config})[0]
    for _ in range(number):
        engine.backward(engine(torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)).square().mean())
        engine.step()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_steps_line_has_tokens_and_mfu(capsys: pytest.CaptureFixture[str], compiled: bool):
    train(6, steps_per_print=3, compile={"enabled": compiled, "backend": "aot_eager"})
    out, err = capsys.readouterr()
    lines = re.findall(r"^step (\d): .* ([\d.e-]+) s/step, .* ([\d.e+]+) tokens/s, MFU ([\d.]+)%, memory", out, re.M)
    assert [int(step) for step, *_ in lines] == [3, 6]
    assert err == ""
    for _, seconds, tokens, mfu in lines:
        assert float(tokens) * float(seconds) == pytest.approx(SAMPLES * TOKENS, rel=1e-3)
        flops = 3 * 2 * SAMPLES * TOKENS * WIDTH * WORDS
        assert float(mfu) / 100 == pytest.approx(flops / (float(seconds) * PEAK), rel=1e-3, abs=6e-4)


def test_frozen_weights_get_no_gradients_that_count():
    frozen, trained = nn.Linear(WIDTH, 3 * WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)
    assert step_flops(8.0, [*frozen.parameters(), *trained.parameters()]) == 3 * 8 - 8 * 3 / 4
    assert step_flops(8.0, trained.parameters()) == step_flops(8.0, []) == 24


def test_evaluations_and_saves_between_steps_do_not_slow_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As in DeepSpeed; what the script does itself between the steps counts."""
    now = [0.0]
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = {"train_batch_size": SAMPLES, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": 2}
    engine = parallel3d.initialize(model=nn.Linear(WIDTH, WIDTH), config=config)[0]
    x = torch.zeros(SAMPLES, WIDTH)
    found = []
    for step in range(8):
        loss = engine(x).mean()
        now[0] += 1
        if step == 7:
            engine.eval()  # within a step it is part of it
            now[0] += 10
            engine.train()
        engine.backward(loss)
        engine.step()
        found.append(engine.reports.monitor.values.get("seconds_per_step"))
        if step == 2:
            engine.eval()
            engine(x)
            now[0] += 100
            engine.train()
        elif step == 3:
            engine.save_checkpoint(tmp_path)
            now[0] += 100
        elif step == 5:
            now[0] += 4
    assert found[1::2] == [1.0, 1.0, 1.0, (1 + 1 + 4 + 10) / 2]


def test_a_terminal_has_a_bar_instead_of_lines(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, ends = Terminal(), list[Callable[[], None]]()
    monkeypatch.setattr(progress, "atexit", SimpleNamespace(register=ends.append))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    train(4, steps_per_print=2, monitor={"peak_flops": PEAK, "progress": 8})
    sys.stdout.flush()
    shown = screen.getvalue()
    assert "step 2: " not in shown
    last = shown[shown.index("4/8") :]
    (end,) = ends
    end()
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is back
    for part in ("━", "loss", "norm", "lr", "s/step", "tokens/s", "MFU", "memory"):
        assert part in last


def test_all_that_is_printed_goes_through_the_logger(capsys: pytest.CaptureFixture[str]):
    level = parallel3d.logger.level
    parallel3d.logger.setLevel("WARNING")
    try:
        everything = dict.fromkeys(("dump_state", "memory_breakdown", "wall_clock_breakdown"), True)
        counted = {
            "flops_profiler": {"enabled": True, "profile_step": 0},
            "comms_logger": {"enabled": True, "verbose": True},
        }
        train(1, steps_per_print=1, **everything, **counted)
        assert capsys.readouterr() == ("", "")
        parallel3d.logger.warning("of the script")
        assert capsys.readouterr() == ("", "of the script\n")
    finally:
        parallel3d.logger.setLevel(level)
