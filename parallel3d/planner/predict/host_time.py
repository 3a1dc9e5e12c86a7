"""Seconds that a host needs to call an operator of a training: Python, autograd, the launch of its kernel."""

from __future__ import annotations

import torch

from parallel3d.config import load
from parallel3d.costs.layer_costs import Sample
from parallel3d.costs.profilers import measure_layers
from parallel3d.optim.precision import make_precision
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.model import load_model

_MODEL, _BLOCK, _TOKENS = "1b", 2, 16  # so few that any GPU waits for its host


def seconds_per_operator(device: torch.device) -> float:
    """Of a decoder's block, forward and both parts of its backward, run as training runs it."""
    model = load_model(_MODEL, seq=_TOKENS)
    config = load({**model.config, "train_micro_batch_size_per_gpu": 1})
    inputs, labels = model.sample(1)
    sample = Sample(inputs, labels, model.loss_fn, make_precision(config))
    block = ModelProfile(model.layers, inputs, labels, model.loss_fn, config).layers()[_BLOCK]
    works = block.forward, block.input_gradient, block.weight_gradient
    return sum(measure_layers(model.layers, sample, config, device)[_BLOCK]) / sum(work.operators for work in works)
