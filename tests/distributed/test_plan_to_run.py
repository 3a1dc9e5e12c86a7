"""From a Hugging Face directory to a training: `p3d plan`, and the run.sh that it writes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from warm import run_launcher

from parallel3d.cli import main

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 1,  # so that layers aren't traced in slices too
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TRAINING = """
import argparse, json
import torch
import parallel3d
from parallel3d import models

parser = parallel3d.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--model")
args = parser.parse_args()
config = json.load(open(args.deepspeed_config))
torch.manual_seed(0)
layers = models.from_hf(args.model, weights=False, config=config)
module = parallel3d.PipelineModule(layers, loss_fn=models.causal_lm_loss, config=config)
data = [(ids, ids) for ids in torch.randint(64, (8, 32))]
engine, *_ = parallel3d.initialize(args=args, model=module, training_data=data)
losses = [float(engine.train_batch()) for _ in range(14)]
if engine.global_rank == 0:
    print(json.dumps({"layers": len(layers), "stages": module.num_stages, "losses": losses}))
parallel3d.comm.destroy()
"""


def test_a_plan_of_half_blocks_trains(tmp_path: Path, capsys):
    """Eight samples can't be spread over the four processes otherwise than in stages, which five blocks don't fill evenly."""
    model, out, script = tmp_path / "model", tmp_path / "plan", tmp_path / "train.py"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    script.write_text(TRAINING)
    (tmp_path / "given.json").write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}))
    devices = [{"device": "cpu", "count": 4, "memory": "10 MiB"}]
    cluster = {"hosts": [{"gpus": devices, "pcie": {"bandwidth": "50 MB/s"}}]}
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    command = ["plan", "--model", model, "--cluster", tmp_path / "cluster.json", "--global-batch", 8]
    assert main([*map(str, command), "--config", str(tmp_path / "given.json"), "--out", str(out)]) == 0
    print(capsys.readouterr().out)
    best = json.loads((out / "plan.json").read_text())["best"][0]
    assert best["units"] == "half"
    launcher = tmp_path / "bin" / "parallel3d"  # notes what it is called with, for one that has imported torch
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    launcher.chmod(0o755)
    environment = os.environ | {"PATH": f"{launcher.parent}:{os.environ['PATH']}"}
    command = [out / "run.sh", script, "--model", model]
    called = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    printed = run_launcher(tmp_path, "parallel3d.launcher", *called.stdout.splitlines())
    told = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert told["layers"] == 2 * LLAMA["num_hidden_layers"] + 3
    assert told["stages"] == best["stages"] > 1
    assert told["losses"][-1] < 0.5 * told["losses"][0]
