"""`p3d ckpt` and save_16bit_model, on checkpoints of a Hugging Face model trained at pp2 x tp2."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCAB, load_model, make_model, save_model, token_ids
from reference import distance
from safetensors.torch import load_file
from torch import Tensor

import parallel3d
from parallel3d.checkpoint.directory import PendingSave
from parallel3d.cli import main
from parallel3d.models import SlicedLogits, causal_lm_loss, from_hf
from parallel3d.pipe import PipelineModule

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "tensor_parallel": {"size": 2},
    "pipeline": {"stages": 2},
    "steps_per_print": None,
}


def train(source: str, directory: str, files: str) -> Tensor | None:
    """Three checkpoints, the last without a step after the second; the logits of the last slice."""
    config = {**CONFIG, "bf16": {"enabled": source != "gemma2"}}
    layers = from_hf(make_model("gemma2") if source == "gemma2" else source)
    module = PipelineModule(layers, loss_fn=causal_lm_loss, partition_method="uniform", config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    for step in range(2):
        data = [(token_ids(2, 9, seed=step + k), token_ids(2, 9, seed=10 + k)) for k in range(2)]
        engine.train_batch(iter(data))
        engine.save_checkpoint(directory, client_state={"step": step})
    engine.save_checkpoint(directory, tag="again", save_latest=False)
    engine.save_16bit_model(files)
    logits = engine.eval_batch(iter([(token_ids(1, 9), token_ids(1, 9))]), compute_loss=False, num_micro_batches=1)
    if logits is None:
        return None
    return (logits[0].whole() if isinstance(logits[0], SlicedLogits) else logits[0]).float()


@pytest.fixture(scope="module")
def trained(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Tensor]:
    path = tmp_path_factory.mktemp("trained")
    save_model(path / "model", "llama")
    ranks = rank_pool.run(4, train, str(path / "model"), str(path / "saved"), str(path / "files"))
    return path / "saved", path / "files", ranks[-1]


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


Trained = tuple[Path, Path, Tensor]


def test_ls_tells_what_is_whole(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = tmp_path / "saved"
    shutil.copytree(trained[0], saved)
    running = PendingSave(saved, "running")
    (saved / ".hf.0123456789abcdef").mkdir()  # of an export that was killed
    next((saved / "again").glob("*.safetensors")).unlink()
    code, out, _ = run(capsys, "ls", saved)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[5], row[6:]) for row in rows if row[0].startswith("global_step")] == [
        ("global_step1", "1", ["pp2", "tp2", "dp1"]),
        ("global_step2", "2", ["pp2", "tp2", "dp1", "latest"]),
    ]
    assert "again/rank" in out.split("not complete: ", 1)[1]
    assert "is missing" in out
    assert f"not complete: {running.path.parent} is of a save of 'running' that is running or was ended" in out
    assert f"not complete: {saved}/.hf.0123456789abcdef is not a complete checkpoint" in out
    running.end()


def test_verify_names_the_damaged_file(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "verify", trained[0])
    assert code == 0
    assert "global_step2: " in out
    shutil.copytree(trained[0] / "global_step1", tmp_path / "copy")
    file = max((tmp_path / "copy").glob("rank*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    code, out, _ = run(capsys, "verify", tmp_path / "copy")
    assert code == 1
    assert f"{file} is damaged" in out


def test_export_is_what_from_pretrained_reads(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(capsys, "export", trained[0], tmp_path / "hf")
    assert code == 0, err
    assert "in Hugging Face's form" in out
    with torch.no_grad():
        exact, rounded = (
            load_model(tmp_path / "hf").to(dtype)(token_ids(1, 9)).logits.float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    assert rounded.shape == (1, 9, VOCAB)
    assert (tmp_path / "hf" / "generation_config.json").is_file()
    # The layout rounds to bf16 at other places than one process.
    assert distance(trained[2], exact) < 1.5 * distance(rounded, exact) < 0.02
    assert {w.dtype for w in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    code, _, err = run(capsys, "export", trained[0], tmp_path / "hf")
    assert code == 2
    assert "not empty" in err


def test_masters_and_other_dtypes_are_exported(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "export", trained[0], tmp_path / "masters", "--masters")[0] == 0
    assert run(capsys, "export", trained[0], tmp_path / "half", "--dtype", "fp16")[0] == 0
    assert run(capsys, "export", trained[0], tmp_path / "plain", "--plain")[0] == 0
    masters, half, plain = (load_file(tmp_path / n / "model.safetensors") for n in ("masters", "half", "plain"))
    assert {w.dtype for w in masters.values()} == {torch.float32}
    assert {w.dtype for w in half.values()} == {torch.float16}
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(masters[name].bfloat16(), plain["layers.2.down.weight"])
    assert torch.equal(half[name], plain["layers.2.down.weight"].half())


def test_the_16_bit_file_holds_the_weights_under_the_models_names(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert [path.name for path in trained[1].iterdir()] == ["model.safetensors"]
    whole = load_file(trained[1] / "model.safetensors")
    assert run(capsys, "export", trained[0], tmp_path / "plain", "--plain")[0] == 0
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert whole.keys() == plain.keys()
    assert all(torch.equal(whole[name], weight) for name, weight in plain.items())


def test_diff_names_what_differs(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    saved = trained[0]
    code, out, _ = run(capsys, "diff", saved / "global_step2", saved / "again")
    assert code == 0, out
    assert " 0 differences" in out
    code, out, _ = run(capsys, "diff", saved / "global_step1", saved)
    assert code == 1
    assert "master/layers.0.tokens.weight differs by" in out
    assert run(capsys, "diff", saved / "global_step1", saved, "--tolerance", "10")[0] == 0
    code, _, err = run(capsys, "diff", saved, tmp_path)
    assert code == 2
    assert "holds none that is complete" in err


def test_an_architecture_with_its_own_layers_is_exported(
    rank_pool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    logits = rank_pool.run(4, train, "gemma2", str(tmp_path / "saved"), str(tmp_path / "files"))[-1]
    code, out, err = run(capsys, "export", tmp_path / "saved", tmp_path / "hf")
    assert code == 0, out + err
    with torch.no_grad():
        wanted = load_model(tmp_path / "hf")(token_ids(1, 9)).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def save_pickle(directory: str) -> dict[str, torch.Tensor]:
    engine, *_ = parallel3d.initialize(
        model=torch.nn.Linear(2, 2),
        config={"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    engine.save_16bit_model(directory, "pytorch_model.bin")
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def test_weights_are_written_for_torch_load_by_deepspeeds_file_name(run_ranks: Any, tmp_path: Path):
    wanted, _ = run_ranks(2, save_pickle, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
