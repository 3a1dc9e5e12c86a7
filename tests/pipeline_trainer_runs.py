"""Trainings by PipelineTrainer on the ranks of one world, and the reference: a plain Trainer on one process."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from trainer_runs import ARGUMENTS, SAVED, forget_state, with_adapters

PADDING = 0


def samples() -> list[dict[str, list[int]]]:
    """Rows of unequal lengths."""
    import torch

    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 17, (28,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()} for length in lengths]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Pad rows to the longest; the padding has no labels."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [PADDING] * (longest - len(row["input_ids"])) for row in rows])
    mask = (tokens != PADDING).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def collate_shifted(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Give each position the label of the next one."""
    import torch

    batch = collate(rows)
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    return batch


def accuracy(result: Any, shifted: bool) -> dict[str, float]:
    """Return how often the likeliest token is the next one, and of how many rows."""
    best, wanted = result.predictions.argmax(-1), result.label_ids
    best, wanted = (best, wanted) if shifted else (best[:, :-1], wanted[:, 1:])
    return {"accuracy": float((best == wanted)[wanted != -100].mean()), "rows": float(len(best))}


def train(model: Path, out: Path, config: dict[str, Any] | None, replicas: int, **options: Any) -> dict[str, Any]:
    """Train, and return what the log, the best model and, if asked for, a second training say.

    - config: for `TrainingArguments(deepspeed=)`; None for a plain Trainer, or for what `accelerate launch` has set.
    - options: resumes (False): go on from the directory's checkpoint. again (False): train a second time. adapts (False):
      train adapters. shifted (False): give shift_labels alone. unshifted (False): train a Bart. arguments: more of
      TrainingArguments; if they, the model or the configuration are refused, the error is returned.
    """
    import transformers

    from parallel3d.errors import ConfigError
    from parallel3d.huggingface import PipelineTrainer

    forget_state()
    arguments = transformers.TrainingArguments(
        str(out),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4 // replicas,
        gradient_accumulation_steps=4 // replicas,
        weight_decay=0.1,
        warmup_steps=1,
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
        deepspeed=config,
        **{**ARGUMENTS, **options.get("arguments", {})},
    )

    class Trainer(PipelineTrainer, transformers.Trainer):
        pass

    splits = config is not None or "ACCELERATE_USE_DEEPSPEED" in os.environ
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    if options.get("unshifted"):
        own = transformers.BartForCausalLM(transformers.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1))
    rows, shifted = samples(), options.get("shifted", False)
    try:
        trainer = (Trainer if splits else transformers.Trainer)(
            model=with_adapters(own) if options.get("adapts") else own,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows[:6],
            data_collator=collate_shifted if shifted else collate,
            compute_metrics=partial(accuracy, shifted=shifted),
        )
        before = trainer.evaluate()["eval_loss"]
    except ConfigError as error:
        return {"error": str(error)}
    trainer.train(resume_from_checkpoint=str(out / f"checkpoint-{SAVED}") if options.get("resumes") else None)
    trainer.save_model(str(out / "saved"))

    def logged(*keys: str) -> dict[str, list[float]]:
        log = trainer.state.log_history
        return {key: [float(entry[key]) for entry in log if key in entry] for key in keys}

    found = {
        "before": before,
        **logged("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows"),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
        "best": trainer.evaluate()["eval_loss"],
    }
    if options.get("again"):
        trainer.optimizer = None  # a plain Trainer would go on with its state
        trainer.train()
        found["again"] = logged("loss")["loss"]
    return found


def main(model: str, out: str, found_file: str, configs: str) -> None:
    """Train with each configuration of a JSON mapping, and write what happened. Collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = {}
    for name, (config, replicas, options) in json.loads(configs).items():
        found[name] = train(Path(model), Path(out) / name.partition(",")[0], config, replicas, **options)
    if os.environ.get("RANK", "0") == "0":
        Path(found_file).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
