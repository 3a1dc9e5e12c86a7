"""Training on several nodes: how it is started there, which rank does what on which node, and how it goes on after a failure.

The script is the same as for one node: the launcher says who meets where. Ranks of a stage are neighbours, so with as many
stages as nodes the reductions of gradients stay within a node, and activations alone cross the network. With --save DIR, on a
disk that all nodes see, it saves checkpoints and goes on from the newest when it is started again, even with other ranks.
Lines of a hostfile are such as: gpu-1 slots=8. docs/clusters.md tells more.

parallel3d --hostfile hosts --max_restarts 3 examples/multi_node.py --save /shared/run              # starts all nodes by ssh
sbatch examples/clusters/slurm.sbatch examples/multi_node.py --save /shared/run
torchrun --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr gpu-1 examples/multi_node.py     # on gpu-2: --node_rank 1
"""

import argparse
import socket

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
}


def samples() -> TensorDataset:
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.roll(1, dims=1).sin())


def layers() -> list[LayerSpec | nn.Module]:
    return [layer for _ in range(4) for layer in (LayerSpec(nn.Linear, 32, 32), nn.Tanh())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--save", metavar="DIR", help="save there every 10 steps, and go on from the newest that is there"
    )
    args = parser.parse_args()
    parallel3d.init_distributed()
    model = PipelineModule(layers(), num_stages=args.stages, loss_fn=F.mse_loss, seed_layers=True)
    engine, *_ = parallel3d.initialize(model=model, config=CONFIG, training_data=samples())
    place = f"local rank {parallel3d.comm.get_local_rank()} of {socket.gethostname()}"
    stage, replica = engine.grid.get_stage_id(), engine.grid.get_data_parallel_rank()
    print(f"rank {engine.global_rank} is {place}: stage {stage}, replica {replica}", flush=True)
    if args.save and engine.resume(args.save) is not None and engine.global_rank == 0:
        print(f"goes on from step {engine.global_steps}")
    for step in range(engine.global_steps + 1, args.steps + 1):
        loss = float(engine.train_batch())
        if engine.global_rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
        if args.save and step % 10 == 0:
            engine.save_checkpoint(args.save)
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
