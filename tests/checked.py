"""Subjects of `p3d check`: the small decoder of toy3d, right and with planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import toy3d
from layouts import specs
from torch import Tensor, nn

from parallel3d.errors import PartitionError
from parallel3d.models import DecoderConfig, causal_lm_loss
from parallel3d.models import decoder as decoder_layers
from parallel3d.parity import Subject
from parallel3d.pipe import LayerSpec


class Loss(nn.Module):
    """Mean, or sum and count, of the cross entropy: sliced where a context is given."""

    def __init__(self, per_token: bool = False, context: Any = None):
        super().__init__()
        self.per_token = per_token
        self.sliced = toy3d.SlicedLoss(per_token, context) if context is not None else None

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        if self.sliced is not None:
            return self.sliced(x, labels)
        loss = toy3d.plain_loss(x, labels)
        return (loss * labels.numel(), labels.numel()) if self.per_token else loss


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(toy3d.HIDDEN, toy3d.HIDDEN).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Drifting(nn.Module):
    """Computes something else on the second replica after its first forward, and still reports the same loss."""

    def __init__(self, context: Any = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(toy3d.HIDDEN))
        self.is_second, self.forwards = context is not None and context.groups.coordinate("data") == 1, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.is_second and self.forwards > 1:
            with torch.no_grad():
                self.weight.mul_(1.001)
        return x * self.weight


class Uncut(nn.Module):
    """Can't be cut in two."""

    def __init__(self, context: Any = None):
        super().__init__()
        self.inner = nn.Linear(toy3d.HIDDEN, 3)
        if context is not None and context.groups.model.size > 1:
            raise PartitionError("3 outputs are sliced over 2 ranks; give 4")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class FaultyMLP(toy3d.MLP):
    """One tensor-parallel rank scales one gradient."""

    factor = 1.001

    def __init__(self, context: Any = None):
        super().__init__(context)
        if context is not None and context.groups.coordinate("model") == 1:
            self.gate_up.weight.register_hook(lambda gradient: gradient * self.factor)


class GrosslyFaultyMLP(FaultyMLP):
    factor = 1.5


CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6}},
    "gradient_clipping": 0.3,
    "zero_optimization": {"reduce_bucket_size": 1500},
}


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4}}
SCHEDULED = {**CONFIG, "scheduler": WARMUP}


def decoder() -> Subject:
    return Subject(specs(toy3d.model(tied=True, num_blocks=1)), toy3d.micro_batch, LayerSpec(Loss), CONFIG)


def by_tokens() -> dict[str, Any]:
    """A loss (sum, count), dropout, a frozen layer and a learning-rate schedule; a dict instead of a Subject."""
    layers = specs(toy3d.model(tied=False, num_blocks=1))
    layers[1:1] = [LayerSpec(nn.Dropout, 0.2)]
    layers[4:4] = [LayerSpec(Frozen)]
    return {"layers": layers, "micro_batch": toy3d.micro_batch, "loss_fn": LayerSpec(Loss, True), "config": SCHEDULED}


def dropping() -> Subject:
    """Dropout between regions and inside them; the sequence is odd, and two query heads share a key and value head."""
    config = DecoderConfig(
        vocab_size=toy3d.WORDS,
        hidden_size=toy3d.HIDDEN,
        ffn_size=toy3d.FFN,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        embedding_dropout=0.2,
        attention_dropout=0.2,
        residual_dropout=0.2,
    )
    common = {**CONFIG, "rng": {"layout_independent": True}}
    return Subject(decoder_layers(config, units="half"), toy3d.micro_batch, causal_lm_loss, common)


def dropping_apart() -> Subject:
    return replace(dropping(), config=CONFIG)


def halved() -> Subject:
    """A tied decoder whose blocks are two layers each."""
    sizes = {"vocab_size": toy3d.WORDS, "hidden_size": toy3d.HIDDEN, "ffn_size": toy3d.FFN}
    config = DecoderConfig(**sizes, num_layers=1, num_heads=4, num_kv_heads=2, tied=True)
    return Subject(decoder_layers(config, units="half"), toy3d.micro_batch, causal_lm_loss, CONFIG)


def faulty(mlp: type[FaultyMLP] = FaultyMLP) -> Subject:
    layers = specs(toy3d.model(tied=True, num_blocks=1))
    layers[2] = LayerSpec(mlp)
    return Subject(layers, toy3d.micro_batch, LayerSpec(Loss), CONFIG)


def grossly_faulty() -> Subject:
    return faulty(GrosslyFaultyMLP)


def drifting() -> Subject:
    layers = specs(toy3d.model(tied=True, num_blocks=1))
    layers[1:1] = [LayerSpec(Drifting)]
    return Subject(layers, toy3d.micro_batch, LayerSpec(Loss), CONFIG)


def unsliceable() -> Subject:
    return Subject([LayerSpec(Uncut)], lambda k: (torch.ones(2, toy3d.HIDDEN), torch.ones(2, 3)), nn.MSELoss())


def two_layers() -> Subject:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 4)]
    return Subject(layers, toy3d.micro_batch, nn.functional.mse_loss)


def not_a_subject() -> list[Any]:
    return []


def broken() -> Subject:
    raise OSError("no such corpus")


def needs_context() -> Subject:
    return Subject([LayerSpec(toy3d.SlicedLoss, False)], toy3d.micro_batch)


def in_fp8() -> Subject:
    """A decoder of blocks whose linears 16 divides on two ranks."""
    config = DecoderConfig(
        vocab_size=toy3d.WORDS, hidden_size=32, ffn_size=32, num_layers=2, num_heads=2, max_positions=16
    )
    fp8 = {"enabled": True, "filter": ["layers.2.down"]}
    return Subject(decoder_layers(config), toy3d.micro_batch, causal_lm_loss, {**CONFIG, "fp8": fp8})
