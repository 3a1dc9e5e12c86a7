"""One process of plan_accuracy.py's trainings; rank 0 writes a run record, and prints a line `RESULT {...}`.

parallel3d --num_gpus 4 tools/bench/planned_run.py --model 7b --config config.json --record runs/pp4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import parallel3d
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe import PipelineModule
from parallel3d.planner.search.model import MODELS, PlannedModel, load_model

RECORDED = 2  # steps whose instructions are recorded
_TINY = DecoderConfig(vocab_size=256, hidden_size=64, ffn_size=176, num_layers=4, num_heads=4, max_positions=64)
_OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-4}}


def model_of(name: str, changes: Mapping[str, Any]) -> PlannedModel:
    """One of the planner's, or "tiny", in fp32, for the CPU. changes: to the configuration of all layouts."""
    config = {"steps_per_print": None, **changes}
    if name != "tiny":
        return load_model(name, config=config)

    def sample(count: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(count, _TINY.max_positions, dtype=torch.int64)
        return tokens, tokens

    return PlannedModel(
        name, decoder(_TINY), causal_lm_loss, sample, _TINY.max_positions, {"optimizer": _OPTIMIZER, **config}
    )


def random_tokens(name: str, micro_batch: int, seq: int, seed: int) -> tuple[Tensor, Tensor]:
    """(inputs, labels), [micro_batch, seq] each. What a GPU multiplies sets its power, and so its clock: not zeros."""
    vocab = (_TINY if name == "tiny" else MODELS[name]).vocab_size
    ids = torch.randint(vocab, (micro_batch, seq + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def allocated() -> list[int]:
    """Return every rank's peak bytes in tensors since the last call. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    most = 0
    if torch.cuda.is_available():
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    dist.all_gather_object(values, most)
    return values


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--config", type=Path, required=True, help="of the layout, bounds and all")
    parser.add_argument("--record", type=Path, required=True, metavar="DIR", help="where the run record goes")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Warm up, time steps, record others."""
    args = parse_arguments()
    config = json.loads(args.config.read_text(encoding="utf-8"))
    model = model_of(args.model, {})
    module = PipelineModule(list(model.layers), loss_fn=model.loss_fn, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    seed = engine.grid.get_data_parallel_rank()
    micro_batch = random_tokens(args.model, config["train_micro_batch_size_per_gpu"], model.seq, seed)
    batch = tuple(tensor.to(engine.device) for tensor in micro_batch)

    def forever() -> Iterator[Any]:
        while True:
            yield batch

    data = forever()
    for _ in range(args.warmup):
        engine.train_batch(data)
    warming = allocated()
    for _ in range(args.steps):
        engine.train_batch(data)
    if engine.device.type == "cpu":  # which tells what tensors take only where it is asked beforehand
        engine.reports.profile_next_batch("memory")
        engine.train_batch(data)
    for _ in range(RECORDED):
        engine.reports.profile_next_batch()
        engine.train_batch(data)
    engine.reports.write_run_record(args.record)
    if engine.global_rank == 0:
        print("RESULT " + json.dumps({"warmup_peak": warming}), flush=True)
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
