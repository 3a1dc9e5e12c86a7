"""Trainings by Hugging Face's Trainer on the ranks of one world, as scripts of its users make them."""

from __future__ import annotations

import json
import os
import socket
import zipfile
from pathlib import Path
from typing import Any

from warm import run_codes

from parallel3d.cli.deepspeed import write_wheel

STEPS, SAVED = 4, 2


def model_directory(directory: Path) -> Path:
    """Save a small Llama with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def samples() -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (64, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def configuration(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The file that transformers' documentation shows: what the arguments of the training say is "auto"."""
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero = {**dict.fromkeys(buckets, "auto"), **zero}
    half = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    return {"zero_optimization": zero, **sizes, "gradient_clipping": "auto", **half, **more}


def forget_state() -> None:
    """Let this process begin another training: accelerate and transformers keep the last one's settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    unset_hf_deepspeed_config()


def run_job(directory: Path, module: str, configs: dict[str, dict[str, Any] | None], world: int = 2) -> dict[str, Any]:
    """Run main(model, directory, configs) of a module on some ranks, where deepspeed is what `p3d deepspeed install` installs.

    Returns what it has written.
    """
    with zipfile.ZipFile(write_wheel(directory)) as wheel:
        wheel.extractall(directory / "site")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(directory / "site"), str(Path(__file__).parent)]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = str(model_directory(directory / "model")), str(directory), json.dumps(configs)
    code = f"import sys; sys.path[:0] = {paths!r}\nfrom {module} import main\nmain(*{arguments!r})"
    ranks = [{**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    for ended in run_codes(code, directory / f"ranks of {world}", ranks, most_seconds=400):
        assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return found


def with_adapters(model: Any) -> Any:
    """Freeze the model, and add adapters to train."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def train(model: Path, out: Path, config: dict[str, Any] | None, adapts: bool, resumes: bool = False) -> dict[str, Any]:
    """Train as with `TrainingArguments(deepspeed=config)`; None for DDP. Return what the log and the best model say.

    adapts: whether adapters are trained, of a frozen model.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    forget_state()
    rows = samples()
    arguments = TrainingArguments(
        str(out),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4 // int(os.environ["WORLD_SIZE"]),
        max_steps=STEPS,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=SAVED,
        eval_strategy="steps",
        eval_steps=SAVED,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        report_to=[],
        deepspeed=config,
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        log_level="error",
        seed=0,
    )
    own = AutoModelForCausalLM.from_pretrained(model)
    own = with_adapters(own) if adapts else own
    trainer = Trainer(model=own, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED}") if resumes else None)
    log = trainer.state.log_history
    trainer.save_model(str(out / "saved"))
    return {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "norm": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        "rate": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "eval": [entry["eval_loss"] for entry in log if "eval_loss" in entry],
        "best": trainer.evaluate()["eval_loss"],
    }


def main(model: str, out: str, configs: str) -> None:
    """Train with each configuration of a JSON mapping, resume each, and write what happened. Collective.

    Only two ranks train from the start; others resume what these have saved, with the same samples a step.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for name, config in json.loads(configs).items():
        directory = Path(out) / name
        adapts = name.startswith("adapters")
        if os.environ["WORLD_SIZE"] == "2":
            found[name] = train(Path(model), directory, config, adapts)
        found[f"{name}, resumed"] = train(Path(model), directory, config, adapts, resumes=True)
    if os.environ["RANK"] == "0":
        (Path(out) / "found.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
