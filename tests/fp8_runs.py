"""Runs of fp8 linears whose weights are whole, and are gathered in fp8 by ZeRO-3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from parallel3d.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

import parallel3d
from parallel3d.comm.log import LOG
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.zero import GatheredParameters

WIDTH, SAMPLES, STEPS = 32, 4, 2
LINEARS = 2 * WIDTH * 4 * WIDTH  # elements of the two weights of a Block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Reader(Block):
    """Reads the weight of its last linear, too, and that of one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return super().forward(x) + F.linear(F.pad(x, (0, 3 * WIDTH)), self.down.weight)


class Borrower(Block):
    """Reads the weight of its first linear in a way that only a call shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(x, weight_of(self.up)).narrow(-1, 0, WIDTH)


def weight_of(linear: nn.Module) -> Tensor:
    return linear.weight


class Whole(nn.Module):
    """The layers as a module that is no pipeline."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks, self.last = layers[0], nn.ModuleList(layers[1:-1]), layers[-1]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.last(x), labels)


def loss_of(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x.flatten(0, 1).float(), labels.flatten())


def batches(replica: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    shape = (SAMPLES, 5)
    return [
        (torch.randn(*shape, WIDTH, generator=generator), torch.randint(WIDTH, shape, generator=generator))
        for _ in range(2 * STEPS)
    ]


def make(kinds: Sequence[tuple[Any, ...]], pipelined: bool, **config: Any) -> tuple[Any, nn.Module]:
    """An engine and its model, of layers given by their classes and arguments."""
    whole = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "fp8": {"enabled": True},
        "pipeline": {"stages": 1},
        "steps_per_print": None,
        **config,
    }
    torch.manual_seed(0)
    model: nn.Module = Whole([kind(*sizes) for kind, *sizes in kinds])
    if pipelined:
        specs = [LayerSpec(kind, *sizes) for kind, *sizes in kinds]
        model = PipelineModule(specs, loss_fn=loss_of, base_seed=0, seed_layers=True, config=whole)
    engine, *_ = parallel3d.initialize(model=model, config=whole)
    return engine, model


Trained = tuple[list[float], dict[str, Tensor], set[int]]


def train(blocks: Sequence[type[Block]], pipelined: bool, device: str, **config: Any) -> Trained:
    """Losses of steps and of evaluations after them, weights, and the bytes of each all-gather.

    On the CPU, compiled layers of pipelines are not evaluated, as those of other modules are: the compiler would trace each
    of them once more.
    """
    kinds = [(nn.Linear, WIDTH, WIDTH), *((block,) for block in blocks), (nn.Linear, WIDTH, WIDTH)]
    engine, model = make(kinds, pipelined, comms_logger={"enabled": True}, **config)
    data = [(x.to(device, torch.bfloat16), y.to(device)) for x, y in batches(engine.process_groups.data.index)]
    losses = []
    LOG.seconds.clear()
    for step in range(STEPS):
        own = data[2 * step : 2 * step + 2]
        if pipelined:
            losses.append(engine.train_batch(iter(own)).item())
            if device != "cpu" or not engine.is_compiled:
                losses.append(engine.eval_batch(iter(own)).item())
            continue
        for batch in own:
            loss = engine(*batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine.eval()(*own[0]).item())
        engine.train()
    gathered = {nbytes for kind, nbytes, _ in LOG.seconds if kind == "all_gather"}
    with GatheredParameters(model.parameters()):
        weights = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    return losses, weights, gathered


class Frozen(Block):
    """One linear is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class Tied(Block):
    """Two linears have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(WIDTH, 4 * WIDTH)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.again(x).narrow(-1, 0, WIDTH)


def interrupted(stage: int, pipelined: bool, directory: str) -> list[str]:
    """Losses of steps between which a checkpoint is loaded, a step overflows, and weights are changed while they are whole."""
    kinds = [(nn.Linear, WIDTH, WIDTH), (Block,), (Frozen,), (Tied,), (nn.Linear, WIDTH, WIDTH)]
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    bf16 = {"enabled": True, "check_grad_overflow": True}
    engine, model = make(kinds, pipelined, zero_optimization=zero, bf16=bf16)
    data = [(x.bfloat16(), y) for x, y in batches(engine.process_groups.data.index)]
    losses: list[float] = []

    def micro_batch(batch: tuple[Tensor, Tensor]) -> None:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())

    def step(own: list[tuple[Tensor, Tensor]]) -> None:
        if pipelined:
            losses.extend((engine.train_batch(iter(own)).item(), engine.eval_batch(iter(data[:2])).item()))
        else:
            for batch in own:
                micro_batch(batch)

    def change() -> None:
        with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)

    step(data[:2])
    engine.save_checkpoint(directory)
    step(data[2:])
    step([(x * torch.inf, y) for x, y in data[:2]])
    step(data[2:])
    engine.load_checkpoint(directory)
    step(data[2:])
    change()
    step(data[:2])
    if not pipelined:  # within a step
        micro_batch(data[0])
        engine.load_checkpoint(directory)
        step(data[2:])
        micro_batch(data[0])
        change()
        micro_batch(data[1])
    return list(map(str, losses))  # some are NaN


def change_a_weight(stage: int, change: str) -> list[list[float]]:
    """Losses of a step of two micro-batches, before or between which a weight is made 8 times as large."""
    runs = []
    for changes_before in (True, False):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        kinds = [(nn.Linear, WIDTH, WIDTH), (Block,), (nn.Linear, WIDTH, WIDTH)]
        engine, model = make(kinds, False, zero_optimization=zero, optimizer={"type": "AdamW"})
        weight, losses = model.blocks[0].up.weight, []
        for k, (x, labels) in enumerate(batches(0)[:2]):
            if (k == 0) == changes_before:
                if change == "master":
                    master = safe_get_full_fp32_param(weight)
                    safe_set_full_fp32_param(weight, 8 * master)
                else:
                    with torch.no_grad():
                        weight.mul_(8)
            loss = engine(x.to(torch.bfloat16), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        runs.append(losses)
    return runs


def compare(pipelined: bool, compiled: bool, device: str = "cpu") -> set[int]:
    """Bytes of all-gathers with stage 3, whose numbers must be those of stage 2."""
    blocks = [Block, Reader] if compiled else [Block, Reader, Borrower]
    runs = []
    for stage in (2, 3):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        compiling = {"enabled": compiled, "backend": "aot_eager" if device == "cpu" else "inductor"}
        runs.append(train(blocks, pipelined, device, zero_optimization=zero, compile=compiling))
    (losses, weights, _), (own_losses, own_weights, gathered) = runs
    assert own_losses == losses
    assert len(set(losses)) == len(losses)
    assert all(torch.equal(own_weights[name], weight) for name, weight in weights.items())
    return gathered
