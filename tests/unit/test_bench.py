"""The benchmark: names of cases, FLOPs, agreement, tables, and a run of it on the CPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_ranks import run_process

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import ours
import run
import train_llama
from cases import CaseError, Workload, command_of, parse_case
from results import agreement, as_markdown, baseline_of, describe_agreement, gains_over_1f1b, make_table
from table import insert, make_section, selected

from parallel3d.schedule.builders import interleaved, one_f_one_b
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.timing import simulate, unit_cost

BENCH = Path(run.__file__).parent
WORK = Workload("7b", micro_batch=1, micro_batches=16, warmup=3, steps=6)


def record(name: str, step_s: float = 1.0, loss: float = 10.0, **result: Any) -> dict[str, Any]:
    """Return the record of a case that passed."""
    figures = {"step_s": step_s, "min_s": step_s, "max_s": step_s, "tok_s": 1000, "mfu": 0.4, "peak_gib": [1.0, 2.5]}
    return run.make_record(parse_case(name), "ok") | {"result": figures | {"loss": [loss]} | result}


# Names


@pytest.mark.parametrize(
    ("name", "schedule", "chunks", "zero", "world_size"),
    [
        ("dp4-zero2-bf16acc-permicro", "1f1b", 1, 2, 4),
        ("pp4-1f1b", "1f1b", 1, 0, 4),
        ("pp4-zb-h1", "zb-h1", 1, 0, 4),
        ("pp4-zbv", "zbv", 2, 0, 4),
        ("pp4-interleaved2", "interleaved", 2, 0, 4),
        ("pp4-zb-looped4-cap1.5", "zb-looped", 4, 0, 4),
        ("pp2dp2-zero1-interleaved-v4", "interleaved", 4, 1, 4),
    ],
)
def test_a_name_says_what_runs(name: str, schedule: str, chunks: int, zero: int, world_size: int):
    case = parse_case(name)
    assert (case.framework, case.schedule, case.chunks, case.zero) == ("parallel3d", schedule, chunks, zero)
    assert case.world_size == world_size


@pytest.mark.parametrize(
    "name",
    [
        "4pp",
        "ds-pp4-zbv",
        "torch-pp4-zb-h1",
        "fsdp-pp4",
        "ds-dp4-bf16acc",
        "pp4-reshard",
        "pp2pp2-1f1b",
        "dp4-zero1.5",
        "ds",
        "plain-dp2",
        "plain-pp1-bf16acc",
    ],
)
def test_other_names_are_refused(name: str):
    with pytest.raises(CaseError, match=name):
        parse_case(name)


def test_own_command():
    capped = command_of(parse_case("pp4-zb-looped4-cap1.5"), WORK, None)
    assert capped[capped.index("--max_in_flight") + 1] == "1.5"
    script, *arguments = command_of(parse_case("pp2dp2-zbv-zero2-bf16acc-once"), WORK, None)
    assert Path(script).name == "ours.py"
    assert (
        " ".join(arguments) == "--size 7b --micro_batch 1 --micro_batches 16 --warmup 3 --steps 6 --pp 2 --dp 2 "
        "--schedule zbv --chunks 2 --zero 2 --placement v --accumulate bf16 --reduce_per_micro_batch false"
    )
    kernels = " ".join(command_of(parse_case("dp4-zero1-fusedstep-reducescatter"), WORK, None))
    assert "--kernels reduce_scatter,optimizer_step" in kernels
    sliced = " ".join(command_of(parse_case("pp2tp2-zb-h1-sp-shardcopies-compile-cudnn"), WORK, None))
    assert "--pp 2 --dp 1 --tp 2 --sequence_parallel --shard_copies --compile --cudnn " in sliced
    script, *plain = command_of(parse_case("plain-pp1-compile-cudnn"), WORK, None)
    assert Path(script).name == "plain.py"
    assert " ".join(plain) == f"{' '.join(arguments[:10])} --compile --cudnn"


def test_how_layers_are_split():
    def arguments(name: str, weights: str = "") -> str:
        work = Workload("7b", micro_batch=1, micro_batches=16, warmup=3, steps=6, weights=weights)
        return " ".join(command_of(parse_case(name), work, None))

    assert arguments("pp4-half-profile-bf16acc").endswith("--units half --partition profile --accumulate bf16")
    assert arguments("pp4-weights", "[1, 2.5]").endswith('--partition {"weights": [1, 2.5]}')
    with pytest.raises(CaseError, match="--weights"):
        arguments("pp4-weights")
    with pytest.raises(CaseError, match="flops, parameters exclude"):
        arguments("pp4-flops-parameters")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ds-dp4-zero2", "ds_pipe.py --size 7b --micro 1 --acc 16 --pp 0 --zero 2"),
        ("ds-pp4", "ds_pipe.py --size 7b --micro 1 --acc 16 --pp 4 --zero 1"),
        ("torch-pp4-zbv", "torch_pipe.py --size 7b --micro 1 --acc 16 --pp 4 --schedule ZBVZeroBubble --chunks 2"),
        ("fsdp-dp4-compile", "fsdp.py --size 7b --micro 1 --acc 16 --compile"),
        ("megatron-tp2pp2", "megatron_pipe.py --size 7b --micro 1 --acc 16 --pp 2 --tp 2 --chunks 1"),
    ],
)
def test_peers_commands(name: str, expected: str):
    command = command_of(parse_case(name), WORK, Path("peers"))
    assert " ".join(command[1:]) == f"--warmup 3 --steps 6 peers/{expected}"
    with pytest.raises(CaseError, match="--peers"):
        command_of(parse_case(name), WORK, None)


# FLOPs


@pytest.mark.parametrize(("units", "names"), [("block", ["Block"]), ("half", ["Attention", "FeedForward"])])
def test_parameters_are_those_of_the_layers(units: str, names: list[str]):
    size = ours.SIZES["7b"]
    with torch.device("meta"):
        layers = [spec.build() for spec in ours.decoder_layers(size, units)]
    assert [type(layer).__name__ for layer in layers] == ["Embedding", *names * 32, "Head"]
    numel = sum(p.numel() for layer in layers for p in layer.parameters())
    assert ours.num_parameters(size) == numel == 6_738_415_616


def test_utilization_is_the_one_that_peers_report():
    # 6 FLOPs for each of 6,607,343,616 parameters in matmuls; 32 layers of attention with 6 x 4096 x 4096 a token.
    assert ours.flops_per_token(ours.SIZES["7b"]) == 42_865_287_168
    # Published with these step times: 16 micro-batches of 4096 tokens, once on 4 stages, and on 4 replicas each.
    assert ours.model_flops_utilization(ours.SIZES["7b"], 16 * 4096, 1.545, 4) == pytest.approx(0.460, abs=5e-4)
    assert ours.model_flops_utilization(ours.SIZES["7b"], 64 * 4096, 5.671, 4) == pytest.approx(0.501, abs=5e-4)


@pytest.mark.parametrize("units", [["--units", "block"], ["--units", "half"], ["--sliced_layers"]], ids=str)
def test_a_ranks_flops_are_those_of_its_layers(monkeypatch: pytest.MonkeyPatch, units: list[str]):
    monkeypatch.setattr(sys, "argv", ["ours.py", *units])
    size = ours.SIZES["tiny"]
    with torch.device("meta"):
        layers = torch.nn.ModuleList(spec.build() for spec in ours.layer_specs(ours.parse_arguments()))
    gemm, attention = ours.flops_per_token_of(layers, size.seq)
    norms = (2 * size.layers + 1) * size.hidden  # which the convention counts among the matrices
    assert gemm + attention + 6 * norms == ours.flops_per_token(size)
    assert attention == 6 * 8 * 64 * 32


@pytest.mark.parametrize(
    ("blocks", "parts", "units", "behind", "bounds"),
    [
        (32, 4, 1, 1, [0, 9, 17, 25, 34]),
        (8, 1, 1, 1, [0, 10]),
        (7, 3, 1, 2, [0, 4, 6, 10]),
        (7, 3, 2, 1, [0, 7, 11, 16]),
    ],
)
def test_stages_hold_equally_many_blocks(blocks: int, parts: int, units: int, behind: int, bounds: list[int]):
    assert ours.equal_block_bounds(blocks, parts, units, behind) == bounds


def test_halves_in_a_row_are_a_block():
    torch.manual_seed(0)
    size = ours.SIZES["tiny"]
    block = train_llama.Block(size)
    halves = torch.nn.Sequential(train_llama.Attention(size), train_llama.FeedForward(size))
    halves.load_state_dict(dict(zip(halves.state_dict(), block.state_dict().values(), strict=True)))
    x = torch.randn(2, size.seq, size.hidden)
    assert torch.equal(halves(x), block(x))


# Simulation


def test_1f1b_at_another_schedules_costs():
    program = interleaved(4, 8, 2)
    assert ours.as_one_f_one_b(program, lambda i: unit_cost(i) / 2).makespan == simulate(one_f_one_b(4, 8)).makespan
    split = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.25, Op.BACKWARD_WEIGHT: 0.75, Op.BACKWARD: 9.0}

    def cost(i: Instruction) -> float:
        return split[i.op] / 2

    assert ours.as_one_f_one_b(program, cost).makespan == pytest.approx(3 * (8 + 4 - 1))


# Results


def test_losses_on_the_same_data_agree_or_are_reported():
    near, far = record("dp4-zero1", loss=10.0), record("fsdp-dp4", loss=10.3)
    groups = agreement([near, record("ds-dp4-zero1", loss=10.1), record("pp4-1f1b", loss=12.0)])
    assert [(group["dp"], group["agree"]) for group in groups] == [(1, True), (4, True)]
    assert groups[1]["spread"] == pytest.approx(0.1 / 10.05, abs=1e-5)
    (group,) = agreement([near, far])
    assert not group["agree"]
    assert "2.96% apart, MORE THAN 2%" in describe_agreement([group])[0]
    (group,) = agreement([near, record("dp4-zero2", loss=float("nan"))])
    assert not group["agree"]
    assert "NOT ALL FINITE" in describe_agreement([group])[0]


def test_baseline_is_the_peer_of_the_same_layout_and_zero_stage():
    names = ["dp4-zero1", "dp4-zero2", "pp4-1f1b", "pp4-zbv", "ds-dp4-zero1", "ds-dp4-zero2", "fsdp-dp4"]
    records = {name: record(name) for name in names}
    everything = list(records.values())

    def baseline(name: str, *preferred: str) -> str:
        found = baseline_of(records[name], everything, preferred)
        return found["case"] if found else ""

    assert baseline("dp4-zero1") == "ds-dp4-zero1"
    assert baseline("dp4-zero2") == "ds-dp4-zero2"
    assert baseline("pp4-zbv") == "pp4-1f1b"
    assert baseline("dp4-zero2", "fsdp-dp4") == "fsdp-dp4"
    assert baseline("pp4-zbv", "fsdp-dp4") == ""
    everything.remove(records["ds-dp4-zero2"])
    assert baseline("dp4-zero2") == "ds-dp4-zero1"


def test_gain_over_1f1b_beside_the_simulators():
    plain = record("pp4-1f1b", 2.0)
    better = record("pp4-zbv", 1.8, simulated_s=1.7, simulated_1f1b_s=2.0)
    assert gains_over_1f1b(better, [better, plain]) == pytest.approx((0.1, 0.15))
    assert gains_over_1f1b(better, [better]) is None
    assert gains_over_1f1b(plain, [better, plain]) is None


def test_markdown_table_replaces_its_section_alone():
    failed = run.make_record(parse_case("dp4-zero3"), "failed") | {"error": ["ValueError: no"]}
    table = as_markdown(make_table([record("dp4-zero1", 2.0), failed, record("ds-dp4-zero1", 2.5)]))
    assert table.splitlines() == [
        "| case | s/step | min-max | tokens/s | MFU | peak GiB | loss | time / baseline |",
        "|---|---|---|---|---|---|---|---|",
        "| dp4-zero1 | 2.000 | 2.000-2.000 | 1,000 | 40.0% | 2.5 | 10.0000 | 0.800 of ds-dp4-zero1 |",
        "| dp4-zero3 | failed |  |  |  |  |  |  |",
        "| ds-dp4-zero1 | 2.500 | 2.500-2.500 | 1,000 | 40.0% | 2.5 | 10.0000 | 1.000 of ds-dp4-zero1 |",
    ]
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    once = insert(page, "x", table)
    assert once == f"a\n<!-- begin x -->\n{table}\n<!-- end x -->\nb\n<!-- begin y -->\n<!-- end y -->\n"
    assert insert(once, "x", table) == once
    with pytest.raises(ValueError, match="begin z"):
        insert(page, "z", table)


# Sections that show some cases of a run only: newer runs replace the others, or other sections show them.
SHOWN = {
    "1b-eager": ["pp1-bf16acc-cudnn", "plain-pp1-cudnn"],
    "pp2dp2-zero3": ["pp2dp2-zero2-bf16acc-compile-cudnn", "pp2dp2-zero3-bf16acc-compile-cudnn"],
    "pp4-fp8": ["pp4-auto4-compile-cudnn-half-profile-bf16acc-fp8"],
}
# Sections without peers, and the case that they compare with.
BASELINES = {
    "pp2dp2-zero3": "pp2dp2-zero2-bf16acc-compile-cudnn",
    "dp4-zero3-buffers": "dp4-zero2-bf16acc-permicro-compile-cudnn",
}


def test_tables_of_the_pages_are_those_of_the_results():
    runs = [json.loads(path.read_text()) for path in sorted((BENCH / "results").glob("*.json"))]
    pages = [path.read_text() for path in sorted((BENCH.parents[1] / "docs").glob("*.md"))]
    sections = [
        found for page in pages for found in re.findall(r"<!-- begin (\S+) -->\n(.*?)\n<!-- end", page, re.DOTALL)
    ]
    assert len(sections) >= 16
    for name, text in sections:
        date = text[:10]
        baselines = [BASELINES[name]] if name in BASELINES else []
        shown = [selected(run, SHOWN.get(name, [])) for run in runs if run["date"].startswith(date)]
        made = [make_section(run, baselines) for run in shown]
        assert text in made, name


@pytest.mark.parametrize("option", ["allreducenorm", "waitkernel"])
def test_tables_leave_out_removed_features(option: str):
    names = ["tp2-compile", f"tp2-compile-{option}"]
    cases, command = [record(name) for name in names], f"run.py --cases {','.join(names)} --steps 6"
    shown = selected({"cases": cases, "command": command, "agreement": agreement(cases)})
    assert [case["case"] for case in shown["cases"]] == names[:1]
    assert shown["command"] == "run.py --cases tp2-compile --steps 6"
    assert option not in str(shown["agreement"])
    curves = selected(
        {"cases": names, "command": command, "curves": {"plain": [1.0], **{name: [1.0] for name in names}}}
    )
    assert list(curves["curves"]) == ["plain", "tp2-compile"]


# Running


def test_errors_are_found_in_the_output():
    output = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File x\n[rank1]: a.b.FooError: no room\n"
        "[rank0]: a.b.FooError: no room\ntorch.distributed.elastic.ChildFailedError:\n  exitcode  : 1 (pid: 7)\n"
    )
    assert run.error_lines(output) == ["a.b.FooError: no room"]
    assert run.error_lines("killed\n  exitcode  : -9 (pid: 7)\n")[-1] == "exitcode  : -9 (pid: 7)"


def test_a_case_that_takes_too_long_leaves_no_process():
    child = "import time; time.sleep(100)"
    script = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
        "print(p.pid, flush=True); time.sleep(100)"
    )
    status, output = run.run_process([sys.executable, "-c", script], {}, timeout=2.0)
    assert status == "timed out"
    assert not run.is_running(int(output))


def test_a_result_counts_even_if_the_process_hangs_after_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "GRACE", 0.5)
    script = "import time; print('RESULT {\"step_s\": 1}', flush=True); time.sleep(100)"
    _, output = run.run_process([sys.executable, "-c", script], {}, timeout=60.0)
    assert run.find_result(output) == {"step_s": 1}


def test_one_command_runs_cases_and_writes_them_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: bool
):
    """With --full by torchrun itself."""
    out = tmp_path / "results.json"
    command = [
        str(BENCH / "run.py"),
        "--cpu",
        "--size",
        "tiny",
        "--cases",
        "pp1-half,pp2-interleaved2-half-roofline,plain-pp1",
    ]
    command += "--warmup 1 --steps 2 --micro_batches 2 --commit abc --out".split()
    monkeypatch.setattr(sys, "argv", [*command, str(out)])
    if not full:
        monkeypatch.setattr(run, "run_process", run_process)
    assert run.main() == 0
    printed = capsys.readouterr().out.splitlines()
    found = json.loads(out.read_text())
    assert found["commit"] == "abc"
    assert found["workload"]["size"] == "tiny"
    assert "results.json" in found["command"]
    assert str(tmp_path) not in found["command"]
    one, two, plain = (case["result"] for case in found["cases"])
    assert len(one["losses"]) == 3
    assert one["losses"][-1] < one["losses"][0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert plain["losses"] == pytest.approx(one["losses"], rel=0.02)  # whole blocks have other seeds than halves
    assert len(two["peak_gib"]) == 2
    assert 0 <= two["simulated_bubble"] < two["bubble"] < 1
    assert "pp2-interleaved2-half-roofline" in printed[-4]
    roofline = two["roofline"]
    parts = [sum(of_rank) for of_rank in zip(*roofline["parts_ns"].values(), strict=True)]
    assert parts == roofline["step_ns"]
    assert min(roofline["parts_ns"]["GEMM"] + roofline["parts_ns"]["attention"]) > 0
    assert sum(roofline["gemm_flops"]) > sum(roofline["attention_flops"]) > 0
