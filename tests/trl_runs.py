"""Trainings by TRL on the ranks of one world, as scripts of its users make them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trainer_runs import forget_state

WORDS = [f"w{k}" for k in range(60)]
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: k for k, word in enumerate([*WORDS, *SPECIAL.values()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def train(kind: str, model: Path, out: Path, config: dict[str, Any] | None) -> dict[str, list[float]]:
    """Train by SFTTrainer ("sft"; "lora" with adapters), DPOTrainer with a reference model ("dpo"), or GRPOTrainer ("grpo")."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    forget_state()
    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return " ".join(WORDS[k] for k in torch.randint(0, len(WORDS), (length,), generator=generator).tolist())

    common: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "deepspeed": config,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "disable_tqdm": True,
        "log_level": "error",
        "seed": 0,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    own = AutoModelForCausalLM.from_pretrained(model)
    if kind == "dpo":
        rows = [{"prompt": text(5), "chosen": text(4), "rejected": text(4)} for _ in range(32)]
        trainer = DPOTrainer(
            model=own,
            ref_model=AutoModelForCausalLM.from_pretrained(model),
            args=DPOConfig(**common),
            train_dataset=Dataset.from_list(rows),
            processing_class=make_tokenizer(),
        )
    elif kind == "grpo":  # samples completions of its own
        sampling: dict[str, Any] = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.0}
        trainer = GRPOTrainer(
            model=own,
            reward_funcs=lambda completions, **_: [float(text.count("w1")) for text in completions],
            args=GRPOConfig(**common, **sampling),
            train_dataset=Dataset.from_list([{"prompt": text(5)} for _ in range(32)]),
            processing_class=make_tokenizer(),
        )
    else:
        adapters = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian"
        )
        trainer = SFTTrainer(
            model=own,
            args=SFTConfig(**common, max_length=16),
            train_dataset=Dataset.from_list([{"text": text(12)} for _ in range(32)]),
            processing_class=make_tokenizer(),
            peft_config=adapters if kind == "lora" else None,
        )
    trainer.train()
    log = trainer.state.log_history
    return {
        "loss": [entry["loss"] for entry in log if "loss" in entry],
        "norm": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
    }


def main(model: str, out: str, found_file: str, configs: str) -> None:
    """Train in each way with each configuration of a JSON mapping, and write what happened. Collective."""
    torch.set_num_threads(1)
    found = {
        f"{kind}, {name}": train(kind, Path(model), Path(out) / f"{kind} {name}", config)
        for kind in ("sft", "lora", "dpo", "grpo")
        for name, config in json.loads(configs).items()
    }
    if dist.get_rank() == 0:
        Path(found_file).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
