"""`p3d check` as its user meets it: the command line, the table, the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    layouts = ["pp2,dp2,tp2,zero2,sp,m3", "pp2,dp2,tp2,zero1,zb-h1,m3"]
    code, out, err = run(capsys, "decoder", "--layouts", *layouts, "--steps", "2")
    assert code == 0, out + err
    assert [line.strip() for line in out.splitlines() if line.startswith("pp2")] == [
        f"{text}: pass" for text in layouts
    ]
    rows = [line.split() for line in out.splitlines() if line.split()[0].isdigit()]
    assert [(row[0], row.count("pass")) for row in rows] == [("1", 3), ("2", 3)] * 2
    assert "FAIL" not in out
    assert "differ" not in out


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
        ("two_layers", "zer2", "unknown word 'zer2'. Did you mean 'zero'?"),
        ("two_layers", "pp2,pp1", "'pp1' sets stages a second time; give it once"),
        ("two_layers", "dp0", "'dp0' asks for none; give dp1 or more"),
        ("two_layers", "zero7", "layout 'zero7'"),
        ("decodr", "pp2", "has no function 'decodr'. Did you mean 'decoder'?"),
        ("not_a_subject", "pp2", "return a parallel3d.parity.Subject or a dict with"),
    ],
)
def test_bad_input_names_the_remedy(capsys: pytest.CaptureFixture[str], function: str, layout: str, remedy: str):
    code, out, err = run(capsys, function, "--layouts", layout)
    assert (code, out) == (2, "")
    assert remedy in err
