"""`p3d plan` from the command line: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from records import timing

from parallel3d.cli import main
from parallel3d.config import load
from parallel3d.launcher import main as launch
from parallel3d.monitor.run_record import ModelFingerprint, RankRecord, RunRecord
from parallel3d.planner.calibrate.calibration import read_calibration
from parallel3d.planner.formats import duration
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


def test_the_timeline_is_the_step_but_for_the_optimizer(target, tmp_path) -> None:
    command = ["plan", "--model", target, "--cluster", "4xH200", "--global-batch", "16", "--out", str(tmp_path)]
    assert main(command) == 0
    result = PlanResult.model_validate_json((tmp_path / "plan.json").read_text())
    best, pipeline = result.best[0], max(span.end for span in result.timeline)
    assert pipeline + best.breakdown["optimizer"] == pytest.approx(best.seconds, rel=1e-6)
    assert sum(best.breakdown.values()) == pytest.approx(best.seconds, rel=1e-6)
    assert best.bubble == pytest.approx(best.breakdown["bubble"] / best.seconds)
    told = f"{duration(pipeline)} of the step&#39;s {duration(best.seconds)}"
    assert told in (tmp_path / "plan.html").read_text()
    assert told.replace("&#39;", "'") in (tmp_path / "timeline.svg").read_text().replace("&#39;", "'")


def plan_into(directory: Path, model: str = "gpt2") -> int:
    command = ["plan", "--model", model, "--cluster", "1xL40S", "--global-batch", "1", "--seq", "64", "--top", "1"]
    return main([*command, "--out", str(directory)])


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"compile": "auto"}, 'compile is "auto", which nothing fills in'),
        ({"pipeline": "auto"}, None),  # that is what a plan says
        ({"pipeline": 1}, "pipeline is 1; give a mapping"),
        ({"compile": [2]}, "compile is [2]: give a mapping"),
    ],
)
def test_a_section_that_is_no_mapping_is_filled_or_told(section, told, target, tmp_path, capsys) -> None:
    (tmp_path / "given.json").write_text(json.dumps(section))
    command = ["plan", "--model", target, "--cluster", "2xH200", "--global-batch", "16", "--out", str(tmp_path / "out")]
    assert main([*command, "--config", str(tmp_path / "given.json")]) == (0 if told is None else 2)
    assert told is None or told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "plan.json", "ranks.json", "plan.html"])
def test_a_file_that_no_plan_wrote_is_not_replaced(name, tmp_path, capsys) -> None:
    (tmp_path / name).write_text('{"model_type": "llama"}')
    assert plan_into(tmp_path) == 2
    assert f"{name} is not what an earlier p3d plan wrote" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, '{"model_type": "llama"}')]


def test_an_earlier_plan_is_replaced_unless_its_configuration_was_edited(tmp_path, capsys) -> None:
    config = tmp_path / "config.json"
    assert [plan_into(tmp_path), plan_into(tmp_path)] == [0, 0]
    edited = json.dumps({**json.loads(config.read_text()), "seed": 7})
    config.write_text(edited)
    assert plan_into(tmp_path) == 2
    assert config.read_text() == edited
    config.unlink()
    assert plan_into(tmp_path) == 0
    assert plan_into(tmp_path, "llama2-70b") == 1, "nothing fits"
    assert not config.exists(), "the earlier configuration is not of this plan"
    assert plan_into(tmp_path) == 0


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--global-batch", 10**30, "give the samples of a step, 1 to 100000000"),
        ("--seq", 10**12, "positions for 1 to 16777216 tokens"),
        ("--model", "deep", "deep has 2003 layers; plan for a model of 1100 or fewer"),
    ],
)
def test_numbers_beyond_any_training_are_told_at_once(option, value, told, tmp_path, monkeypatch, capsys) -> None:
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 2000,
    }
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    monkeypatch.chdir(tmp_path)
    options = {"--model": "7b", "--cluster": "8xH100", "--global-batch": 8, "--seq": 64, option: value}
    assert main(["plan", *(str(part) for pair in options.items() for part in pair)]) == 2
    assert told in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, capsys) -> None:
    (tmp_path / "file").touch()
    assert plan_into(tmp_path / "file" / "out") == 2
    assert "file/out, where nothing can be written (Not a directory)" in capsys.readouterr().err


def test_where_nothing_fits_the_remedy_is_printed(tmp_path, capsys) -> None:
    command = ["plan", "--model", "llama3-70b", "--cluster", "2xA100", "--global-batch", "16", "--out", str(tmp_path)]
    assert main(command) == 1
    assert "The smallest change" in capsys.readouterr().out
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cluster 4xH200 --global-batch 16", "give --model"),
        ("--model gpt2 --global-batch 16", "give --cluster"),
        ("--model gpt2 --cluster 4xH200", "give --global-batch N"),
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
        tensor_ranks=1,
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


@pytest.mark.parametrize("options", [["--explain", "pp3"], ["--reserve", "a bit"]])
def test_what_cannot_be_is_told_before_the_search(options, tmp_path, capsys) -> None:
    command = ["plan", "--model", "gpt2", "--cluster", "4xH200", "--global-batch", "16", "--out", str(tmp_path / "out")]
    with suppress(SystemExit):
        assert main([*command, *options]) == 2
    printed = capsys.readouterr()
    assert "layouts" not in printed.out
    assert (
        "'pp3'; leave some of it open" in printed.err
        or "'a bit' is not a share: give a number such as 0.05" in printed.err
    )


def test_what_cannot_be_built_is_not_offloaded(tmp_path, capsys) -> None:
    """Of 101 GPUs neither replicas, nor stages, nor tensor-parallel ranks of 32 heads make a layout: no memory would help."""
    command = ["plan", "--model", "7b", "--cluster", "101xH200", "--global-batch", "64", "--out", str(tmp_path)]
    assert main(command) == 1
    printed = capsys.readouterr().out
    assert "can't be split over 101 ranks" in printed
    assert "give another number of GPUs, or --global-batch" in printed
    assert "With optimizer state" not in printed


def test_short_steps_have_digits_that_tell_them_apart(target, tmp_path, capsys) -> None:
    assert main(["plan", "--model", target, "--cluster", "4xH200", "--global-batch", "16", "--out", str(tmp_path)]) == 0
    best = PlanResult.model_validate_json((tmp_path / "plan.json").read_text()).best[0]
    assert best.low < 0.1
    assert f" {best.seconds:.4g} " in (printed := capsys.readouterr().out)
    assert f" {best.low:.3g}-{best.high:.3g} " in printed


def test_what_was_measured_on_other_devices_is_refused(target, tmp_path, capsys) -> None:
    record(1.0, 0.05).write(tmp_path / "runs")
    out, corrections = ["--out", str(tmp_path / "out")], str(tmp_path / "out" / "calibration.json")
    common, runs = ["plan", "--model", target, "--global-batch", "8", *out], str(tmp_path / "runs")
    assert main([*common, "--cluster", "2xH200", "--calibrate", runs]) == 0
    for options in (["--calibrate", runs], ["--compare", runs], ["--calibration", corrections]):
        assert main([*common, "--cluster", "2xA100", *options]) == 2
        assert "measured on NVIDIA H200 with nccl, but 2xA100 has A100" in capsys.readouterr().err


def test_without_a_home_there_is_an_error_with_the_remedy(monkeypatch, capsys) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert main(["plan", "--model", "gpt2", "--global-batch", "8"]) == 2
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err


def test_as_many_layouts_are_listed_as_asked_for(target, tmp_path) -> None:
    command = [
        "plan",
        "--model",
        target,
        "--cluster",
        "4xH200",
        "--global-batch",
        "16",
        "--out",
        str(tmp_path),
        "--top",
    ]
    ranked = []
    for count in (2, 30):
        assert main([*command, str(count)]) == 0
        best = PlanResult.model_validate_json((tmp_path / "plan.json").read_text()).best
        assert len({p.layout for p in best}) == count
        assert list(best) == sorted(best, key=lambda p: p.seconds)
        ranked.append(best)
    assert ranked[0][0].layout == ranked[1][0].layout


def test_memory_is_kept_free_and_a_full_rank_is_flagged(target, tmp_path, capsys) -> None:
    """The cluster has just the memory of the winner: it is flagged, and with a reserve of a tenth another one wins or none."""

    resident = {"zero_optimization": {f"offload_{what}": {"device": "none"} for what in ("optimizer", "param")}}
    (tmp_path / "resident.json").write_text(json.dumps(resident))

    def plan(memory: float, reserve: str, *options: str) -> PlanResult | None:
        gpus = [{"device": "H200", "count": 2, "memory": f"{memory} MiB"}]
        hosts = {"hosts": [{"nvlink": {"bandwidth": "300 GB/s"}, "gpus": gpus}]}
        (tmp_path / "cluster.json").write_text(json.dumps(hosts))
        command = ["plan", "--model", target, "--cluster", str(tmp_path / "cluster.json"), "--global-batch", "16"]
        done = main([*command, "--out", str(tmp_path / "out"), "--reserve", reserve, *options])
        return None if done else PlanResult.model_validate_json((tmp_path / "out" / "plan.json").read_text())

    free = plan(16 * 1024, "0%")
    assert free is not None
    assert "it fails" not in capsys.readouterr().out
    peak = free.best[0].peak / 2**20
    full = plan(peak / 0.97, "0")
    assert full is not None
    assert full.best[0].layout == free.best[0].layout
    assert f"{full.best[0].layout} takes 97% of a rank's memory" in capsys.readouterr().out
    assert "⚠" in (tmp_path / "out" / "plan.html").read_text()
    # No search with offload, which another test has.
    kept = plan(peak / 0.97, "5%", "--config", str(tmp_path / "resident.json"))
    assert kept is None or kept.best[0].peak <= 0.95 * peak / 0.97 * 2**20
    assert main(["plan", "--model", target, "--cluster", "2xH200", "--reserve", "100%"]) == 2
    assert "--reserve is 100%; give a share" in capsys.readouterr().err


def test_overlapping_intervals_are_said_to_be_so(target, tmp_path, capsys) -> None:
    command = ["plan", "--model", target, "--cluster", "4xH200", "--global-batch", "16", "--out", str(tmp_path)]
    assert main([*command, "--top", "3"]) == 0
    winner, *others = PlanResult.model_validate_json((tmp_path / "plan.json").read_text()).best
    alike = [p for p in others if p.low <= winner.high]
    assert alike
    assert f"the 90% intervals of the first and {len(alike)} of 2 others overlap" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cluster", "lines", "started"),
    [
        (
            "2xH200",
            {"run.sh": 'exec parallel3d --num_gpus 2 "$@" --deepspeed_config'},
            ["2 x ", " train.py --deepspeed"],
        ),
        (
            "2xcpu",
            {"run.sh": 'exec parallel3d --num_procs 2 "$@" --deepspeed_config'},
            ["2 x ", " train.py --deepspeed"],
        ),
        (
            "2x4xH200",
            {
                "run.sh": "exec parallel3d --ranks '",
                "run.sbatch": "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n#SBATCH --gpus-per-node=4\n",
            },
            [f" host{k} 'sh -s'" for k in range(2)] + ["out of plan/ranks.json' --master_addr=host0"],
        ),
    ],
)
def test_a_plan_ends_in_something_to_run(cluster, lines, started, target, tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "out of plan"
    command = ["plan", "--model", target, "--cluster", cluster, "--global-batch", "16", "--out", str(out), "--top", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert {name for name in ("run.sh", "run.sbatch") if (out / name).exists()} == lines.keys()
    for name, line in lines.items():
        text = (out / name).read_text()
        assert line in text
        assert f"'{out / 'config.json'}'" in text
        assert f"run: {'sbatch ' if name == 'run.sbatch' else ''}'{out / name}' train.py" in printed
        assert (out / name).stat().st_mode & 0o111
        assert name in (out / "plan.html").read_text()
        subprocess.run(["sh", "-n", out / name], check=True)
    (tmp_path / "parallel3d").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "parallel3d").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    given = subprocess.run([out / "run.sh", "--dry_run", "train.py"], capture_output=True, text=True, check=True).stdout
    assert launch(given.splitlines()) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in started), printed
