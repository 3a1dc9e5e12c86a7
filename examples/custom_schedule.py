"""A schedule of your own: written as lists, checked, drawn as text beside 1F1B, and used for training.

It is a list of instructions for each stage: F3@1 is the forward of micro-batch 3 on stage 1, I and W are the halves of its
backward, for the input and for the weights. This one is 1F1B in which stage r computes weight gradients r micro-batches late:
no stage holds more activations than the first one of 1F1B, and the others have work where they would wait. The package adds
transfers and reductions and refuses lists that are incomplete or would deadlock. The numbers are those of any other schedule.

parallel3d --num_procs 4 examples/custom_schedule.py               # 4 stages on the CPU; --stages 2: 2 stages x 2 replicas
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.schedule.builders import from_lists, one_f_one_b
from parallel3d.schedule.draw import text_grid
from parallel3d.schedule.memory import most_in_flight
from parallel3d.schedule.order import validate

MICRO_BATCHES = 8


def late_weight_gradients(stages: int, micro_batches: int) -> list[list[str]]:
    """Return each stage's instructions, in the order in which it runs them."""
    lists = []
    for stage in range(stages):
        warmup = min(stages - stage, micro_batches)
        order = [f"F{k}" for k in range(warmup)]
        for k in range(micro_batches):
            order.append(f"I{k}")
            if k >= stage:
                order.append(f"W{k - stage}")
            if k + warmup < micro_batches:
                order.append(f"F{k + warmup}")
        order += [f"W{k}" for k in range(max(micro_batches - stage, 0), micro_batches)]
        lists.append([f"{instruction}@{stage}" for instruction in order])
    return lists


def show(schedule: list[list[str]]) -> None:
    """Print the schedule and 1F1B, and how many micro-batches' activations each stage holds at most."""
    stages = len(schedule)
    own = from_lists(schedule, placement=range(stages))
    validate(own)  # as `initialize` does: raises ScheduleError, with the instruction that is missing or waits forever
    for program in (one_f_one_b(stages, own.num_micro_batches), own):
        print(f"{text_grid(program)}\nactivations held: {most_in_flight(program)}\n")


def train(schedule: str | list[list[str]], stages: int, steps: int) -> list[float]:
    """Return the losses."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "pipeline": {"schedule": schedule},
        "steps_per_print": None,
    }
    layers = [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 32, 32), torch.tanh)]
    model = PipelineModule(layers, num_stages=stages, loss_fn=F.mse_loss, seed_layers=True)
    engine, *_ = parallel3d.initialize(model=model, config=config, training_data=samples())
    return [float(engine.train_batch()) for _ in range(steps)]


def samples() -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    return list(zip(inputs, inputs.roll(1, dims=1).sin(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    parallel3d.init_distributed()
    schedule = late_weight_gradients(args.stages, MICRO_BATCHES)
    if parallel3d.comm.get_rank() == 0:
        show(schedule)
    losses = train(schedule, args.stages, args.steps)
    if parallel3d.comm.get_rank() == 0:
        print(f"loss {losses[0]:.5f} in the first step, {losses[-1]:.5f} in step {len(losses)}")
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
