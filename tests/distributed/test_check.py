"""`p3d check` as its user meets it: the command line, the table, the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_models import save_model

from parallel3d.cli import main

CHECKED = str(Path(__file__).parents[1] / "checked.py")


@pytest.fixture(autouse=True)
def _tests_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked script finds its neighbours, in this process and in those it starts, which see no GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "120")


def run(capsys: pytest.CaptureFixture[str], function: str, *options: str) -> tuple[int, str, str]:
    code = main(["check", f"{CHECKED}:{function}", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_right_model_passes_in_3d(capsys: pytest.CaptureFixture[str]):
    layouts = ["pp2,dp2,tp2,zero3,sp,m3", "pp2,dp2,tp2,zero1,zb-h1,m3"]
    code, out, err = run(capsys, "decoder", "--layouts", *layouts, "--steps", "2")
    assert code == 0, out + err
    assert [line.strip() for line in out.splitlines() if line.startswith("pp2")] == [
        f"{text}: pass" for text in layouts
    ]
    rows = [line.split() for line in out.splitlines() if line.split()[0].isdigit()]
    assert [(row[0], row.count("pass")) for row in rows] == [("1", 3), ("2", 3)] * 2
    assert "FAIL" not in out
    assert "differ" not in out


def test_sharded_weights_pass_in_pipelines(capsys: pytest.CaptureFixture[str]):
    layouts = ["pp2,dp2,zero3,m3", "pp2,dp2,zero3,zbv,m2", "dp2,tp2,sp,zero3,gpipe,chunks2,ckpt1,m2"]
    code, out, err = run(capsys, "decoder", "--layouts", *layouts, "--steps", "2")
    assert code == 0, out + err
    assert out.count(": pass") == len(layouts)


def test_one_scaled_gradient_of_one_slice_is_found_and_its_layer_named(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "faulty", "--layouts", "tp2,m2", "--steps", "1")
    assert code == 1, out + err
    assert "tp2,m2: FAIL" in out
    assert "first layer whose gradients of step 1 differ: layers.2 FaultyMLP (layers.2.gate_up.weight by" in out
    assert "layers differ" not in out, "only one does"


@pytest.mark.parametrize(
    ("function", "layout", "remedy"),
    [
        ("two_layers", "pp3", "layout 'pp3' asks for 3 chunks of a model of 2 layers; give 2 stages x chunks or fewer"),
        ("two_layers", "pp2,interleavd", "unknown word 'interleavd'. Did you mean 'interleaved'?"),
        ("two_layers", "zer2", "unknown word 'zer2'. Did you mean 'zero2'?"),
        ("two_layers", "pp2,pp1", "'pp1' sets the stages a second time; give one of them"),
        ("two_layers", "dp0", "'dp0' asks for no data-parallel replicas; give dp1 or more, or leave it out"),
        ("two_layers", "zero7", "layout 'zero7'"),
        ("decodr", "pp2", "has no function 'decodr'. Did you mean 'decoder'?"),
        ("broken", "pp2", "broken: OSError: no such corpus ("),
        ("needs_context", "tp2", "on one process, where layers get no context: AttributeError"),
        ("not_a_subject", "pp2", "return a parallel3d.parity.Subject or a dict with"),
    ],
)
def test_bad_input_names_the_remedy(capsys: pytest.CaptureFixture[str], function: str, layout: str, remedy: str):
    code, out, err = run(capsys, function, "--layouts", layout)
    assert (code, out) == (2, "")
    assert remedy in err


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_token_loss_dropout_and_frozen_layers_pass(capsys: pytest.CaptureFixture[str], dtype: str):
    """In bf16 Adam normalizes what is rounding in the gradients of norms' biases: one process is as far from fp32."""
    layouts = ["pp2,tp2,m2", "dp2,pp2,zero1,m2"]
    code, out, err = run(capsys, "by_tokens", "--layouts", *layouts, "--steps", "2", "--dtype", dtype)
    assert code == 0, out + err


def test_a_gross_fault_is_found_in_half_precision(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "grossly_faulty", "--layouts", "tp2,m2", "--steps", "1", "--dtype", "bfloat16")
    assert code == 1, out + err
    assert "first layer whose gradients of step 1 differ: layers.2 GrosslyFaultyMLP" in out


def test_a_hugging_face_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """With its weights; GPT-2 drops inside its regions and between them."""
    save_model(tmp_path, "gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    code = main(["check", str(tmp_path), "--layouts", "tp2,sp,m2", "pp2,zero1,m2", "--steps", "2"])
    out, err = capsys.readouterr()
    assert code == 0, out + err


@pytest.mark.parametrize(("function", "code"), [("dropping", 0), ("dropping_apart", 1)])
def test_masks_of_slices_are_those_of_one_process_where_asked(
    capsys: pytest.CaptureFixture[str], function: str, code: int
):
    got, out, err = run(capsys, function, "--layouts", "tp2,sp,m2", "pp2,tp2,m2,ckpt1", "--steps", "2")
    assert got == code, out + err
    assert out.count("FAIL") == 0 or code


def test_half_blocks_pass_in_3d(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "halved", "--layouts", "pp2,dp2,tp2,zero2,sp,zb-h1,m2", "--steps", "1")
    assert code == 0, out + err


def test_a_replica_that_drifts_in_the_second_step_is_found(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "drifting", "--layouts", "dp2,m1", "--steps", "2")
    assert code == 1, out + err
    rows = [line.split() for line in out.splitlines() if line.split()[0].isdigit()]
    assert [(row[0], row.count("pass") == 3, row[-1]) for row in rows] == [("1", True, "pass"), ("2", False, "FAIL")]
    assert "first layer whose weights after step 2 differ: layers.1 Drifting (layers.1.weight by" in out


def test_a_tolerance_of_the_users_own(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "faulty", "--layouts", "tp2,m2", "--steps", "1", "--tolerance", "1e-2")
    assert code == 0, out + err


def test_what_the_ranks_refuse_reaches_the_user(capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "unsliceable", "--layouts", "tp2")
    assert (code, out) == (2, "")
    assert "layout 'tp2': 3 outputs are sliced over 2 ranks; give 4" in err


def test_fp8_has_the_scales_of_one_process(capsys: pytest.CaptureFixture[str]):
    """Scales of parts alone would move gradients by 0.1."""
    layouts = ["pp2,tp2,zb-h1,m2", "dp2,tp2,sp,zero3,m2,ckpt1"]
    code, out, err = run(capsys, "in_fp8", "--layouts", *layouts, "--steps", "2", "--tolerance", "5e-3")
    assert code == 0, out + err
    assert "fp8: 11 linears of the model" in out
