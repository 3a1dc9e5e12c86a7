"""Weights that go from a directory straight into shards: the model is on the meta device until then."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path
from typing import Any
from unittest import mock

import hf_models
import pytest
import torch
from hf_models import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from test_zero3_plain import compare, language_loss, on_one_process, whole_weights
from torch import Tensor, nn

import parallel3d
from parallel3d.models import from_hf, save_hf
from parallel3d.pipe import PipelineModule


def on_meta(name: str) -> Any:
    with torch.device("meta"):
        return hf_models.make_model(name)


CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01}},
    "steps_per_print": None,
}
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0}
ON_HOST = {**SHARDED, "offload_param": {"device": "cpu"}}


def load(model: nn.Module, directory: Path, zero: dict[str, Any]) -> parallel3d.DeepSpeedEngine:
    return parallel3d.initialize(model=model, weights=directory, config={**CONFIG, "zero_optimization": zero})[0]


def train_from(directory: Path, name: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    engine = load(on_meta(name), directory, zero)
    for step in range(3):
        engine.backward(language_loss(engine, step, engine.global_rank))
        engine.step()
    return whole_weights(engine)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("llama", SHARDED),
        ("llama-tied", {**SHARDED, "stage3_param_persistence_threshold": 2_000}),
        ("gpt2", ON_HOST),
        ("llama-tied", {"stage": 1}),
    ],
)
def test_a_model_from_the_meta_device_trains_as_one_process(run_ranks, tmp_path: Path, name: str, zero: dict[str, Any]):
    transformers()
    model = hf_models.make_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    wanted = on_one_process(model, 3, language_loss, 2)
    for found in run_ranks(2, train_from, tmp_path, name, zero):
        compare(found, wanted)


class Odd(nn.Module):
    """Parameters of 0 to 3 dimensions, frozen, of integers, of no elements, some not on the meta device; and a buffer."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        with torch.device(device):
            self.cube = nn.Parameter(torch.empty(3, 5, 7))
            self.row = nn.Parameter(torch.empty(11))
            self.scale = nn.Parameter(torch.empty(()), requires_grad=False)
            self.codes = nn.Parameter(torch.empty(4, 3, dtype=torch.int16), requires_grad=False)
            self.none = nn.Parameter(torch.empty(0, 4))
            self.register_buffer("mean", torch.empty(6))
        self.added = nn.Parameter(torch.full((2,), 3.0))
        self.given = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.cube.sum() * self.scale + self.row.sum() + self.mean.sum() + self.added.sum()).sum()


ODD = {
    "cube": torch.arange(105.0).view(3, 5, 7),
    "row": torch.arange(11.0) + 200,
    "scale": torch.tensor(5.0),
    "codes": torch.arange(12, dtype=torch.int16).view(4, 3),
    "none": torch.empty(0, 4),
    "mean": torch.arange(6.0),
    "given": torch.tensor([8.0, 9.0]),
}


def load_odd(directory: Path) -> tuple[dict[str, Tensor], Tensor]:
    model = Odd()
    model.row.is_mine = True
    engine = load(model, directory, SHARDED)
    assert engine.module.row.is_mine
    return whole_weights(engine), engine.module.mean.clone()


def test_every_rank_gets_the_elements_of_the_file(run_ranks, tmp_path: Path):
    save_file(ODD, tmp_path / "model.safetensors")
    for weights, mean in run_ranks(4, load_odd, tmp_path):
        assert mean.equal(ODD["mean"])
        assert weights.pop("added").equal(torch.full((2,), 3.0)), "a parameter that no file has keeps its value"
        assert {n: w.tolist() for n, w in weights.items()} == {n: w.tolist() for n, w in ODD.items() if n != "mean"}


def refused(directory: Path) -> list[str]:
    lost: Any = Odd()
    lost.register_buffer("angles", torch.empty(3, device="meta"), persistent=False)
    told = []
    for arguments in (
        {"model": Odd(), "weights": directory},
        {"model": lost, "weights": directory / "whole"},
        {"model": Odd()},
        {"model": PipelineModule([nn.Linear(2, 2)], num_stages=1), "weights": directory},
    ):
        with pytest.raises(parallel3d.Parallel3DError) as error:
            parallel3d.initialize(config=CONFIG, **arguments)
        told.append(str(error.value))
    return told


def test_what_does_not_fit_is_told_with_names_and_remedy(run_ranks, tmp_path: Path):
    (tmp_path / "whole").mkdir()
    save_file(ODD, tmp_path / "whole" / "model.safetensors")
    others = {name: tensor for name, tensor in ODD.items() if name not in ("scale", "mean")}
    save_file({**others, "row": torch.ones(10), "new": torch.ones(1)}, tmp_path / "model.safetensors")
    (unfit, lost, alone, pipeline) = run_ranks(1, refused, tmp_path)[0]
    assert "2 missing: mean, scale; 1 not known to the model: new; 1 of another shape: row is [10], not [11]" in unfit
    assert "from_pretrained in parallel3d.zero.Init" in unfit
    assert "buffers ['angles'] of the model (Odd) are on the meta device" in lost
    assert "5 parameters are on the meta device, such as cube; give weights=" in alone
    assert "build a PipelineModule of from_hf(" in pipeline


# --- Memory: 1 GB on 4 ranks


def in_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in status if line.startswith(("RssAnon:", "RssShmem:")))


@contextmanager
def sampled(peak: list[int]) -> Iterator[None]:
    """Append the most memory that this process has more than at the start, looked at every millisecond."""
    gc.collect()
    CDLL("libc.so.6").malloc_trim(0)
    before, over, most = in_memory(), threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], in_memory() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    peak.append(max(most[0], in_memory() - before))


def sizes(layers: int) -> dict[str, int]:
    return {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers, "vocab_size": 512}


LAYER = 4 * (3 * 512 * 1024 + 4 * 512 * 512)  # bytes


def load_whole(directory: Path, layers: int, frozen: bool, pipeline: bool) -> tuple[int, int]:
    """Return the most memory that loading takes, and the bytes of the model."""
    on_meta("llama")  # imports
    peak: list[int] = []
    config = {**CONFIG, "zero_optimization": {**SHARDED, "reduce_per_micro_batch": True}}
    with sampled(peak):
        if pipeline:
            model: nn.Module = PipelineModule(from_hf(directory), num_stages=1, config=config)
        else:
            with torch.device("meta"):
                model = hf_models.make_model("llama-tied", **sizes(layers), tie_word_embeddings=False)
        if frozen:
            model.requires_grad_(False)
            model.get_parameter(next(name for name, _ in model.named_parameters())).requires_grad_(True)
        parallel3d.initialize(model=model, weights=None if pipeline else directory, config=config)
    return peak[0], sum(4 * p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[Path, int]:
    """A model of 1 GB, or of 128 MB, and its number of layers."""
    transformers()
    directory, layers = tmp_path_factory.mktemp("large"), 96 if full else 12
    hf_models.save_model(directory, "llama-tied", **sizes(layers), tie_word_embeddings=False)
    return directory, layers


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_loading_takes_no_more_than_the_shards_and_one_layer(run_ranks, saved: Any, frozen: bool, pipeline: bool):
    for peak, whole in run_ranks(4, load_whole, *saved, frozen, pipeline):
        kept = whole // 4 if frozen else 2 * whole // 4  # of what is trained there are gradients, too
        assert 0.98 * kept < peak < kept + LAYER + 0.15 * whole


# --- Layers of a directory in a pipeline


class RecordingFile:
    """A safetensors file that notes in `read` the names of the tensors that are read, in part or whole."""

    def __init__(self, file: Any, read: set[str]) -> None:
        self._file, self._read = file, read

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> Any:
        tensor, read = self._file.get_slice(name), self._read

        class Slice:
            get_shape = tensor.get_shape

            def __getitem__(self, index: Any) -> Tensor:
                read.add(name)
                return tensor[index]

        return Slice()


def load_and_export(directory: Path, out: Path, tensor_ranks: int, stages: int) -> set[str]:
    """Return the names of what is read from the directory."""
    config = {**CONFIG, "zero_optimization": ON_HOST, "tensor_parallel": {"size": tensor_ranks}}
    read: set[str] = set()
    with mock.patch("parallel3d.checkpoint.read.safe_open", lambda *a, **k: RecordingFile(safe_open(*a, **k), read)):
        layers = from_hf(directory)
        bounds = [0, *[2] * (stages - 1), len(layers)]  # the embedding and the first block on the first of two stages
        module = PipelineModule(layers, num_stages=stages, partition_method=bounds, config=config)
        save_hf(parallel3d.initialize(model=module, config=config)[0], out)
    return read


@pytest.mark.parametrize(
    ("name", "tensor_ranks", "stages"),
    [("llama", 1, 2), ("llama", 2, 1), ("gpt2", 1, 1), ("gpt2", 2, 1), ("llama-tied", 2, 1), ("phi", 1, 2)],
)
def test_shards_read_from_a_directory_are_its_tensors(
    run_ranks, tmp_path: Path, name: str, tensor_ranks: int, stages: int
):
    """Also of matrices that are stored transposed, fused, and cut by tensor parallelism along rows and columns.

    A stage reads the tensors of its own layers alone.
    """
    wanted = {n: p.detach() for n, p in hf_models.save_model(tmp_path / "in", name).named_parameters()}
    ranks = 2 * tensor_ranks * stages
    read = run_ranks(ranks, load_and_export, tmp_path / "in", tmp_path / "out", tensor_ranks, stages)
    found = dict(hf_models.load_model(tmp_path / "out").named_parameters())
    assert [n for n, p in wanted.items() if not found[n].equal(p)] == []
    with safe_open(tmp_path / "in" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    first = {n for n in names if stages == 2 and n.startswith(("model.embed_tokens.", "model.layers.0."))}
    if stages == 2:
        assert set().union(*read[: ranks // 2]) == first
    assert set().union(*read[ranks // 2 * (stages - 1) :]) == names - first
