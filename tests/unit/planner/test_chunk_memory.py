"""A chunk's bytes, put together from its layers', against live storages of plain layers, and counts by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.models import DecoderConfig
from parallel3d.models.blocks import decoder
from parallel3d.monitor.memory import LiveStorages
from parallel3d.pipe import LayerSpec
from parallel3d.planner.predict.chunk_memory import ChunkMemory, MemoryReplay, chunk_memory
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Op
from parallel3d.schedule.lowering import lower
from parallel3d.schedule.memory import ChunkBytes

SEQ, HIDDEN, SAMPLES = 32, 16, 2


class Both(nn.Module):
    """A mask travels along, as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(3 * HIDDEN, HIDDEN),
        )

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return x + self.second(torch.relu(self.first(self.norm(x))) * mask), mask


class Starts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), torch.ones(*x.shape[:-1], 1, device=x.device)


class Ends(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(pair[0])


class Chain(nn.Module):
    """Layers as one."""

    def __init__(self, specs: list[LayerSpec]):
        super().__init__()
        self.layers = nn.ModuleList(spec.build() for spec in specs)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def blocks() -> list[LayerSpec]:
    config = DecoderConfig(vocab_size=50, hidden_size=HIDDEN, ffn_size=40, num_layers=2, num_heads=2, max_positions=SEQ)
    return decoder(config)[1:4]


MODELS = {
    "a mask": [LayerSpec(Starts), LayerSpec(Both), LayerSpec(Both), LayerSpec(Ends)],
    "blocks": [LayerSpec(Starts), LayerSpec(Ends), *blocks()],
    "residuals": [LayerSpec(Starts), LayerSpec(Both), LayerSpec(Ends), LayerSpec(nn.Dropout, 0.5)],
}


def traced(specs: list[LayerSpec], recompute: int = 0) -> Any:
    config = load({"train_micro_batch_size_per_gpu": 1})
    profile = ModelProfile(specs, torch.zeros(SAMPLES, SEQ, HIDDEN), None, None, config, "cpu")
    return profile.layers(Layout(micro_batch=SAMPLES, recompute=recompute))


def run(specs: list[LayerSpec], splits: bool) -> dict[str, int]:
    """Live storages of plain layers in the place of an executor, which holds the output and its gradient."""
    chain, sink = Chain(specs), GradientSink()
    for parameter in chain.parameters():
        sink.attach(parameter, torch.zeros_like(parameter))
    if splits:
        make_splittable(chain, sink)
    sink.open()
    x, measured = torch.randn(SAMPLES, SEQ, HIDDEN), {}
    chain(x)  # makes tables that stay
    with LiveStorages() as live:
        output = chain(x)
        measured["forward"] = live.peak
        output = output[0] if isinstance(output, tuple) else output
        measured["saved"] = live.nbytes
        gradient = torch.zeros_like(output)
        live.peak = live.nbytes
        with sink.deferring(0) if splits else nullcontext():
            torch.autograd.backward([output], [gradient])
        measured["backward"] = live.peak
        del output, gradient
        measured["deferred"] = live.nbytes
        sink.run_deferred(0)
        assert live.nbytes == 0
    return measured


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", MODELS)
def test_layers_together_hold_what_they_do_in_plain_pytorch(name: str, splits: bool):
    specs = MODELS[name]
    parts = chunk_memory(traced(specs), [(0, 0)], (), "loader", splits, 0)
    found = {
        "forward": parts.within[Op.FORWARD],
        "saved": parts.held.saved,
        "backward": parts.held.saved + parts.held.output_gradient + parts.within[Op.BACKWARD],
        "deferred": parts.held.deferred,
    }
    assert found == run(specs, splits)


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_recomputed_layers_hold_the_inputs_of_their_groups(interval: int):
    specs = [LayerSpec(Starts), *[LayerSpec(Both)] * 4, LayerSpec(Ends)]
    held = chunk_memory(traced(specs, interval), [(1000, 0)], (), "loader", False, interval).held
    hidden, mask = 4 * SAMPLES * SEQ * HIDDEN, 4 * SAMPLES * SEQ
    groups = -(-len(specs) // interval)
    # Of each group but the first, its input; and the chunk's output. The mask is one tensor for all.
    assert held.saved == (groups - 1) * hidden + (mask if groups > 1 else 0) + hidden
    assert held.loaded == 1000


def test_an_output_that_is_sent_is_held_until_then_unless_the_backward_needs_it():
    hidden = 4 * SAMPLES * SEQ * HIDDEN
    for last, needed in (Both, False), (Ends, True):
        layers = traced([LayerSpec(Starts), LayerSpec(Both), LayerSpec(last)])
        own, sent = (chunk_memory(layers, [(0, 0)], (), "loader", False, 0, sends).held for sends in (False, True))
        assert (own.saved - sent.saved, sent.output, own.output) == ((0, 0, 0) if needed else (hidden, hidden, 0))


def test_an_output_taken_on_its_own_rank_is_held_once():
    """zbv on 2 stages: the last stage hands chunk 1's output to chunk 2, whose weight gradients keep it."""
    handed, deferred = 100, 7
    chunks = {
        1: ChunkMemory(ChunkBytes(saved=handed, deferred=1), 0, dict),
        2: ChunkMemory(ChunkBytes(saved=10, deferred=deferred), handed, dict),
    }
    program = lower(build("zbv", 2, 4, 2, "v"))
    flight = MemoryReplay(program).peak(1, chunks)
    # By hand: what is alive after each instruction, as a set.
    alive: dict[Any, int] = {}
    totals = []
    for i in program.instructions[1]:
        c, m = i.chunk, i.micro_batch
        match i.op.value:
            case "F":
                alive["output" if c == 1 else "own", m] = handed if c == 1 else 10
            case "I" if c == 2:
                del alive["own", m]
                alive |= {("deferred", m): deferred, ("kept", m): 0}
            case "W" if c == 2:
                del alive["deferred", m], alive["kept", m]
                if ("gone", m) in alive:
                    del alive["output", m]
            case "I":
                alive["one", m] = 1
                if ("kept", m) in alive:
                    alive["gone", m] = 0
                else:
                    del alive["output", m]
            case "W":
                del alive["one", m]
            case "B" if c == 2:
                del alive["own", m]
            case "B":
                if ("kept", m) in alive:
                    alive["gone", m] = 0
                else:
                    del alive["output", m]
        totals.append(sum(alive.values()))
    assert flight.held == max(totals)
    assert totals[-1] == 0
