"""A pipeline under Ray Train: Ray places the workers, starts them again after a failure and keeps the checkpoints.

The engine is the one of every other script: it finds the world that Ray has joined. All workers save into one directory
that all nodes see, rank 0 reports it, and Ray copies it to its storage; workers that Ray starts again load Ray's newest
copy. After a failure training goes on by itself, up to three times. Started again with another number of workers, it goes
on from the same checkpoint in the new layout. Needs Ray: pip install "ray[train]".

python examples/ray_train.py --workers 2 --storage /shared/ray
python examples/ray_train.py --workers 16 --stages 4 --gpus --storage /shared/ray
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

SAVE_EVERY = 5
CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
}


def train(args: dict[str, Any]) -> None:
    """Train on one of Ray's workers."""
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    layers = [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 32, 32), nn.Tanh())]
    model = PipelineModule(layers, num_stages=args["stages"], loss_fn=F.mse_loss, seed_layers=True)
    data = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
    engine, *_ = parallel3d.initialize(model=model, config=CONFIG, training_data=data)
    if (newest := ray.train.get_checkpoint()) is not None:
        with newest.as_directory() as directory:
            engine.load_checkpoint(directory)
    for step in range(engine.global_steps + 1, args["steps"] + 1):
        loss = engine.train_batch()
        if step % SAVE_EVERY == 0:
            engine.save_checkpoint(args["scratch"], tag="newest")
            # Each worker reports, and waits for the others; a report takes Ray seconds.
            checkpoint = Checkpoint(args["scratch"]) if engine.global_rank == 0 else None
            ray.train.report({"step": step, "loss": float(loss)}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--storage", default="/tmp/ray_train", metavar="DIR", help="that all nodes see")
    args = parser.parse_args()
    storage = Path(args.storage).absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"stages": args.stages, "steps": args.steps, "scratch": str(storage / "scratch")},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(name="pipeline", storage_path=str(storage), failure_config=FailureConfig(max_failures=3)),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}: loss {result.metrics['loss']:.6f}; {result.checkpoint}")


if __name__ == "__main__":
    main()
