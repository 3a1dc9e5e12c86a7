"""A script for DeepSpeed's plain engine, in the manner of its CIFAR-10 example: only the line that imports it has changed.

A small convolutional network trains on replicas with ZeRO stage 1, fp16 with a dynamic loss scale, warm-up and clipping, all by
DeepSpeed's JSON file. It shows engine(x), engine.backward and engine.step, the loader that initialize makes, what the engine
reports (loss scale, learning rate), and the accuracy on a test set, summed over the ranks. Stage and precision are keys of the
file: others need no other line of the script.

parallel3d --num_procs 2 examples/deepspeed_plain.py --deepspeed --deepspeed_config examples/deepspeed_plain.json
torchrun --nproc_per_node 2 examples/deepspeed_plain.py --deepspeed --deepspeed_config examples/deepspeed_plain.json
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import parallel3d as deepspeed


def add_argument():
    parser = argparse.ArgumentParser(description="Pictures")
    parser.add_argument("-e", "--epochs", default=3, type=int, help="number of total epochs")
    parser.add_argument("--log-interval", type=int, default=20, help="steps between two lines")
    parser.add_argument("--seed", type=int, default=1138, help="seed of the initial weights")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from the distributed launcher")
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Pictures(torch.utils.data.Dataset):
    """Pictures of CIFAR-10's size in 10 classes: each class has a pattern, under noise."""

    def __init__(self, count, seed):
        patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (count,), generator=draw)
        self.images = patterns[self.labels] * 0.5 + torch.randn(count, 3, 32, 32, generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, k):
        return self.images[k], self.labels[k]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 60)
        self.fc2 = nn.Linear(60, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc2(F.relu(self.fc1(x)))


def train(args, model_engine, trainloader):
    device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()

    micro_steps = model_engine.gradient_accumulation_steps()
    model_engine.train()
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(trainloader):
            inputs, labels = inputs.to(device), labels.to(device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()

            running_loss += loss.item()
            if (i + 1) % (args.log_interval * micro_steps) == 0:
                if model_engine.global_rank == 0:
                    print(
                        f"[{epoch + 1}, {i + 1:4d}] loss: {running_loss / (args.log_interval * micro_steps):.4f}"
                        f" lr: {model_engine.get_lr()[0]:.3e} scale: {model_engine.loss_scale():g}"
                    )
                running_loss = 0.0


def test(model_engine, testset):
    """Return the accuracy on the test set; each rank evaluates its own part."""
    device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    dtype = next(model_engine.module.parameters()).dtype
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    mine = torch.utils.data.Subset(testset, range(rank, len(testset), world_size))
    counts = torch.zeros(2, device=device)
    model_engine.eval()
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(mine, batch_size=64):
            outputs = model_engine(images.to(device, dtype))
            predicted = outputs.argmax(dim=1)
            counts += torch.tensor([(predicted == labels.to(device)).sum().item(), len(labels)], device=device)
    deepspeed.comm.all_reduce(counts, op=deepspeed.comm.ReduceOp.SUM)
    if rank == 0:
        print(f"Accuracy of the network on the {int(counts[1])} test images: {100 * counts[0] / counts[1]:.1f} %")


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=Pictures(1280, seed=2)
    )
    deepspeed.utils.log_dist(f"{model_engine.zero_optimization_stage()=} {model_engine.get_lr()=}", ranks=[0])
    train(args, model_engine, trainloader)
    deepspeed.comm.barrier()
    test(model_engine, Pictures(512, seed=3))


if __name__ == "__main__":
    main(add_argument())
