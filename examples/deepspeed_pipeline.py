"""A script for DeepSpeed's pipelines, in the manner of its tutorial: only the line that imports it has changed.

A small AlexNet, as a list of modules and functions, trains in pipeline stages and replicas on pictures of CIFAR-10's size that
are made up here. It shows the configuration as a JSON file and the arguments that DeepSpeed's launcher and configuration have.
-p 0 is the base line: the same network, whole on every rank, with engine(x), engine.backward and engine.step.
Both learn what plain PyTorch does on one process.

parallel3d --num_procs 4 examples/deepspeed_pipeline.py --deepspeed_config examples/deepspeed_pipeline.json --backend gloo
torchrun --nproc_per_node 2 examples/deepspeed_pipeline.py --deepspeed_config examples/deepspeed_pipeline.json -p 0
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import parallel3d as deepspeed


class Pictures(torch.utils.data.Dataset):
    """Pictures of CIFAR-10's size in 10 classes: each class has a pattern, under noise."""

    def __init__(self, count, seed=0):
        patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (count,), generator=draw)
        self.images = patterns[self.labels] * 0.5 + torch.randn(count, 3, 32, 32, generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return self.images[k], self.labels[k]


class SmallAlexNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, kernel_size=5, stride=2, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=2),
            nn.Conv2d(8, 16, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((4, 4))
        self.classifier = nn.Sequential(
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, num_classes),
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def join_layers(vision_model):
    """Return the same network as a list of layers."""
    return [
        *vision_model.features,
        vision_model.avgpool,
        lambda x: torch.flatten(x, 1),
        *vision_model.classifier,
    ]


def get_args():
    parser = argparse.ArgumentParser(description="Pictures")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the distributed launcher")
    parser.add_argument("-s", "--steps", type=int, default=60, help="quit after this many steps")
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2, help="number of stages; 0: no pipeline")
    parser.add_argument("--backend", type=str, default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--seed", type=int, default=1138, help="seed of the initial weights")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def train_base(args, trainset):
    torch.manual_seed(args.seed)
    net = SmallAlexNet()
    engine, _, dataloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
    )
    data_iter = iter(deepspeed.utils.RepeatingLoader(dataloader))
    criterion = nn.CrossEntropyLoss()

    step, total = 0, 0.0
    for _ in range(args.steps * engine.gradient_accumulation_steps()):
        inputs, labels = next(data_iter)
        outputs = engine(inputs.to(engine.device))
        loss = criterion(outputs, labels.to(engine.device))
        engine.backward(loss)
        total += loss.detach() / engine.gradient_accumulation_steps()
        if engine.is_gradient_accumulation_boundary():
            step += 1
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step: {step:3d} / {args.steps:3d} loss: {total / dist.get_world_size():.5f}")
            total = 0.0
        engine.step()


def train_pipe(args, trainset, part="parameters"):
    torch.manual_seed(args.seed)
    deepspeed.runtime.utils.set_random_seed(args.seed)
    net = SmallAlexNet()
    net = deepspeed.pipe.PipelineModule(
        layers=join_layers(net),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method=part,
        activation_checkpoint_interval=0,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
    )
    for step in range(1, args.steps + 1):
        loss = engine.train_batch()
        if dist.get_rank() == 0:
            print(f"step: {step:3d} / {args.steps:3d} loss: {loss:.5f}")


if __name__ == "__main__":
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    args.local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(args.local_rank)

    trainset = Pictures(2048)
    if args.pipeline_parallel_size == 0:
        train_base(args, trainset)
    else:
        train_pipe(args, trainset)
