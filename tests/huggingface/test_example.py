"""examples/finetune_hf.py, from a directory of text files to what from_pretrained loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import load_model
from warm import run_launcher

ROOT = Path(__file__).parents[2]
STEPS = 20


def loss_of(model: Any, tokenizer: Any, text: str) -> float:
    ids = torch.tensor([tokenizer(text)["input_ids"][:100]])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize("kind", ["all weights", "adapters"])
def test_a_model_is_fine_tuned_and_loads(tmp_path: Path, kind: str, full: bool):
    from transformers import AutoTokenizer

    text, out, layout = "one two three four five six seven. " * 40, tmp_path / "out", "pp2,dp2" if full else "pp2"
    (tmp_path / "text").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "text" / name).write_text(text)
    own = ["--text", tmp_path / "text", "--out", out, "--layout", layout, "--steps", STEPS, "--seq", 32, "--batch", 4]
    lora = ["--lora", 4] if kind == "adapters" else []
    command = ["parallel3d.launcher", "--num_procs", layout, ROOT / "examples" / "finetune_hf.py", *own, *lora]
    if full:  # each rank a new Python: forks don't get past the barrier where rank 0 has saved a model (PyTorch 2.13)
        printed = subprocess.run(
            [sys.executable, "-m", *map(str, command)], check=True, capture_output=True, text=True
        ).stdout
    else:
        printed = run_launcher(tmp_path, *map(str, command), imports=["warm_transformers"], timeout=300)
    assert "a sample:" in printed
    base = load_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(out)
    before = loss_of(base, tokenizer, text)
    if kind == "adapters":
        from peft import PeftModel

        tuned: Any = PeftModel.from_pretrained(base, out)
    else:
        tuned = load_model(out)
    after = loss_of(tuned, tokenizer, text)
    assert after < (before - 0.1 if kind == "adapters" else before / 2)


def test_a_directory_with_an_earlier_result_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from examples.finetune_hf import parse_arguments

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(sys, "argv", ["finetune_hf.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="is not empty; remove it or choose another directory"):
        parse_arguments()
