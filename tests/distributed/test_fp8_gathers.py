"""ZeRO-3 gathers weights of fp8 linears in fp8: half the bytes, and to the bit the numbers of whole weights that are cast."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d
from parallel3d.comm.log import LOG
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.zero import GatheredParameters

WIDTH, DEPTH, SAMPLES, STEPS = 32, 3, 4, 3


class Block(nn.Module):
    """Another code than its linear reads the weight of `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reader(Block):
    """Uses the weight of its last linear once more, and has one that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return super().forward(x) + F.linear(F.pad(x, (0, 3 * WIDTH)), self.down.weight)


class Whole(nn.Module):
    """The layers as a module that is no pipeline."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = layers[0], nn.ModuleList(layers[1:-1]), layers[-1]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(x).flatten(0, 1).float(), labels.flatten())


def loss_of(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1).float(), labels.flatten())


def batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    shape = (SAMPLES, 5)
    return [
        (torch.randn(*shape, WIDTH, generator=generator), torch.randint(WIDTH, shape, generator=generator))
        for _ in range(2 * STEPS)
    ]


def train(block: type[Block], pipelined: bool, device: str, **config: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses of steps and of evaluations after them, weights, and bytes of the last step's all-gathers."""
    kinds = [(nn.Linear, WIDTH, WIDTH), *[(block,)] * DEPTH, (nn.Linear, WIDTH, WIDTH)]
    whole = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "comms_logger": {"enabled": True},
        "steps_per_print": None,
        "pipeline": {"stages": 1},
        **config,
    }
    torch.manual_seed(0)
    model: nn.Module
    if pipelined:
        specs = [LayerSpec(kind, *sizes) for kind, *sizes in kinds]
        model = PipelineModule(specs, loss_fn=loss_of, base_seed=0, seed_layers=True, config=whole)
    else:
        model = Whole([kind(*sizes) for kind, *sizes in kinds])
    engine, *_ = parallel3d.initialize(model=model, config=whole)
    replica = engine.process_groups.data.index
    data = [(x.to(device, torch.bfloat16), y.to(device)) for x, y in batches(replica)]
    losses = []
    for step in range(STEPS):
        own = data[2 * step : 2 * step + 2]
        LOG.seconds.clear()
        if pipelined:
            losses.append(engine.train_batch(iter(own)).item())
        else:
            for batch in own:
                loss = engine(*batch)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        gathered = sum(nbytes * len(times) for (kind, nbytes, _), times in LOG.seconds.items() if kind == "all_gather")
        if pipelined:
            losses.append(engine.eval_batch(iter(own)).item())
        else:
            with torch.no_grad():
                losses.append(engine.eval()(*own[0]).item())
            engine.train()
    with GatheredParameters(model.parameters()):
        weights = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    return losses, weights, gathered


def compare(block: type[Block], pipelined: bool, device: str = "cpu", **config: Any) -> tuple[bool, list[int]]:
    """Whether stages 2 and 3 are equal in fp8, and the bytes that stage 3 gathers in a step, in fp8 and in bf16."""
    zero = {"stage3_param_persistence_threshold": 0}
    results = [
        train(block, pipelined, device, zero_optimization={**zero, "stage": stage}, fp8={"enabled": fp8}, **config)
        for stage, fp8 in ((2, True), (3, True), (3, False))
    ]
    (losses, weights, _), (own_losses, own_weights, _), _ = results
    assert len(set(losses)) == len(losses)
    equal = losses == own_losses and all(torch.equal(own_weights[name], w) for name, w in weights.items())
    return equal, [gathered for *_, gathered in results[1:]]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block", [Block, Reader])
def test_half_the_bytes_give_the_same_numbers(run_ranks, block, pipelined: bool, compiled: bool):
    config = {"compile": {"enabled": compiled, "backend": "aot_eager"}}
    print(run_ranks(2, partial(compare, block, pipelined, **config)))
    for equal, (in_fp8, in_bf16) in run_ranks(2, partial(compare, block, pipelined, **config)):
        assert equal
        assert in_fp8 < 0.6 * in_bf16, (in_fp8, in_bf16)
