"""The code of the guides runs as it stands there, on two ranks, after what a reader has by then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser

DOCS = Path(__file__).parents[2] / "docs"
IMPORTS = """
import json
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import parallel3d
from parallel3d import LayerSpec, PipelineModule, models
"""
CONFIG = """
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "steps_per_print": None,
}
"""
PIPELINE = f"""{CONFIG}
layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
model = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss)
data_iter = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 20)
"""
LLAMA = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
model_config, directory = LlamaConfig(**sizes), "llama"
if parallel3d.comm.get_rank() == 0:
    LlamaForCausalLM(model_config).save_pretrained(directory)
parallel3d.comm.barrier()
"""
# Guide -> what stands before its code, and what after it, to show that it did what it says.
AROUND = {
    "check": (
        """
Embed = Head = Block = type("Layer", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 4, 4)})
Loss, inputs, labels = nn.MSELoss, torch.full_like, torch.full_like
inputs = labels = lambda index: torch.full((2, 4), float(index))
Path("ds_config.json").write_text("{}")
""",
        "assert len(subject().layers) == 6 and subject().micro_batch(3)[0][0, 0] == 3",
    ),
    "checkpoints": (f"{PIPELINE}\nengine, *_ = parallel3d.initialize(model=model, config=config)\nSTEPS = 2", ""),
    "deepspeed": (
        f"{PIPELINE}\naccuracy = 0.5",
        "assert (parallel3d.comm.get_rank() > 0) or '0.5' in Path('runs/a/Eval_accuracy.csv').read_text()",
    ),
    "failures": (
        f"{PIPELINE}\nengine, *_ = parallel3d.initialize(model=model, config=config)\nrank, done = engine.global_rank, []\n"
        "upload_the_samples = lambda: done.append(1)",
        "assert len(done) == (rank == 0)",
    ),
    "tensor_parallelism": (
        """
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import PipeModelDataParallelTopology
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import AttentionHeads, ColumnParallelLinear, RowParallelLinear, parallelize
groups = ProcessGroups(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
context, group, h = BuildContext(groups, torch.device("cpu")), groups.model, 64

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.ModuleDict({name: nn.Linear(8, 8) for name in "q_proj k_proj v_proj o_proj up_proj down_proj".split()})
        self.head = nn.Linear(8, 10)

model = Model()
""",
        "assert qkv.weight.shape == (24 * 128, 64) and model.layer['q_proj'].weight.shape == (4, 8)",
    ),
    "zero": (
        f"""{PIPELINE}{LLAMA}
from parallel3d.zero import GatheredParameters
model = nn.Sequential()
model.head = nn.Linear(8, 2)
sharded = {{"stage": 3, "stage3_param_persistence_threshold": 0}}
parallel3d.initialize(model=model, config={{**config, "zero_optimization": sharded}})
""",
        """
assert engine.module is model and sum(p.ds_numel for p in model.parameters()) > 1000
""",
    ),
    "../README": (
        f"""{CONFIG}{LLAMA.replace('"llama"', '"path/to/llama"')}
""",
        "assert Path('path/to/trained/config.json').is_file()",
    ),
    "training": (
        f"""{CONFIG}
Path("ds_config.json").write_text(json.dumps(config))
net, loss_fn = nn.Linear(4, 1), F.mse_loss
dataset = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
""",
        """
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.topology import PipeModelDataParallelTopology
from parallel3d.specs import BuildContext
assert engine.global_steps == 2
groups = ProcessGroups(PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1))
assert MLP(8, 16, BuildContext(groups, torch.device("cpu")))(torch.ones(2, 8)).shape == (2, 8)
""",
    ),
}


def run(folder: str, code: str, name: str) -> None:
    os.chdir(folder)
    exec(compile(code, name, "exec"), {"__name__": "script"})


def code_of(path: Path) -> str:
    """Return the code blocks in Python of a guide, one after the other."""
    document = Document.parse(str(path), CodeBlockParser("python", lambda example: None))
    return "\n".join(str(example.parsed) for example in document.examples())


@pytest.mark.parametrize("guide", AROUND)
def test_the_code_of_a_guide_runs(run_ranks, tmp_path: Path, guide: str):
    before, after = AROUND[guide]
    code = code_of(DOCS / f"{guide}.md")
    assert code
    run_ranks(2, run, str(tmp_path), f"{IMPORTS}\n{before}\n{code}\n{after}\n", f"{guide}.md")
