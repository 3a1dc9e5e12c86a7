"""Hugging Face models over pipeline stages: loaded, trained and exported, against transformers and PyTorch's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from collective_counts import Collectives
from hf_models import VOCAB, in_double, load_model, make_model, save_model, token_ids
from reference import distance
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.cli import main
from parallel3d.errors import CheckpointError
from parallel3d.models import CausalLMLoss, DecoderConfig, SlicedLogits, decoder, from_hf, save_hf
from parallel3d.models.huggingface import export
from parallel3d.pipe import LayerSpec, PipelineModule

STEPS, MICRO_BATCHES, BATCH, SEQ = 3, 2, 2, 9
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Adam makes steps of the rounding noise where the true gradient is next to nothing: float64 has little.
DTYPE = torch.float64


def make_engine(layers: list[LayerSpec], stages: int, **settings: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "steps_per_print": None,
        **settings,
    }
    loss_fn = CausalLMLoss(shift=True, chunk=4)
    module = PipelineModule(layers, num_stages=stages, partition_method="uniform", loss_fn=loss_fn, config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def batches() -> list[dict[str, Tensor]]:
    """Return micro-batches of different lengths, with padding and position ids."""
    result = []
    for k in range(STEPS * MICRO_BATCHES):
        seq = SEQ + k % 3
        mask = torch.ones(BATCH, seq, dtype=torch.long)
        mask[k % BATCH, seq - k % 4 :] = 0
        result.append({"input_ids": token_ids(BATCH, seq, seed=k), "attention_mask": mask})
    return result


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


Result = tuple[Tensor | None, list[tuple[float, float]]]


def train_and_export(layers: list[LayerSpec], stages: int, out: str, **settings: Any) -> Result:
    """Train and export one model on an engine, for run_and_export."""
    return run_and_export(make_engine(layers, stages, **settings), out)


def run_and_export(engine: Engine, out: str) -> Result:
    """Logits before training, on the last stage; losses and gradient norms; the trained weights are in `out`."""
    data = batches()
    first = data[0]
    found = engine.eval_batch(iter([(first, labels_of(first))]), compute_loss=False, num_micro_batches=1)
    samples = iter([(batch, labels_of(batch)) for batch in data])
    steps = [(float(engine.train_batch(samples)), float(engine.get_global_grad_norm())) for _ in range(STEPS)]
    save_hf(engine, out, max_file_bytes=40_000)
    logits = found[0] if found else None
    return logits.whole() if isinstance(logits, SlicedLogits) else logits, steps


def train_directory(
    source: str, units: str, stages: int, out: str, tensor_parallel: dict[str, Any], **settings: Any
) -> Result:
    layers = from_hf(source, dtype=DTYPE, units=units)
    return train_and_export(layers, stages, out, tensor_parallel=tensor_parallel, **settings)


def train_compiled(source: str, out: str, sequence_parallel: bool) -> Result:
    """Train a directory without a graph that breaks, and without what the compiler knows of shapes of earlier tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    sliced = {"size": 2, "sequence_parallel": sequence_parallel}
    layers, compiled = from_hf(source, dtype=DTYPE, units="half"), {"enabled": True, "backend": "aot_eager"}
    engine = make_engine(layers, 1, tensor_parallel=sliced, compile=compiled)
    result = run_and_export(engine, out)
    assert not torch._dynamo.utils.counters["graph_break"]
    return result


def train_wrapped(name: str, stages: int, out: str, tensor_ranks: int, words: dict[str, str]) -> tuple[Result, int]:
    """Also the number of weights held. words: what the model says besides of its tensor parallelism."""
    model: Any = make_model(name).to(DTYPE)
    if name == "neox":
        model.enable_input_require_grads()  # a hook of the embedding, as gradient_checkpointing_enable makes it
    model.tp_plan.update(words)
    # transformers leaves out a mask without a zero: what travels depends on values.
    settings = {"pipeline": {"shapes": "dynamic"}, "tensor_parallel": {"size": tensor_ranks}}
    layers = from_hf(model)
    result = train_and_export(layers, stages, out, **settings)
    return result, sum(p.numel() for p in PipelineModule(layers, stages, config=settings).parameters())


def check_against_transformers(model: nn.Module, results: list[Any], out: Path, tolerance: float) -> None:
    first = batches()[0]
    with torch.no_grad():
        wanted = model(**first).logits
    valid = first["attention_mask"].bool()
    torch.testing.assert_close(results[-1][0][valid], wanted[valid], rtol=tolerance, atol=tolerance)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    micro_batches = iter(batches())
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            batch = next(micro_batches)
            logits = model(**batch).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels_of(batch)[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        gradients = [p.grad.square().sum() for p in model.parameters()]
        norm = float(torch.stack(gradients).sum().sqrt())
        optimizer.step()
        assert all(steps[step] == pytest.approx((total, norm), rel=max(1e-6, tolerance)) for _, steps in results)
    exported = dict(load_model(out).named_parameters())
    trained = dict(model.named_parameters())
    assert set(exported) == set(trained)
    for name, weight in exported.items():
        assert weight.dtype == DTYPE
        assert distance(weight.detach(), trained[name].detach()) < tolerance, name


# (stages, tensor_ranks, whether sequences are shared): 2 key and value heads over 4 ranks, 257 words over 2, 9 tokens over 2.
LAYOUTS = [(1, 1, False), (2, 1, False), (2, 2, False), (2, 2, True), (1, 4, True)]
OTHERS: list[tuple[str, int, int, dict[str, str]]] = [
    ("gemma2", 2, 2, {}),
    ("gemma2-one-kv-head", 1, 3, {"model.embed_tokens": "replicate"}),
    ("phi", 2, 2, {"lm_head": "colwise"}),
    ("phi-norms", 1, 4, {}),
    ("phi3", 2, 2, {}),
    ("gemma3", 1, 2, {}),
    ("neox", 1, 3, {}),
]
IN_STAGES: list[tuple[str, int, int, dict[str, str]]] = [
    ("gemma2", 2, 1, {}),
    ("phi", 2, 1, {}),
    ("gemma2-one-kv-head", 2, 2, {}),
]
COVER = {
    "llama": [(1, 1, False), (1, 4, True)],
    "mistral": [(2, 2, False)],
    "qwen2": [(2, 1, False)],
    "qwen3-odd": [(2, 2, True)],
    "gemma": [(1, 4, True)],
    "gpt2": [(1, 1, False), (2, 2, True)],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sequence" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        cases = [(name, *layout) for name, cover in COVER.items() for layout in (LAYOUTS if full else cover)]
        metafunc.parametrize(("name", "stages", "tensor_ranks", "sequence"), cases)
    if "words" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        cases = [*OTHERS, *(IN_STAGES if full else [])]
        metafunc.parametrize(("name", "stages", "tensor_ranks", "words"), cases)


def test_a_directory_trains_as_in_transformers(
    run_ranks, tmp_path, name: str, stages: int, tensor_ranks: int, sequence: bool
):
    model = in_double(save_model(tmp_path / "in", name))
    sliced = {"size": tensor_ranks, "sequence_parallel": sequence}
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    results = run_ranks(stages * tensor_ranks, train_directory, source, "block", stages, out, sliced)
    check_against_transformers(model, results, tmp_path / "out", 1e-8)


@pytest.mark.full_only  # test_compile.py has compiled slices of another model, test_tensor_parallel.py their loss
@pytest.mark.parametrize("shards", [True, False])
def test_compiled_slices_and_their_loss_train_as_in_transformers(run_ranks, tmp_path, shards: bool):
    """Of three lengths, so that lengths become dynamic."""
    model = in_double(save_model(tmp_path / "in", "llama", num_hidden_layers=1))
    results = run_ranks(2, train_compiled, str(tmp_path / "in"), str(tmp_path / "out"), shards)
    check_against_transformers(model, results, tmp_path / "out", 1e-8)


TRAINED = STEPS * MICRO_BATCHES


def test_a_stage_may_end_between_attention_and_feed_forward(run_ranks, tmp_path):
    """7 layers over 2 stages, cut behind the second attention; a tied head, learned positions, shards of sequences."""
    model = in_double(save_model(tmp_path / "in", "gpt2"))
    source, out = str(tmp_path / "in"), str(tmp_path / "out")
    sliced = {"size": 2, "sequence_parallel": True}
    results = run_ranks(4, train_directory, source, "half", 2, out, sliced)
    check_against_transformers(model, results, tmp_path / "out", 1e-8)


def test_another_architecture_trains_by_its_own_layers(
    run_ranks, tmp_path, name: str, stages: int, tensor_ranks: int, words: dict[str, str]
):
    """With few, shared or odd numbers of heads, and a head whose logits are gathered or not, tied or not."""
    ranks = run_ranks(stages * tensor_ranks, train_wrapped, name, stages, str(tmp_path / "out"), tensor_ranks, words)
    model = make_model(name).to(DTYPE)
    whole = sum(p.numel() for p in model.parameters())
    assert tensor_ranks == 1 or sum(held for _, held in ranks) < 0.8 * tensor_ranks * whole
    # Norms in fp32, which are theirs in the reference too, round what differs in the last bit of a double.
    tolerance = 1e-8 if name.startswith(("phi-", "neox")) or name == "phi" else 1e-5
    check_against_transformers(model, [result for result, _ in ranks], tmp_path / "out", tolerance)


def count_layer(name: str) -> list[dict[Any, int]]:
    """Count the collectives of a wrapped layer's forward and backward."""
    module = PipelineModule(from_hf(make_model(name)), num_stages=1, config={"tensor_parallel": {"size": 2}})
    entry, layer, *_ = module.layers.values()
    x = entry(token_ids(BATCH, SEQ))
    with Collectives() as forward:
        y = layer(x)["hidden"]
    with Collectives() as backward:
        y.sum().backward(inputs=[x["hidden"], *layer.parameters()])
    return [forward.counts, backward.counts]


@pytest.mark.parametrize("name", ["gemma2-one-kv-head", "phi"])
def test_a_wrapped_layer_communicates_as_in_the_paper(run_ranks, name: str):
    """Two all-reduces forward and two backward (arXiv:1909.08053), whatever the number of its projections."""
    twice = {("allreduce_", BATCH * SEQ * 32 * 4): 2}
    assert run_ranks(2, count_layer, name) == [[twice, twice]] * 2


@torch.no_grad()
def logits_with_dropout(resid_pdrop: float) -> tuple[Tensor, Tensor]:
    """In training and in evaluation, of two heads that are one another's negative in what they add up to."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = make_model("phi", attention_dropout=0.5, resid_pdrop=resid_pdrop, **heads)
    model.tp_plan["lm_head"] = "replicate"  # logits of each rank's own hidden states
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight[16:], projection.bias[16:] = projection.weight[:16], projection.bias[:16]
        layer.self_attn.dense.weight[:, 16:] = -layer.self_attn.dense.weight[:, :16]
    module = PipelineModule(from_hf(model), num_stages=1, config={"tensor_parallel": {"size": 2}})
    torch.manual_seed(3)
    return module.train()(token_ids(BATCH, SEQ)), module.eval()(token_ids(BATCH, SEQ))


def test_dropout_is_each_rank_s_own_between_its_heads_and_common_elsewhere(run_ranks):
    (first, without), (second, _) = run_ranks(2, logits_with_dropout, 0.0)
    assert torch.equal(first, second)
    assert not torch.allclose(first, without)  # masks that were alike would cancel out, too
    (first, _), (second, _) = run_ranks(2, logits_with_dropout, 0.5)
    assert torch.equal(first, second)


def export_bf16(source: str, out: str, zero: dict[str, Any]) -> tuple[int, int]:
    """Also the most bytes of weights that the layers held meanwhile, and those of the largest layer."""
    engine = make_engine(from_hf(source), 2, bf16={"enabled": True}, zero_optimization=zero, gradient_clipping=1.0)
    module, held = engine.pipeline_module, []

    def sampled(self: Any, key: Any, of: Any = export._Values.of) -> Tensor:
        value = of(self, key)
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
        held.append(sum(size for size in storages.values() if size > 2))
        return value

    with mock.patch.object(export._Values, "of", sampled):
        save_hf(engine, out + "/masters", masters=True)
        save_hf(engine, out + "/weights")
        save_hf(engine, out + "/half", masters=True, dtype=torch.float16)
    engine.save_checkpoint(out + "/saved")
    return max(held), max(sum(2 * p.numel() for p in layer.parameters()) for layer in module.layers.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_or_rounded_weights_are_exported(run_ranks, tmp_path, stage: int):
    """2 stages x 2 replicas: every rank holds a quarter of the masters, with ZeRO 3 of the weights too."""
    model = save_model(tmp_path / "in", "qwen2", tie_word_embeddings=stage == 2)
    ranks = run_ranks(
        4, export_bf16, str(tmp_path / "in"), str(tmp_path), {"stage": stage, "stage3_param_persistence_threshold": 0}
    )
    if stage == 3:
        assert all(0 < held < 1.1 * largest for held, largest in ranks), "one layer is whole at a time"
    wanted = dict(model.named_parameters())
    assert main(["ckpt", "export", str(tmp_path / "saved"), str(tmp_path / "exported")]) == 0
    dtypes = {"masters": torch.float32, "weights": torch.bfloat16, "half": torch.float16, "exported": torch.bfloat16}
    for out, dtype in dtypes.items():
        for name, weight in load_model(tmp_path / out).named_parameters():
            assert weight.dtype == dtype
            assert torch.equal(weight, wanted[name].to(dtype)), f"{out}: {name}"


def initial_weights(stages: int) -> dict[str, Tensor]:
    config = DecoderConfig(vocab_size=VOCAB, hidden_size=16, ffn_size=24, num_layers=3, num_heads=2, tied=True)
    module = PipelineModule(decoder(config), num_stages=stages, seed_layers=True)
    return {info.name: info.parameter.detach() for info in module.parameter_infos()}


def test_fresh_weights_do_not_depend_on_the_stages(run_ranks):
    (whole,) = run_ranks(1, initial_weights, 1)
    for part in run_ranks(3, initial_weights, 3):
        assert part
        assert all(torch.equal(weight, whole[name]) for name, weight in part.items())


def refused_exports(source: str, out: str) -> list[str]:
    """Return the errors of exports that fail on rank 0 alone."""
    module = PipelineModule(from_hf(source), num_stages=2)
    cases: list[dict[str, Any]] = [
        {"directory": f"{out}/file/out"},
        {"directory": f"{out}/{'long' * 100}"},
        {"directory": f"{out}/new", "max_file_bytes": "5GB"},
    ]
    told = []
    for case in cases:
        with pytest.raises(CheckpointError) as error:
            save_hf(module, **case)
        told.append(str(error.value))
    return told


def test_an_export_that_fails_is_told_on_all_ranks(run_ranks, tmp_path):
    save_model(tmp_path / "in", "llama")
    (tmp_path / "file").touch()
    wanted = ["can't be written", "File name too long", "TypeError: '>' not supported"]
    for told in run_ranks(2, refused_exports, str(tmp_path / "in"), str(tmp_path)):
        assert [text for text, part in zip(told, wanted, strict=True) if part not in text] == []


def weights_without_frozen(source: str) -> list[str] | None:
    module = PipelineModule(from_hf(source), num_stages=2)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    engine = parallel3d.initialize(model=module, config=config)[0]
    weights = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return weights and sorted(weights)


def test_a_pipelines_frozen_weights_can_be_left_out(run_ranks, tmp_path):
    save_model(tmp_path, "llama")
    first, other = run_ranks(2, weights_without_frozen, str(tmp_path))
    assert other is None
    assert first == sorted(name for name, _ in make_model("llama").named_parameters() if "norm" in name)


def masks_of_heads() -> dict[str, Tensor]:
    """Return inputs in which each head of each sequence attends to some of the positions before a position."""
    chosen = torch.rand(BATCH, 4, SEQ, SEQ, generator=torch.Generator().manual_seed(3)) > 0.4
    mask = (chosen | torch.eye(SEQ, dtype=torch.bool)) & torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    return {"input_ids": token_ids(BATCH, SEQ), "attention_mask": mask}


def logits_under_masks_of_heads(source: str) -> Tensor:
    module = PipelineModule(from_hf(source), num_stages=1, config={"tensor_parallel": {"size": 2}}).eval()
    with torch.no_grad():
        logits: Tensor = module(masks_of_heads()).whole()
    return logits


def test_each_tensor_parallel_rank_takes_the_masks_of_its_heads(run_ranks, tmp_path):
    model = save_model(tmp_path, "llama")
    with torch.no_grad():
        wanted = model(**masks_of_heads()).logits
    for logits in run_ranks(2, logits_under_masks_of_heads, str(tmp_path)):
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
