"""A GPT from scratch: a byte-level GPT on real text, with pipeline stages, tensor-parallel ranks and replicas.

The model (gpt.py) is a list of layers that slice themselves, the text (corpus.py) yours or Python's standard library. It shows
a layout from the command line, evaluation on held-out text, checkpoints that any layout goes on from, generation, a page of
the training, and timelines of a step, measured and simulated. Every layout trains on the same samples in the same order, so
the loss depends on the layout by rounding alone.

parallel3d --num_procs 4 examples/train_gpt.py                      # 2 stages x 2 replicas on the CPU
parallel3d --num_gpus 4 examples/train_gpt.py --layout pp4          # NCCL, one GPU a rank
parallel3d --num_procs pp2,tp2,dp2 examples/train_gpt.py --layout pp2,tp2,dp2   # 8 processes
torchrun --nproc_per_node 4 examples/train_gpt.py
srun --ntasks 4 python examples/train_gpt.py
parallel3d --num_procs 4 --max_restarts 3 examples/train_gpt.py --save runs/gpt   # goes on when it is started again
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import rich
import torch
from corpus import Windows, load_corpus
from gpt import VOCABULARY, Block, Head, Loss, TokenEmbedding, sample
from torch import Tensor

import parallel3d
from parallel3d.config import Layout, parse_layout
from parallel3d.monitor.run_record import RunRecord, find_run_records
from parallel3d.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from parallel3d.planner.calibrate.runs import compare_run
from parallel3d.planner.search.model import PlannedModel
from parallel3d.schedule.draw import chrome_trace, svg
from parallel3d.schedule.timing import measured_cost, simulate
from parallel3d.tensor_parallel.slicing import even_part


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a text file or a directory of them; default: Python's standard library")
    parser.add_argument(
        "--layout",
        help="such as pp2,tp2,dp2,zero1,sp; default: 2 stages where the number of ranks allows, the rest replicas",
    )
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, interleaved, zb-h1, zbv or zb-looped")
    parser.add_argument("--chunks", type=int, default=1, help="chunks a stage; 2 for zbv")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees")
    parser.add_argument("--batch", type=int, default=16, help="windows a step, over all replicas")
    parser.add_argument("--micro_batch", type=int, default=2, help="windows a micro-batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--eval_every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--eval_windows", type=int, default=512, help="held-out windows of an evaluation")
    parser.add_argument("--sample", type=int, default=200, help="bytes to generate at the end")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--save", metavar="DIR", help="save there at each evaluation, and go on from the newest that is there"
    )
    parser.add_argument("--predict", action="store_true", help="also print what the planner predicts of each part")
    parser.add_argument("--out", default="runs", help="directory for the results of runs")
    return parser.parse_args()


def choose_layout(args: argparse.Namespace) -> Layout:
    world_size = parallel3d.comm.get_world_size()
    stages = 1 if world_size % 2 else 2
    return parse_layout(args.layout or f"pp{stages},dp{world_size // stages}")


def make_config(args: argparse.Namespace, layout: Layout, directory: Path) -> dict[str, Any]:
    return {
        "train_batch_size": args.batch,
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.99], "weight_decay": 0.01}},
        "gradient_clipping": 1.0,
        "steps_per_print": max(1, args.steps // 20),
        "monitor": {"progress": args.steps},
        "run_record": {"directory": str(directory)},
        "seed": args.seed,
        "dataloader_shuffle": True,
        "zero_optimization": {"stage": layout.zero or 0},
        "tensor_parallel": {"size": layout.tensor_ranks, "sequence_parallel": layout.sequence_parallel},
        "pipeline": {
            "stages": layout.stages,
            "schedule": args.schedule,
            "num_chunks": args.chunks,
            "placement": "v" if args.schedule == "zbv" else "loop",
        },
    }


def layers_of(args: argparse.Namespace) -> list[LayerSpec]:
    return [
        LayerSpec(TokenEmbedding, VOCABULARY, args.hidden, args.context),
        *(LayerSpec(Block, args.hidden, args.heads, args.layers) for _ in range(args.layers)),
        LayerSpec(Head, args.hidden, VOCABULARY),
    ]


def make_model(args: argparse.Namespace, layout: Layout, config: dict[str, Any]) -> PipelineModule:
    topology = PipeModelDataParallelTopology(layout.stages, layout.tensor_ranks, layout.replicas)
    loss = LayerSpec(Loss, VOCABULARY)
    return PipelineModule(
        layers_of(args), topology=topology, loss_fn=loss, seed_layers=True, base_seed=args.seed, config=config
    )


def learning_rate(step: int, num_steps: int, warmup: int = 100) -> float:
    """Return the factor of the peak rate: linear warm-up, then linear decay to 0."""
    return min((step + 1) / warmup, (num_steps - step) / num_steps)


class HeldOut:
    """Return the mean loss on fixed held-out windows, distributed over the replicas as in training."""

    def __init__(self, engine: parallel3d.Engine, windows: Windows):
        self.engine, size = engine, engine.train_micro_batch_size_per_gpu()
        replicas, replica = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_rank()
        count = len(windows) // (size * replicas)
        starts = [(k * replicas + replica) * size for k in range(count)]
        items = [[windows[j] for j in range(start, start + size)] for start in starts]
        self.micro_batches = [(torch.stack([x for x, _ in i]), torch.stack([y for _, y in i])) for i in items]

    def loss(self) -> float:
        return float(self.engine.eval_batch(iter(self.micro_batches), num_micro_batches=len(self.micro_batches)))


class Generator:
    """Return the whole model as a function that every rank can call: ids [1, seq] -> logits [1, seq, vocabulary]."""

    def __init__(self, engine: parallel3d.Engine):
        self.engine, grid = engine, engine.grid
        stage, tensor_ranks = grid.get_pipe_parallel_world_size() - 1, grid.get_model_parallel_world_size()
        self.holders = [grid.stage_to_global(stage, data=0, model=index) for index in range(tensor_ranks)]
        self.parts = [even_part(VOCABULARY, tensor_ranks, index) for index in range(tensor_ranks)]

    def __call__(self, ids: Tensor) -> Tensor:
        logits = self.engine.eval_batch(iter([(ids, ids)]), compute_loss=False, num_micro_batches=1)
        result = torch.empty(*ids.shape, VOCABULARY, device=self.engine.device)
        for holder, (start, stop) in zip(self.holders, self.parts, strict=True):
            part = result[..., start:stop].contiguous()
            if self.engine.global_rank == holder:
                part.copy_(logits[0][:, : ids.shape[1]])
            parallel3d.comm.broadcast(part, holder)
            result[..., start:stop] = part
        return result


def train(engine: parallel3d.Engine, args: argparse.Namespace, held_out: HeldOut) -> None:
    memory_step = engine.global_steps + 3
    for step in range(engine.global_steps + 1, args.steps + 1):
        measured = step % args.eval_every == 0 or step in (2, args.steps)
        if measured:
            engine.reports.profile_next_batch()
        elif step == memory_step:
            engine.reports.profile_next_batch("memory")
        engine.train_batch()
        if measured:
            engine.monitor.write_events([("eval_loss", held_out.loss(), engine.global_samples)])
            if args.save:
                engine.save_checkpoint(args.save)


def write_timelines(engine: parallel3d.Engine, directory: Path | None) -> None:
    """Draw the last step as measured, and as simulated with its instruction times."""
    program, measured = engine.reports.timeline()
    if directory is None:
        return
    timelines = {"measured": measured, "simulated": simulate(program, measured_cost(measured))}
    (directory / "timeline.svg").write_text(svg(timelines, units=dict.fromkeys(timelines, "s")), encoding="utf-8")
    (directory / "timeline.json").write_text(json.dumps(chrome_trace(timelines)), encoding="utf-8")


def print_prediction(record: RunRecord, args: argparse.Namespace, config: dict[str, Any]) -> None:
    """Print the planner's prediction of this run, corrected by earlier runs in `--out`, with the measurement; on rank 0."""
    if parallel3d.comm.get_rank() > 0:
        return

    def micro_batch(samples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(samples, args.context, dtype=torch.int64)
        return tokens, tokens

    loss = LayerSpec(Loss, VOCABULARY)
    model = PlannedModel("gpt", layers_of(args), loss, micro_batch, args.context, config)
    earlier = [run for _, run in find_run_records([args.out]) if run != record]
    print(f"predicted and measured; {len(earlier)} earlier runs correct the prediction:")
    rich.print(compare_run(record, model, earlier))


def main() -> None:
    args = parse_arguments()
    train_text, held_out_text = load_corpus(args.data)
    parallel3d.init_distributed()
    folder = Path(args.out) / time.strftime("%Y-%m-%d_%H-%M-%S")  # rank 0's is used
    try:
        layout = choose_layout(args)
        config = make_config(args, layout, folder)
        model = make_model(args, layout, config)
    except parallel3d.Parallel3DError as error:  # of the options: a traceback would tell no more
        sys.exit(str(error))
    engine, *_ = parallel3d.initialize(
        model=model,
        config=config,
        training_data=Windows(train_text, args.context),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: learning_rate(s, args.steps)),
    )
    held_out = HeldOut(engine, Windows(held_out_text, args.context, args.eval_windows))
    directory = folder if engine.global_rank == 0 else None
    if directory is not None:
        directory.mkdir(parents=True)
        print(f"{len(train_text):,} bytes to train on, {len(held_out_text):,} held out; results in {directory}")

    if args.save and engine.resume(args.save) is not None and directory is not None:
        print(f"goes on from step {engine.global_steps} of {args.save}")
    if engine.global_steps < args.steps:
        train(engine, args, held_out)
        write_timelines(engine, directory)
        record = engine.reports.write_run_record(directory)
        if args.predict:
            print_prediction(record, args, config)
    text = sample(Generator(engine), b"\ndef ", args.sample, args.context, 0.8, torch.Generator().manual_seed(0))
    final = held_out.loss()
    if directory is not None:
        print(f"held-out loss {final:.3f} nats a byte after {args.steps} steps; a sample:")
        print("def " + text.decode(errors="replace"))
        print(
            f"p3d report {directory} makes a page of the training; the timeline of its last step is {directory}/timeline.svg"
        )
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
