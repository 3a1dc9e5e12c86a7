"""One checkpoint, twelve layouts: each loads it, goes on as one process would, and saves the same whole tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy3d
from layouts import BASE_SEED, OPTIMIZERS, SHARDED, make_optimizer, own_iterator, specs
from reference import Reference, distance
from safetensors.torch import load_file

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule

BEFORE, AFTER, MICRO_BATCHES = 3, 2, 4


@dataclass(frozen=True)
class Layout:
    pp: int = 1
    tp: int = 1
    dp: int = 1
    zero: str = "0"
    sequence_parallel: bool = False
    num_chunks: int = 1

    def __str__(self) -> str:
        more = ("-sp" if self.sequence_parallel else "") + (f"-v{self.num_chunks}" if self.num_chunks > 1 else "")
        return f"pp{self.pp}-tp{self.tp}-dp{self.dp}-zero{self.zero}{more}"


FIRST = Layout(2, 2, 2, "2")
LAYOUTS = [
    Layout(pp=4),
    Layout(),
    Layout(pp=2, dp=2, zero="1", num_chunks=2),
    Layout(pp=2, tp=4, zero="2", sequence_parallel=True),  # with key and value heads on two ranks each
    Layout(dp=4, zero="2 per micro-batch"),
    Layout(pp=2, tp=2, dp=2, zero="3"),
]
OTHERS = [FIRST, Layout(pp=4, dp=2, zero="1"), Layout(pp=2, dp=2, num_chunks=2)]
OTHERS += [Layout(tp=2, dp=4, zero="1"), Layout(tp=4, dp=2, zero="2 per micro-batch"), Layout(dp=4, zero="2")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("layout", [*LAYOUTS, *OTHERS] if full else LAYOUTS, ids=str)


def make(layout: Layout, **options: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": toy3d.SAMPLES,
        "gradient_accumulation_steps": MICRO_BATCHES // layout.dp,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": OPTIMIZERS["AdamW"]},
        "zero_optimization": {
            "stage": int(layout.zero[0]),
            "reduce_bucket_size": 1500,
            "reduce_per_micro_batch": layout.zero.endswith("per micro-batch"),
            **SHARDED,
        },
        "tensor_parallel": {"size": layout.tp, "sequence_parallel": layout.sequence_parallel},
        "pipeline": {
            "stages": layout.pp,
            "num_chunks": layout.num_chunks,
            "schedule": "interleaved" if layout.num_chunks > 1 else "1f1b",
        },
        "steps_per_print": None,
        **options,
    }
    loss = LayerSpec(toy3d.SlicedLoss, False)
    items = specs(toy3d.model(tied=True))
    module = PipelineModule(items, loss_fn=loss, seed_layers=True, base_seed=BASE_SEED, config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def batches(first: int, steps: int) -> list[Any]:
    return [toy3d.micro_batch(g) for g in range(first * MICRO_BATCHES, (first + steps) * MICRO_BATCHES)]


def start(directory: str) -> None:
    engine = make(FIRST)
    data = own_iterator(engine, batches(0, BEFORE))
    for _ in range(BEFORE):
        engine.train_batch(data)
    engine.save_checkpoint(directory, client_state={"epoch": 3})


def go_on(layout: Layout, directory: str, again: str) -> tuple[Any, ...]:
    engine = make(layout)
    path, client_state = engine.load_checkpoint(directory)
    engine.save_checkpoint(again, tag="again")
    data = own_iterator(engine, batches(BEFORE, AFTER))
    losses = [engine.train_batch(data).item() for _ in range(AFTER)]
    return path, client_state, losses, engine.global_steps, engine.global_samples


@cache
def unbroken() -> tuple[list[float], dict[str, torch.Tensor]]:
    """By plain PyTorch on one process: the losses behind the break, and the weights and moments at it."""
    reference = Reference(toy3d.model(tied=True), toy3d.plain_loss, make_optimizer("AdamW"), 0.3, BASE_SEED)
    for k in range(BEFORE):
        reference.step(batches(k, 1))
    state = {f"model/{name}": weight for name, weight in reference.weights().items()}
    for name, parameter in reference.parameters.items():
        for key, value in reference.optimizer.state[parameter].items():
            state[f"optimizer/{key}/{name}"] = value.clone()
    return [reference.step(batches(k, 1))[0] for k in range(BEFORE, BEFORE + AFTER)], state


def whole_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the ranks' own, put together as the manifest says: nothing of parallel3d is used."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {name: load_file(path / name) for name in manifest["files"]}
    wholes = {}
    for name, tensor in manifest["tensors"].items():
        if name.startswith(("model/", "master/", "optimizer/")):
            whole = wholes[name] = torch.full(tensor["shape"], torch.nan, dtype=getattr(torch, tensor["dtype"]))
            for box in tensor["boxes"]:
                index = tuple(slice(a, a + n) for a, n in zip(box["start"], box["shape"], strict=True))
                part = files[box["file"]][box["key"]]
                assert whole[index].isnan().all() or torch.equal(whole[index], part), "overlapping boxes differ"
                whole[index] = part
    return wholes


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("first")
    rank_pool.run(8, start, str(directory))
    return directory


def test_it_holds_what_one_process_has(saved: Path) -> None:
    wholes, (_, wanted) = whole_tensors(saved / "global_step3"), unbroken()
    assert wholes.keys() == wanted.keys()
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"{name} is not all there"
        assert distance(whole, wanted[name]) <= 1e-4, name


def test_copies_are_written_once_and_by_all_ranks_alike(saved: Path) -> None:
    path = saved / "global_step3"
    manifest = json.loads((path / "manifest.json").read_text())
    volume = {
        name: sum(np.prod(box["shape"], dtype=int) for box in t["boxes"]) for name, t in manifest["tensors"].items()
    }
    assert volume == {name: np.prod(t["shape"], dtype=int) for name, t in manifest["tensors"].items()}
    rank_sizes = [(path / name).stat().st_size for name in manifest["files"]]
    assert len(rank_sizes) == 8
    assert max(rank_sizes) < 1.5 * min(rank_sizes)


def test_every_layout_goes_on_from_it(run_ranks, saved: Path, tmp_path: Path, layout: Layout) -> None:
    ranks = run_ranks(layout.pp * layout.tp * layout.dp, partial(go_on, layout), str(saved), str(tmp_path))
    losses, _ = unbroken()
    for path, client_state, own_losses, steps, samples in ranks:
        assert (path, client_state) == (str(saved / "global_step3"), {"epoch": 3})
        assert own_losses == pytest.approx(losses, rel=1e-5)
        total = BEFORE + AFTER
        assert (steps, samples) == (total, total * MICRO_BATCHES * toy3d.SAMPLES)
    check_same(whole_tensors(saved / "global_step3"), whole_tensors(tmp_path / "again"))


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, whole in one.items():
        assert whole.dtype == other[name].dtype
        assert torch.equal(whole, other[name]), f"{name} is other when it is saved again"


def save_again(layout: Layout, options: dict[str, Any], source: str | None, target: str) -> None:
    engine = make(layout, **options)
    if source is None:
        data = own_iterator(engine, batches(0, BEFORE))
        for _ in range(BEFORE):
            engine.train_batch(data)
    else:
        engine.load_checkpoint(source)
    engine.save_checkpoint(target, tag="tag")


def test_wider_masters_go_to_other_layouts_and_precisions(run_ranks, tmp_path: Path) -> None:
    bf16 = {"bf16": {"enabled": True}}
    run_ranks(4, save_again, Layout(tp=2, dp=2, zero="2"), bf16, None, str(tmp_path / "bf16"))
    run_ranks(4, save_again, Layout(pp=2, dp=2, zero="0"), bf16, str(tmp_path / "bf16"), str(tmp_path / "again"))
    run_ranks(2, save_again, Layout(dp=2, zero="1"), {}, str(tmp_path / "again"), str(tmp_path / "fp32"))
    run_ranks(2, save_again, Layout(tp=2, dp=1, zero="0"), bf16, str(tmp_path / "fp32"), str(tmp_path / "back"))
    first, again, wide, back = (whole_tensors(tmp_path / name / "tag") for name in ("bf16", "again", "fp32", "back"))
    assert {first[name].dtype for name in first if name.startswith("model/")} == {torch.bfloat16}
    check_same(first, again)
    check_same(first, back)
    for name, whole in wide.items():
        assert torch.equal(whole, first[name.replace("model/", "master/")])
