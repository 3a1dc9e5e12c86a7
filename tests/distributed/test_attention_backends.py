"""Which kernel computes attention is configured: in every way that the engine runs a forward, compiled or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankError
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

MATH = "_scaled_dot_product_attention_math"
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
COMPILE = {"enabled": True, "backend": "aot_eager"}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.inner(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Kernels(TorchDispatchMode):
    """Which fused attention, or none, was computed inside: `math` is made of products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket).removeprefix("aten."))
        return func(*args, **(kwargs or {}))

    def fused(self) -> bool:
        assert (FLASH in self.names) != ("_safe_softmax" in self.names or "_softmax" in self.names)
        return FLASH in self.names


def micro_batch(k: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(k)
    return torch.randn(2, 6, 8, generator=draw), torch.randn(2, 6, 8, generator=draw)


def train(section: dict[str, Any], settings: dict[str, Any]) -> tuple[list[float], dict[str, bool], list[int]]:
    """Losses of 4 steps; whether a fused kernel ran, by what ran it; graphs compiled after each step."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": None,
        "pipeline": {"stages": 1},
        "attention": section,
        **settings,
    }
    torch.manual_seed(0)
    torch._dynamo.reset()
    layers = [LayerSpec(Attends), LayerSpec(Attends)]
    module = PipelineModule(layers, loss_fn=F.mse_loss, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    data = iter([micro_batch(k) for k in range(100)])
    losses, graphs, fused = [], [], {}
    for _ in range(3):
        losses.append(float(engine.train_batch(data)))
        graphs.append(counters["stats"]["unique_graphs"])
    if "compile" in settings:
        return losses, fused, graphs
    with Kernels() as kernels:
        losses.append(float(engine.train_batch(data)))
    fused["train_batch"] = kernels.fused()
    with Kernels() as kernels:
        engine.eval_batch(data)
    fused["eval_batch"] = kernels.fused()
    with Kernels() as kernels:
        loss = F.mse_loss(engine(micro_batch(0)[0]), micro_batch(0)[1])
    fused["forward"] = kernels.fused()
    with Kernels() as kernels:
        engine.backward(loss)
    if "activation_checkpoint_interval" in config["pipeline"]:
        fused["recomputed"] = kernels.fused()
    engine.eval()
    with Kernels() as kernels:
        engine(micro_batch(0)[0])
    fused["evaluating forward"] = kernels.fused()
    return losses, fused, graphs


@pytest.mark.parametrize(("backend", "fused"), [("auto", True), ("math", False), (["cudnn", "flash"], True)])
def test_the_backend_is_the_one_asked_for_wherever_a_forward_runs(run_ranks, backend: Any, fused: bool):
    recomputing = {"stages": 1, "activation_checkpoint_interval": 1}
    ((losses, found, _),) = run_ranks(1, train, {"backend": backend}, {"pipeline": recomputing})
    assert found == dict.fromkeys(["train_batch", "eval_batch", "forward", "recomputed", "evaluating forward"], fused)
    ((wanted, _, _),) = run_ranks(1, train, {}, {})
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_compiled_layers_are_compiled_once(run_ranks):
    ((wanted, _, _),) = run_ranks(1, train, {}, {})
    ((losses, _, graphs),) = run_ranks(1, train, {"backend": ["cudnn", "math"]}, {"compile": COMPILE})
    assert losses == pytest.approx(wanted[:3], rel=1e-5)
    assert graphs[0] > 0
    assert len(set(graphs)) == 1, "a step compiled anew"


def test_a_backend_that_the_machine_lacks_is_said(run_ranks):
    with pytest.raises(RankError) as caught:
        run_ranks(1, train, {"backend": "cudnn"}, {})
    assert "attention.backend is cudnn (it needs a CUDA device), which can't run" in str(caught.value)
    assert "give some of flash, math" in str(caught.value)
