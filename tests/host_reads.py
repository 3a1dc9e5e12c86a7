"""Runs whose steps shall not make the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

import torch
import toy
from layouts import make_engine
from torch import Tensor

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.models import CausalLMLoss, DecoderConfig, Rope, decoder
from parallel3d.pipe import PipelineModule

ACCUMULATION = 2
_FOLDER = TemporaryDirectory()

# name -> (ranks, configuration)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "recomputing": (1, {"pipeline": {"activation_checkpoint_interval": 1}}),
    "1f1b": (2, {"pipeline": {"stages": 2}}),
    "zb-h1": (2, {"pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "zbv": (2, {"pipeline": {"stages": 2, "schedule": "zbv", "num_chunks": 2, "placement": "v"}}),
    "zero0": (2, {"zero_optimization": {"stage": 0}}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
    "monitored": (1, {"run_record": {"directory": _FOLDER.name}}),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}
# Numbers that the host reads in a step: whether gradients overflowed.
READS = {"fp32": 0, "bf16": 0, "fp16": 1}


def sum_and_count(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """A loss whose count is a number of the host's."""
    return toy.cross_entropy(output, labels) * labels.numel(), labels.numel()


def make(layout: str, precision: str) -> Engine:
    """A tied model with several inputs, clipped, with a learning rate that changes."""
    settings = {**LAYOUTS[layout][1], **PRECISIONS[precision]}
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}}
    return make_engine(
        toy.model(tied=True, num_blocks=1),
        sum_and_count,
        optimizer="AdamW",
        optimizer_changes={"fused": True},
        accumulation=ACCUMULATION,
        clipping=1.0,
        scheduler=schedule,
        **settings,
    )


def data() -> Iterator[Any]:
    """Return the model's micro-batches on the host, all of one shape."""
    return (toy.micro_batch(k, "tuple") for k in count())


def make_decoder(precision: str) -> Engine:
    """Two stages of a decoder that is told masks and positions, and a loss by tokens."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "fused": True}},
        "steps_per_print": None,
        "pipeline": {"stages": 2},
        **PRECISIONS[precision],
    }
    sizes = DecoderConfig(vocab_size=64, hidden_size=32, ffn_size=64, num_layers=2, num_heads=2, rope=Rope(kind="yarn"))
    layers = decoder(sizes, units="half")
    module = PipelineModule(layers, loss_fn=CausalLMLoss(shift=True, per_token=True), seed_layers=True, config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def decoder_data() -> Iterator[Any]:
    """Padded, of one shape, on the host."""
    for k in count():
        ids = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(k))
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(16)[None]}, ids
