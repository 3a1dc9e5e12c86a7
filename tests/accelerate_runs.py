"""A training loop of accelerate, as a script of its users has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from trainer_runs import samples


def train(model: Path) -> dict[str, Any]:
    """Train for two steps of two micro-batches a rank; return the mean losses, norms, rates and sums of the weights."""
    import torch
    from accelerate import Accelerator, PartialState
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    PartialState(cpu=True, backend="gloo")  # with DeepSpeed, an Accelerator looks for GPUs alone
    accelerator = Accelerator(gradient_accumulation_steps=2)
    own = AutoModelForCausalLM.from_pretrained(model)
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(samples()[:16], batch_size=2)  # type: ignore[arg-type]
    own, optimizer, loader, schedule = accelerator.prepare(own, optimizer, loader, schedule)
    found: dict[str, Any] = {"type": accelerator.distributed_type.value, "loss": [], "norm": [], "rate": []}
    for batch in loader:
        with accelerator.accumulate(own):
            loss = own(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                found["norm"].append(float(accelerator.clip_grad_norm_(own.parameters(), 1.0)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found["loss"].append(float(accelerator.gather(loss.detach()).mean()))
        found["rate"].append(schedule.get_last_lr()[0])
    weights = accelerator.unwrap_model(own).state_dict()
    found["weights"] = [float(weights[name].double().square().sum()) for name in sorted(weights)]
    return found


def main(model: str, out: str, found_file: str, configs: str) -> None:
    """Train, and write what happened. Collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = train(Path(model))
    if os.environ["RANK"] == "0":
        Path(found_file).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
