"""`p3d plan` from the command line: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import timing

from parallel3d.cli import main
from parallel3d.config import load
from parallel3d.monitor.run_record import ModelFingerprint, RankRecord, RunRecord
from parallel3d.planner.calibrate.calibration import read_calibration
from parallel3d.planner.search.result import PlanResult

SUBJECT = """
import torch
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.parity import Subject

CONFIG = DecoderConfig(vocab_size=512, hidden_size=256, ffn_size=512, num_layers=4, num_heads=4, max_positions=64)

def subject():
    def micro_batch(index):
        tokens = torch.randint(512, (2, 65))
        return tokens[:, :-1], tokens[:, 1:]
    return Subject(decoder(CONFIG), micro_batch, causal_lm_loss, {"bf16": {"enabled": True}})
"""
LAYERS = ("TokenEmbedding", *["Block"] * 4, "FinalNorm", "Head")


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SUBJECT)
    return f"{tmp_path / 'train.py'}:subject"


def test_a_users_function_is_planned_for_explained_and_written_down(target, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    command = ["plan", "--model", target, "--cluster", "4xH200", "--global-batch", "16", "--out", str(out)]
    assert main([*command, "--explain", "pp4", "--top", "3"]) == 0
    printed = capsys.readouterr().out
    result = PlanResult.model_validate_json((out / "plan.json").read_text())
    assert len(result.best) == 3
    assert all(prediction.layout in printed for prediction in result.best)
    assert f"compared with {result.best[0].layout}" in printed
    assert result.seq == 64
    config = load(json.loads((out / "config.json").read_text()))
    assert config.pipeline.stages == result.best[0].stages
    assert config.bf16.enabled
    assert [rank["rank"] for rank in json.loads((out / "ranks.json").read_text())] == [0, 1, 2, 3]
    assert {path.name for path in out.iterdir()} >= {"plan.html", "timeline.svg", "memory.svg", "trade_off.svg"}


def test_where_nothing_fits_the_remedy_is_printed(tmp_path, capsys) -> None:
    command = ["plan", "--model", "megatron-1t", "--cluster", "8xA100", "--global-batch", "64", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "The smallest change" in capsys.readouterr().out
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cluster 4xH200 --global-batch 16", "give --model"),
        ("--model gpt2 --global-batch 16", "give --cluster"),
        ("--model gpt2 --cluster 4xH200", "--global-batch is None"),
        ("--model gpt2 --cluster 0xH200 --global-batch 16", "no GPUs"),
        ("--model gpt2 --cluster 4xH2000 --global-batch 16", "H200"),
        ("--model gtp2 --cluster 4xH200 --global-batch 16", "gpt2"),
        ("--model gpt2 --cluster 4xH200 --global-batch 16 --explain pp4,zb-loopd", "zb-loop"),
        ("--model gpt2 --cluster 4xH200 --compare nowhere", "nowhere"),
        ("--model gpt2 --cluster 4xH200 --global-batch 16 --calibrate a --calibration b", "give one of them"),
    ],
)
def test_what_cannot_be_done_is_an_error_with_the_remedy(arguments, message, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["plan", *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def record(step: float, forward: float) -> RunRecord:
    """Return a record of the function's model at pp2 on two H200s."""
    return RunRecord(
        layout="pp2,1f1b,m4,mb2",
        stages=2,
        replicas=1,
        slices=1,
        sequence_parallel=False,
        chunks=1,
        placement="loop",
        schedule="1f1b",
        micro_batch=2,
        micro_batches=4,
        zero=0,
        recompute=0,
        bounds=(0, 3, 7),
        seq=64,
        program=None,
        model=ModelFingerprint(layers=LAYERS, parameters=(1,) * 7),
        backend="nccl",
        versions={},
        config={"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}},
        instructions={f"{op}@{c}": timing(forward * (1 + (op == "B"))) for op in "FB" for c in (0, 1)},
        step=timing(step),
        optimizer=timing(1e-5),
        breakdown={"forward": 4 * forward, "backward": 8 * forward, "step": 1e-5},
        bubble=0.2,
        ranks=tuple(RankRecord(rank=r, stage=r, device="NVIDIA H200", parts={}) for r in range(2)),
    )


def test_runs_correct_the_prediction_and_stand_beside_it(target, tmp_path, capsys) -> None:
    common = ["plan", "--model", target, "--cluster", "2xH200", "--out", str(tmp_path / "out")]
    record(1.0, 0.05).write(tmp_path / "runs" / "a")
    assert main([*common, "--compare", str(tmp_path / "runs")]) == 0
    uncorrected = capsys.readouterr().out
    assert "F@0" in uncorrected
    assert main([*common, "--calibrate", str(tmp_path / "runs"), "--global-batch", "8"]) == 0
    slow = PlanResult.model_validate_json((tmp_path / "out" / "plan.json").read_text())
    found = read_calibration(tmp_path / "out" / "calibration.json")
    assert found.factors["host"].value > 1.5
    assert main([*common, "--global-batch", "8"]) == 0
    plain = PlanResult.model_validate_json((tmp_path / "out" / "plan.json").read_text())
    assert slow.best[0].seconds > 1.5 * plain.best[0].seconds
    assert main([*common, "--calibration", str(tmp_path / "out" / "calibration.json"), "--global-batch", "8"]) == 0
    again = PlanResult.model_validate_json((tmp_path / "out" / "plan.json").read_text())
    assert again.best[0].seconds == slow.best[0].seconds


def test_runs_of_another_model_or_of_more_ranks_are_refused(target, tmp_path, capsys) -> None:
    record(1.0, 0.05).write(tmp_path / "runs")
    common = ["plan", "--compare", str(tmp_path / "runs")]
    assert main([*common, "--model", "gpt2", "--cluster", "2xH200"]) == 2
    assert "give the run's model" in capsys.readouterr().err
    assert main([*common, "--model", target, "--cluster", "1xH200"]) == 2
    assert "give the run's cluster" in capsys.readouterr().err
