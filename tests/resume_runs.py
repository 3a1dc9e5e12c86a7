"""Training runs that are broken off and go on, and all that this could change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import toy
from layouts import BASE_SEED, OPTIMIZERS, specs
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe import PipelineModule

BEFORE, AFTER, SAMPLES_IN_ALL = 5, 6, 20  # an epoch is 20 / 8 -> 3 steps: the break is within the second


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES_IN_ALL

    def __getitem__(self, k: int) -> Any:
        self.read.append(k)
        ids, labels = toy.micro_batch(k)
        return ids[0], labels[0]


class Stream(IterableDataset[Any]):
    """The samples in order, without length."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(self._samples.__getitem__, range(SAMPLES_IN_ALL))


class Norms(nn.Module):
    """A module of no pipeline, with running means and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toy.VOCABULARY, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, toy.VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.embed(ids).flatten(0, 1)) + torch.rand(6, device=ids.device)
        return nn.functional.cross_entropy(self.out(nn.functional.dropout(x, 0.3, self.training)), labels.flatten())


def dropping_decoder() -> list[Any]:
    """Return layers with dropout inside and between tensor-parallel regions."""
    sizes = {"vocab_size": toy.VOCABULARY, "hidden_size": 16, "ffn_size": 32, "num_layers": 1, "num_heads": 2}
    return decoder(DecoderConfig(**sizes, embedding_dropout=0.1, attention_dropout=0.2, residual_dropout=0.1))


def make(case: str, seed: int, data: Any = None, micro_batch_size: int = 2) -> Engine:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 12, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 1500},
        "seed": seed,
        "steps_per_print": None,
    }
    config |= {
        "fp16 zero1": {
            "fp16": {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1},
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500},
        },
        "bf16 zero2": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1500}},
        "bf16 slices zero3": {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "tensor_parallel": {"size": 2},
            "pipeline": {"stages": 1},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
        "whole tensors": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
        "own loader": {"scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 6, 8]}}},
        "momentum": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "pipeline": {"stages": 2}},
    }.get(case, {})
    data = data or Samples()
    model: nn.Module
    if case in ("plain", "own loader", "stateful loader", "stream"):
        torch.manual_seed(seed)
        model = Norms()
    else:
        config.setdefault("pipeline", {"stages": 2})
        loss: Any = toy.cross_entropy
        items = specs(toy.model(tied=True, num_blocks=2, dropout=0.2))
        if case == "bf16 slices zero3":
            items, loss = dropping_decoder(), causal_lm_loss
        model = PipelineModule(items, loss_fn=loss, seed_layers=True, base_seed=seed + BASE_SEED, config=config)
    replicas, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if case == "own loader":
        data = DataLoader(data, batch_size=micro_batch_size, sampler=DistributedSampler(data, replicas, rank))
    if case == "stateful loader":
        data = StatefulDataLoader(data, batch_size=micro_batch_size, sampler=DistributedSampler(data, replicas, rank))
    if case == "stream":
        data = Stream(data)
    return parallel3d.initialize(model=model, config=config, training_data=data)[0]


def steps(engine: Engine, number: int) -> list[Any]:
    """Everything that a break could change."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # skipped steps
        for _ in range(number):
            loss = engine.train_batch().item()
            seen.append((loss.hex(), float(engine.get_global_grad_norm()).hex(), engine.get_lr(), engine.loss_scale()))
    seen.append((engine.global_steps, engine.global_samples, engine.skipped_steps))
    seen.append([random.random(), float(np.random.rand()), float(torch.rand(()))])
    with parallel3d.zero.GatheredParameters(engine.module.parameters()):
        seen.append({name: tensor.cpu().clone() for name, tensor in engine.module.state_dict().items()})
    return seen


def break_and_go_on(case: str, directory: str, in_use: bool) -> tuple[list[Any], list[Any], int]:
    engine = make(case, seed=3)
    steps(engine, BEFORE)
    engine.save_checkpoint(directory)
    unbroken, skipped = steps(engine, AFTER), engine.skipped_steps
    # Of another seed, so that nothing agrees by itself.
    other = make(case, seed=4)
    if in_use:
        steps(other, 2)
    other.load_checkpoint(directory)
    return unbroken, steps(other, AFTER), skipped


def check_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        differ = {name: (one[name], other[name]) for name in one if not torch.equal(one[name], other[name])}
        assert differ == {}
    else:
        assert one == other
