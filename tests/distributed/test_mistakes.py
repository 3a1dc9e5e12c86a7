"""What users get wrong in their first hour: each message says what, the value, the remedy and the place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import parallel3d
from parallel3d import LayerSpec, PipelineModule
from parallel3d.config import load
from parallel3d.errors import ConfigError, DataError, PartitionError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": None,
}
LINEAR = LayerSpec(nn.Linear, 4, 4)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such thing as 3")


class TakesTwo(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def no_loss(output: Tensor, labels: Tensor) -> Tensor:
    raise KeyError("labels")


def batches(count: int = 2, samples: int = 2, labels: Any = None, more: tuple[Any, ...] = ()) -> Iterator[Any]:
    shown = torch.ones(samples, 4) if labels is None else labels
    return iter([(torch.ones(samples, 4), shown, *more) for _ in range(count)])


def train(*layers: Any, loss_fn: Any = mse_loss, data: Iterator[Any] | None = None, frozen: bool = False) -> None:
    module = PipelineModule([LINEAR, *layers], num_stages=1, loss_fn=loss_fn)
    module.requires_grad_(not frozen)
    engine, *_ = parallel3d.initialize(model=module, config=CONFIG)
    engine.train_batch(batches() if data is None else data)


def some_trained() -> parallel3d.DeepSpeedEngine:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine, *_ = parallel3d.initialize(model=model, config=CONFIG, model_parameters=model[1].parameters())
    return engine


# What is done, the type of the error, and what its message ends with (a regular expression).
ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "layer": (
        lambda: train(LayerSpec(Raises)),
        ValueError,
        r"rank 0, stage 0, micro-batch 0, instruction F0@0: ValueError: no such thing as 3, in layer 1 \(Raises\)",
    ),
    "layer of two arguments": (
        lambda: train(LayerSpec(TakesTwo)),
        TypeError,
        r"'mask', in layer 1 \(TakesTwo\): a layer takes one argument, .*; a tuple may hold several",
    ),
    "loss": (lambda: train(loss_fn=no_loss), KeyError, "F0@0: KeyError: 'labels', in loss_fn no_loss of an output .*"),
    "labels of another shape": (
        lambda: train(data=batches(labels=torch.ones(2, 3))),
        RuntimeError,
        r"must match .*, in loss_fn mse_loss of an output \[2, 4\] and labels \[2, 3\]",
    ),
    "no loss": (
        lambda: train(loss_fn=None),
        ValueError,
        r"one element, or \(sum, count\), not \[2, 4\]; .* as PipelineModule has no loss_fn: give it one",
    ),
    "detached": (
        lambda: train(lambda x: x.detach()),
        ValueError,
        "F0@0: ValueError: the loss requires no gradient; look for detach and no_grad in layers and loss_fn",
    ),
    "labels of text": (
        lambda: train(data=batches(labels="cat")),
        AttributeError,
        "in loss_fn mse_loss, whose labels hold a str, no tensor",
    ),
    "dtype": (
        lambda: train(data=iter([(torch.ones(2, 4).double(), torch.ones(2, 4))] * 2)),
        RuntimeError,
        r"in layer 0 \(Linear\)",
    ),
    "device": (
        lambda: train(lambda x: x + torch.ones(4, device="meta")),
        RuntimeError,
        r"meta.*in layer 1 \(<lambda>\)",
    ),
    "three": (
        lambda: train(data=batches(more=(torch.ones(2),))),
        DataError,
        r"must be \(inputs, labels\), not tuple of 3; several of them go in a tuple or dict of their own",
    ),
    "swapped": (
        lambda: parallel3d.initialize(CONFIG, nn.Linear(2, 2)),  # type: ignore[arg-type]
        ConfigError,
        r"args, is a dict, .*; write initialize\(model=model, config=config\)",
    ),
    "swapped by name": (
        lambda: parallel3d.initialize(model=CONFIG, config=nn.Linear(2, 2)),  # type: ignore[arg-type]
        ConfigError,
        "config is a Linear and model a dict; give them the other way round",
    ),
    "stages as text": (
        lambda: PipelineModule([LINEAR], num_stages="2"),  # type: ignore[arg-type]
        PartitionError,
        "num_stages is '2'; give a whole number of at least 1",
    ),
    "module in a spec": (
        lambda: LayerSpec(nn.Linear(4, 4)),  # type: ignore[arg-type]
        PartitionError,
        r"give the class, and after it .*, LayerSpec\(Linear, \.\.\.\); or put the module itself into the list of layers",
    ),
    "constructor": (
        lambda: train(LayerSpec(nn.Linear, 4, 4, biass=False)),
        TypeError,
        r"layer 1, LayerSpec\(Linear\), can't be built: TypeError: .*'biass'",
    ),
    "custom_load_fn": (
        lambda: some_trained().load_checkpoint("runs/a", custom_load_fn=print),
        ConfigError,
        "custom_load_fn can't be called: no rank reads a whole state_dict; load_module_strict=False leaves out .*",
    ),
    "schedule": (
        lambda: load({"pipeline": {"schedule": "DualPipeV"}}),
        ConfigError,
        "pipeline.schedule is 'DualPipeV': .* Did you mean 'zbv'\\?",
    ),
    "strict": (
        lambda: load({"strict": True, "zero_optimization": {"offload_param": {"device": "cpu"}}}),
        ConfigError,
        "strict is true, and not yet supported: zero_optimization.offload_param: it needs stage 3, but the stage is 0.*",
    ),
}
# What is done, and the warnings that it gives, once.
WARNINGS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "nothing": (train, None),
    "fewer": (
        lambda: train(data=batches(count=1)),
        "1 micro-batches in this step, but the configuration says 2; is data",
    ),
    "smaller": (
        lambda: train(data=batches(samples=1)),
        "1 samples in a micro-batch, but the configuration says 2; is data",
    ),
    "left out": (some_trained, "2 parameters require a gradient but are not in the optimizer, such as 0.weight: "),
    "frozen": (lambda: train(frozen=True), "no parameter requires a gradient: nothing is trained; set requires_grad"),
}


def errors() -> dict[str, tuple[bool, str]]:
    found = {}
    for name, (do, kind, _) in ERRORS.items():
        try:
            do()
        except Exception as error:
            found[name] = isinstance(error, kind), str(error)
    return found


def told() -> dict[str, list[str]]:
    found = {}
    for name, (do, _) in WARNINGS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            do()
        found[name] = [str(warning.message) for warning in caught if "parallel3d" not in warning.filename]
    return found


def test_errors_name_what_is_wrong_and_where(run_ranks):
    (found,) = run_ranks(1, errors)
    assert found.keys() == ERRORS.keys()
    for name, (_, kind, message) in ERRORS.items():
        is_kind, text = found[name]
        assert is_kind, (name, kind)
        assert re.search(message + "$", text, re.DOTALL), f"{name}: {text}"


def test_odd_data_and_models_are_warned_of_once(run_ranks):
    (found,) = run_ranks(1, told)
    for name, (_, message) in WARNINGS.items():
        if message is None:
            assert found[name] == []
        else:
            (text,) = found[name]
            assert text.startswith(message)


def calls_on_a_pipeline() -> list[str]:
    module = PipelineModule([LINEAR, LINEAR], num_stages=2, loss_fn=mse_loss)
    engine, *_ = parallel3d.initialize(model=module, config=CONFIG)
    found = []
    for call in (
        lambda: engine(torch.ones(2, 4)),
        lambda: engine.backward(torch.ones(1, requires_grad=True)),
        engine.step,
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        found.append(str(caught.value))
    engine.train_batch(batches())
    return found


def test_a_pipeline_is_not_trained_by_calls(run_ranks):
    """Where it was tried nothing is lost: the next train_batch works."""
    for found in run_ranks(2, calls_on_a_pipeline):
        assert len(found) == 3
        assert all(text.startswith("the model is cut into 2 chunks, which only engine.train_batch") for text in found)
