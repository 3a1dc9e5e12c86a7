"""One process of zero_tables.py: a plain module, trained by this framework or DeepSpeed; rank 0 prints `RESULT {...}`.

torchrun --nproc_per_node 2 tools/bench/zero_run.py --framework deepspeed --model 1b --seq 2048 --config '{...}'

Both get the same script, configuration and layers: they have the same interface.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measured import measure
from ours import SIZES, from_all_ranks
from torch import Tensor, nn
from train_llama import decoder_layers, loss_fn

import parallel3d

_GIB = 2**30


class Decoder(nn.Module):
    """The decoder of examples/train_llama.py as a plain module."""

    def __init__(self, name: str):
        super().__init__()
        self.layers = nn.ModuleList(spec.build() for spec in decoder_layers(SIZES[name], "block"))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """input_ids, labels: [batch, seq] -> the loss."""
        x = input_ids
        for layer in self.layers:
            x = layer(x)
        return loss_fn(x, labels)


def build(name: str) -> nn.Module:
    """Return the decoder of a size, or the model of a Hugging Face directory, with random weights."""
    if name in SIZES:
        return Decoder(name)
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    return model


def vocabulary_and_length(name: str) -> tuple[int, int]:
    """Return the vocabulary's size and the longest sequence of a model."""
    if name in SIZES:
        return SIZES[name].vocab, SIZES[name].seq
    config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    return config["vocab_size"], config["max_position_embeddings"]


def resident_bytes() -> int:
    """Return the most bytes of host memory that this process has had at a time, as Linux counts them."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def pinned_bytes() -> int:
    """Return the most bytes of host memory that torch's allocator has pinned at a time."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)) if torch.cuda.is_available() else 0


def main() -> None:
    """Train, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=["parallel3d", "deepspeed"], default="parallel3d")
    parser.add_argument("--model", default="tiny", help="a size of ours.py, or a Hugging Face directory")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--config", type=json.loads, required=True)
    args = parser.parse_args()
    framework: Any = import_module(args.framework)
    framework.init_distributed()
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    sharded = args.config["zero_optimization"]["stage"] == 3
    with framework.zero.Init(config_dict_or_path=args.config) if sharded else device:
        model = build(args.model)
    engine, *_ = framework.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    count, samples = args.config["gradient_accumulation_steps"], args.config["train_micro_batch_size_per_gpu"]
    draw, vocabulary = torch.Generator().manual_seed(rank), vocabulary_and_length(args.model)[0]
    ids = torch.randint(vocabulary, (count, samples, args.seq + 1), generator=draw).to(device)
    batch = [{"input_ids": x[:, :-1].contiguous(), "labels": x[:, 1:].contiguous()} for x in ids]

    def step() -> Tensor:
        for inputs in batch:
            found = engine(**inputs)
            loss = found if isinstance(found, Tensor) else found.loss
            engine.backward(loss)
            engine.step()
        return loss.detach()

    measured = measure(step, args.warmup, args.steps)
    times = sorted(measured.times)
    result = {
        "step_s": times[len(times) // 2],
        "min_s": times[0],
        "max_s": times[-1],
        "peak_gib": from_all_ranks(measured.peak_gib),
        "host_gib": from_all_ranks(resident_bytes() / _GIB),
        "pinned_gib": from_all_ranks(pinned_bytes() / _GIB),
        "skipped": int(engine.skipped_steps),
        "loss": measured.losses[-1],
    }
    if args.framework == "parallel3d":
        engine.reports.profile_next_batch("memory")
        engine.train_batch(iter(batch))
        result["memory"] = max(engine.reports.memory_report(), key=lambda rows: rows["backward"][1])
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    parallel3d.comm.destroy() if args.framework == "parallel3d" else torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
