"""The code of guides and tutorials runs as it stands there, on two ranks; of guides, after what a reader has by then."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import CodeBlockParser
from trainer_runs import environment_of
from warm import run_launcher

from parallel3d.cli import main
from parallel3d.cli.arguments import make_parser
from parallel3d.config import load

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
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
        """
assert qkv.weight.shape == (24 * 128, 64) and model.layer["q_proj"].weight.shape == (4, 8)
assert MLP(8, 16, context)(torch.ones(2, 8)).shape == (2, 8)
""",
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
        "assert engine.global_steps == 2",
    ),
}
# Around that of the guide to Hugging Face.
TRANSFORMERS = (
    """
from examples.finetune_hf import make_model
from trainer_runs import forget_state
from transformers import LlamaConfig, LlamaForCausalLM
parallel3d.init_distributed(dist_backend="gloo")
if parallel3d.comm.get_rank() == 0:
    make_model(Path("path/to/llama"), ["def f(x):\\n    return x\\n" * 20])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}  # a smaller one
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained("path/to/llama")
    sizes = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    Path("ds_config.json").write_text(json.dumps({**sizes, "zero_optimization": {"stage": 2}}))
parallel3d.comm.barrier()
dataset = [{"input_ids": row, "labels": row} for row in torch.arange(64 * 16).reshape(64, 16) % 256]
""",
    """
assert tokens.shape[0] == 2 and tokens.shape[1] > prompts["input_ids"].shape[1]
parallel3d.comm.barrier()
assert Path("adapters/adapter_model.safetensors").is_file() and Path("merged/config.json").is_file()
parallel3d.comm.destroy()
""",
)


def run(folder: str, code: str, name: str) -> str:
    """Run the code; return what it has printed."""
    os.chdir(folder)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, name, "exec"), {"__name__": "script"})
    return printed.getvalue()


def blocks(path: Path, language: str) -> list[str]:
    """Return a page's blocks in a language."""
    document = Document.parse(str(path), CodeBlockParser(language, lambda example: None))
    return [str(example.parsed) for example in document.examples()]


@pytest.mark.parametrize("guide", AROUND)
def test_the_code_of_a_guide_runs(run_ranks, tmp_path: Path, guide: str):
    before, after = AROUND[guide]
    code = "\n".join(blocks(DOCS / f"{guide}.md", "python"))
    assert code
    run_ranks(2, run, str(tmp_path), f"{IMPORTS}\n{before}\n{code}\n{after}\n", f"{guide}.md")


def test_the_code_of_the_guide_to_hugging_face_runs(tmp_path: Path):
    """Where `import deepspeed` gives this package; each block after the state that accelerate keeps is forgotten."""
    (before, after), script = TRANSFORMERS, tmp_path / "guide.py"
    script.write_text("\nforget_state()\n".join([IMPORTS + before, *blocks(DOCS / "huggingface.md", "python"), after]))
    torchrun = "torch.distributed.run", "--standalone", "--nproc_per_node", "2"
    imports = "warm_transformers", "transformers.trainer"
    run_launcher(tmp_path, *torchrun, str(script), imports=imports, environment=environment_of(tmp_path))


@pytest.mark.parametrize("tutorial", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda path: path.stem)
def test_a_tutorial_does_what_it_shows(run_ranks, tmp_path: Path, capsys, monkeypatch, tutorial: Path):
    """Its Python on two ranks, its commands of p3d, and what both print. Commands that start ranks are other tests'."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    for line in "\n".join(blocks(tutorial, "bash")).splitlines():
        if line.startswith("p3d "):
            assert main(shlex.split(line, comments=True)[1:]) == 0
    printed = capsys.readouterr().out
    code = "\n".join(blocks(tutorial, "python"))
    printed += run_ranks(2, run, str(tmp_path), code, tutorial.name)[0]
    assert [text for text in blocks(tutorial, "text") if text not in printed] == [], printed


def test_commands_and_configurations_of_all_pages_are_read():
    """Those that no test runs: p3d knows the commands and their options, and the keys are in the configuration."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    fenced = [block for text in texts for block in re.findall(r"^```(\w*).*\n([^`]+?)^```", text, re.MULTILINE)]
    commands = [line for _, block in fenced for line in block.splitlines() if line.startswith("p3d ")]
    assert len(commands) > 15
    for command in commands:
        make_parser().parse_args(shlex.split(command, comments=True)[1:])
    configurations = [block for language, block in fenced if language == "json"]
    assert len(configurations) > 1
    for block in configurations:
        load(json.loads(block if block.startswith("{") else f"{{{block}}}"))


def test_no_page_has_code_that_does_not_run():
    run_by_name = {(DOCS / f"{guide}.md").resolve() for guide in [*AROUND, "huggingface"]}
    with_code = {path for path in PAGES if path.parent.name != "tutorials" and blocks(path, "python")}
    assert with_code == run_by_name
