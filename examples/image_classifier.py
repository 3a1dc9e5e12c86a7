"""An image classifier: a small ResNet in two pipeline stages, with replicas, on scikit-learn's 8 x 8 pictures of digits.

The model is a list of layers of one's own. The engine deals shuffled samples to the replicas, steps an optimizer and a schedule
of PyTorch, and evaluates on held-out pictures. The norms are GroupNorm, as BatchNorm would take its statistics, as with any
gradient accumulation, over one micro-batch of one replica: the loss would depend on the micro-batch size, and the replicas
would have other running averages. Without it the loss is that of one process.

parallel3d --num_procs 4 examples/image_classifier.py              # 2 stages x 2 replicas on the CPU; torchrun works too
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

TRAINED_ON = 1500  # of 1797 pictures
CONFIG = {
    "train_batch_size": 60,
    "train_micro_batch_size_per_gpu": 15,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.005, "weight_decay": 0.01}},
    "dataloader_shuffle": True,
    "steps_per_print": None,
}


class Residual(nn.Module):
    """x: [batch, channels, size, size] -> [batch, outputs, size / stride, size / stride]. arXiv:1512.03385."""

    def __init__(self, channels: int, outputs: int, stride: int = 1):
        super().__init__()
        self.first = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, outputs) for _ in range(2))
        self.shortcut = nn.Conv2d(channels, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def layers() -> list[LayerSpec | nn.Module]:
    """Return the whole network; each rank builds the layers of its own stage."""
    return [
        LayerSpec(nn.Conv2d, 1, 16, 3, padding=1),
        LayerSpec(Residual, 16, 16),
        LayerSpec(Residual, 16, 32, stride=2),
        LayerSpec(Residual, 32, 32),
        nn.Flatten(),
        LayerSpec(nn.Linear, 32 * 4 * 4, 10),
    ]


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """Return what to train on and what to test on: images [1, 8, 8], labels."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    whole = TensorDataset(images[order], torch.tensor(digits.target)[order])
    return TensorDataset(*whole[:TRAINED_ON]), TensorDataset(*whole[TRAINED_ON:])


def train(steps: int) -> tuple[list[float], float | None]:
    """Return the losses, and on the last stage of the first replica the share of test pictures that are recognized."""
    training, test = pictures()
    model = PipelineModule(layers(), num_stages=2, loss_fn=F.cross_entropy, seed_layers=True)
    engine, *_ = parallel3d.initialize(
        model=model,
        config=CONFIG,
        training_data=training,
        lr_scheduler=lambda o: OneCycleLR(o, 0.005, total_steps=steps),
    )
    losses = []
    for step in range(1, steps + 1):
        losses.append(float(engine.train_batch()))
        if engine.global_rank == 0 and step % 25 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    # One micro-batch, the same on every replica. The logits are where the last stage is.
    logits = engine.eval_batch(iter([test[:]]), compute_loss=False, num_micro_batches=1)
    if logits is None or engine.grid.get_data_parallel_rank() > 0:
        return losses, None
    labels = test[:][1].to(engine.device)
    return losses, float((logits[0].argmax(1) == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=75)
    parallel3d.init_distributed()
    _, accuracy = train(parser.parse_args().steps)
    if accuracy is not None:
        print(f"{accuracy:.1%} of the test pictures are recognized")
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
