"""Measured seconds of layers, and predictions that follow them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.config import load
from parallel3d.config.layout import parse_layout
from parallel3d.costs.profilers import LayerCost, measure_layers
from parallel3d.costs.trained_layer import Sample
from parallel3d.errors import PartitionError
from parallel3d.optim.precision import make_precision
from parallel3d.planner.cluster.file import load_cluster
from parallel3d.planner.predict.timing import layer_times
from parallel3d.planner.search.model import PlannedModel
from parallel3d.planner.search.plan import Planner
from parallel3d.specs import LayerSpec

WIDTH = 256


class Twice(nn.Module):
    """Two products forward, two of inputs' and two of weights' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise ValueError("no")
        return x


def model(*layers: LayerSpec) -> PlannedModel:
    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(64 * count, WIDTH), torch.randn(64 * count, WIDTH)

    return PlannedModel("linears", layers, nn.functional.mse_loss, sample, 64, {})


def measure(layers: list[LayerSpec]) -> list[LayerCost]:
    config = load({"train_micro_batch_size_per_gpu": 1})
    sample = Sample(torch.randn(64, WIDTH), torch.randn(64, WIDTH), nn.functional.mse_loss, make_precision(config))
    return measure_layers(layers, sample, config, torch.device("cpu"))


def test_each_kind_of_layer_is_measured_once_and_in_its_parts() -> None:
    found = measure([*[LayerSpec(Twice)] * 3, LayerSpec(nn.Identity)])
    assert len(found) == 4
    assert found[1] == found[2], "alike, but for the first one, whose inputs want no gradient"
    assert min(found[1]) > 0
    # No weights: nothing but the call that finds nothing to do.
    assert found[3].weight < found[1].weight


def test_a_layer_that_cannot_run_is_named() -> None:
    with pytest.raises(PartitionError, match=r"layer 1 \(Refuses\): .*ValueError: no"):
        measure([LayerSpec(Twice), LayerSpec(Refuses)])


@pytest.mark.parametrize("times", [0.5, 3.0])
def test_predictions_follow_what_was_measured(times: float) -> None:
    """Compute takes as many times longer as it was measured to."""
    subject = model(*[LayerSpec(Twice)] * 4)
    cluster = load_cluster("2xH200")
    plain = Planner(subject, cluster, 8, fixed=parse_layout("pp2,1f1b,m8"))
    layout = plain.space.layout(0)
    before = plain.predictor.predict(layout)
    of_layers = layer_times(plain.predictor.profile().layers(), cluster.gpus[0].device, lambda collective: 0.0)
    seconds = of_layers.compute.T
    measured = [LayerCost(*(times * float(s) for s in layer)) for layer in seconds]
    planner = Planner(subject, cluster, 8, fixed=parse_layout("pp2,1f1b,m8"), measured=measured)
    after = planner.predictor.predict(layout)
    assert after.breakdown()["forward"] == pytest.approx(times * before.breakdown()["forward"])
    assert after.breakdown()["backward"] == pytest.approx(times * before.breakdown()["backward"])
    result = planner.answer()
    assert result.best[0].seconds == pytest.approx(after.seconds, rel=1e-6)
