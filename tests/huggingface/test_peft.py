"""LoRA adapters of PEFT in pipelines, tensor slices and ZeRO, against PEFT in plain PyTorch on one process."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hf_models import in_double, load_model, make_model, save_model, token_ids
from reference import distance
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine
from parallel3d.comm.collectives import Group
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models import CausalLMLoss, from_hf, save_hf
from parallel3d.pipe import PipelineModule
from parallel3d.specs import BuildContext

STEPS, MICRO_BATCHES, BATCH, SEQ = 2, 4, 2, 7
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# (stages, tensor-parallel ranks, ZeRO stage) of 4 ranks, which continue each other's training.
LAYOUTS = [(2, 2, 0), (2, 1, 2), (1, 2, 1), (1, 1, 3), (2, 1, 3), (1, 4, 0), (4, 1, 0)]
MODELS = ["llama", "phi"]
PROMPT = token_ids(1, 5)


def adapted(name: str, directory: str | None = None, model: dict[str, Any] | None = None, **changes: Any) -> Any:
    """With new adapters of all linear layers of blocks, or with those in a directory; in float64."""
    peft = pytest.importorskip("peft", reason="peft, of the test extra, is the reference here")
    base = in_double(make_model(name, num_hidden_layers=3, **(model or {})))
    if directory is not None:
        return peft.PeftModel.from_pretrained(base, directory, is_trainable=True).double()
    settings = {"target_modules": r".*layers.*(proj|fc1|fc2|dense)", "init_lora_weights": False, "lora_alpha": 4}
    torch.manual_seed(5)
    return peft.get_peft_model(base, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **(settings | changes))).double()


def data_of(training: int) -> list[Tensor]:
    """Return the micro-batches of one layout's training, in the global order."""
    return [token_ids(BATCH, SEQ, seed=100 * training + k) for k in range(STEPS * MICRO_BATCHES)]


def make_engine(model: Any, stages: int, tensor_ranks: int, zero: int) -> DeepSpeedEngine:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "train_batch_size": BATCH * MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"size": tensor_ranks},
        "pipeline": {"shapes": "dynamic"},
        "steps_per_print": None,
    }
    loss = CausalLMLoss(shift=True)
    module = PipelineModule(from_hf(model), stages, loss_fn=loss, partition_method="uniform", config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def train(name: str, out: str, trainings: list[int]) -> list[Any]:
    """Train in each layout from where the one before has ended. Return losses and norms, the state's bytes, and a text."""
    results = []
    for k in trainings:
        engine = make_engine(adapted(name, f"{out}/{k}"), *LAYOUTS[k])
        replicas, replica = engine.dp_world_size, engine.get_data_parallel_rank()
        samples = iter([(ids, ids) for ids in data_of(k)[replica::replicas]])
        steps = [(float(engine.train_batch(samples)), float(engine.get_global_grad_norm())) for _ in range(STEPS)]
        frozen = [p for p in engine.module.parameters() if not p.requires_grad]
        assert frozen
        assert all(p.grad is None for p in frozen)
        report = engine.reports.memory_report()[engine.global_rank]
        save_hf(engine, f"{out}/{k + 1}")
        save_hf(engine, f"{out}/merged{k + 1}", merge_adapters=True)
        said = engine.generate(PROMPT, max_new_tokens=4)
        results.append((steps, [report[part][1] for part in ("gradients", "masters", "optimizer")], said))
    return results


def train_on_one(model: nn.Module, training: int) -> list[tuple[float, float]]:
    """Train in plain PyTorch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, data, steps = torch.optim.AdamW(trained, **ADAM), iter(data_of(training)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO_BATCHES):
            ids = next(data)
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, ids[:, 1:].flatten()) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        gradients = [p.grad.square().sum() for p in trained if p.grad is not None]
        steps.append((total, float(torch.stack(gradients).sum().sqrt())))
        optimizer.step()
    return steps


@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_in_each_layout_and_continue_in_the_next(run_ranks, tmp_path: Path, name: str, full: bool):
    trainings = list(range(len(LAYOUTS) if full else 4 if name == "llama" else 1))
    model = adapted(name)
    model.save_pretrained(tmp_path / "0")
    ranks = run_ranks(4, train, name, str(tmp_path), trainings, timeout=500)
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert num_trained < 0.3 * sum(p.numel() for p in model.parameters())
    for k in trainings:
        check_training(model, k, [rank[k] for rank in ranks], tmp_path)


def check_training(model: Any, training: int, ranks: list[Any], folder: Path) -> None:
    """Train the model in plain PyTorch, too, and compare: losses, norms, state, a text, and both directories."""
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    wanted, layout = train_on_one(model, training), LAYOUTS[training]
    said = model.generate(PROMPT, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for steps, state, own in ranks:
        assert torch.equal(own, said), layout
        for found, expected in zip(steps, wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-6), layout
        # Gradients and two moments of the adapters in float64, and nothing of what is frozen.
        assert sum(state) < 1.1 * 3 * 8 * num_trained
    assert sum(sum(state) for _, state, _ in ranks) > 0
    model.save_pretrained(folder / "reference")
    own, others = (load_file(folder / f / "adapter_model.safetensors") for f in (str(training + 1), "reference"))
    assert own.keys() == others.keys()
    assert all(distance(own[key], weight) < 1e-8 for key, weight in others.items()), layout
    whole = copy.deepcopy(model).merge_and_unload().state_dict()
    exported = load_model(folder / f"merged{training + 1}").state_dict()
    assert exported.keys() == whole.keys()
    assert all(distance(exported[key], weight) < 1e-8 for key, weight in whole.items()), layout


def test_adapters_after_a_stage_that_is_all_frozen(run_ranks, tmp_path: Path):
    model = adapted("llama", target_modules=r".*layers\.2\..*proj")
    model.save_pretrained(tmp_path / "1")
    ranks = [own for (own,) in run_ranks(4, train, "llama", str(tmp_path), [1])]
    assert [sum(state) > 0 for _, state, _ in ranks] == [False, False, True, True]
    check_training(model, 1, ranks, tmp_path)


def train_from_directory(source: str, out: str, layout: tuple[int, int, int], new: bool) -> tuple[list[Any], float]:
    """Train the adapters of a directory, or new ones of its model. Return losses and norms, and the part that is trained."""
    import peft

    torch.manual_seed(9)
    config = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM") if new else None
    stages, tensor_ranks, zero = layout
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "train_batch_size": BATCH * MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"size": tensor_ranks},
        "pipeline": {"shapes": "dynamic"},
    }
    layers = from_hf(source, torch.float64, peft_config=config)
    module = PipelineModule(layers, stages, loss_fn=CausalLMLoss(shift=True), config=settings)
    engine = parallel3d.initialize(model=module, config=settings)[0]
    save_hf(engine, f"{out}/before")
    replicas, replica = engine.dp_world_size, engine.get_data_parallel_rank()
    samples = iter([(ids, ids) for ids in data_of(0)[replica::replicas]])
    steps = [(float(engine.train_batch(samples)), float(engine.get_global_grad_norm())) for _ in range(STEPS)]
    save_hf(engine, f"{out}/after")
    sizes = [(p.requires_grad, getattr(p, "ds_numel", p.numel())) for p in engine.module.parameters()]
    return steps, sum(size for trains, size in sizes if trains) / sum(size for _, size in sizes)


@pytest.mark.parametrize(
    ("layout", "new"), [((2, 2, 1), False), ((2, 1, 3), False), ((2, 1, 3), True), ((1, 2, 1), True)]
)
def test_adapters_train_from_a_directory(run_ranks, tmp_path: Path, layout: tuple[int, int, int], new: bool):
    peft = pytest.importorskip("peft", reason="peft, of the test extra, is the reference here")
    model = in_double(save_model(tmp_path / "model", "phi"))
    source = tmp_path / "model"
    if not new:
        source = tmp_path / "adapters"
        lora = peft.LoraConfig(
            r=3, target_modules=r".*layers.*(proj|fc1|dense)", task_type="CAUSAL_LM", init_lora_weights=False
        )
        peft.get_peft_model(load_model(tmp_path / "model"), lora).save_pretrained(source)
    ranks = run_ranks(4, train_from_directory, str(source), str(tmp_path), layout, new)
    before = load_file(tmp_path / "before" / "adapter_model.safetensors")
    if new:  # as PEFT draws them: B is zero, and A uniform with the standard deviation 1 / sqrt(3 x inputs)
        for key, weight in before.items():
            deviation = 0.0 if "lora_B" in key else (3 * weight.shape[1]) ** -0.5
            assert float(weight.std()) == pytest.approx(deviation, rel=0.3), key
    else:
        stored = load_file(source / "adapter_model.safetensors")
        assert before.keys() == stored.keys()
        assert all(torch.equal(before[key].float(), weight) for key, weight in stored.items())
    reference = peft.PeftModel.from_pretrained(
        model, tmp_path / "before", is_trainable=True, autocast_adapter_dtype=False
    ).double()
    wanted = train_on_one(reference, 0)
    for steps, part in ranks:
        assert 0 < part < 0.3
        for found, expected in zip(steps, wanted, strict=True):
            assert found == pytest.approx(expected, rel=1e-6)
    reference.save_pretrained(tmp_path / "reference")
    own, others = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("after", "reference"))
    assert own.keys() == others.keys()
    assert all(distance(own[key], weight) < 1e-8 for key, weight in others.items())


@pytest.mark.parametrize("name", ["mixtral", "llama"])
def test_adapters_that_need_the_models_weights_and_heads_that_are_trained_whole(tmp_path: Path, name: str):
    """Experts, which transformers converts; PiSSA, which is made of the weights; and a copy of the head."""
    import peft

    model = save_model(tmp_path, name)
    settings = {"init_lora_weights": "pissa"} if name == "mixtral" else {"modules_to_save": ["lm_head"]}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    module = PipelineModule(from_hf(tmp_path, peft_config=lora), num_stages=1)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(PROMPT), model(PROMPT).logits, rtol=1e-4, atol=1e-4)
    trained = {name.rpartition("lora_")[2] for name, p in module.named_parameters() if p.requires_grad}
    assert {"A.default.weight", "B.default.weight"} <= trained
    assert len(trained) == (2 if name == "mixtral" else 3)


def test_trained_biases_of_the_model_are_in_a_directory_of_adapters(tmp_path: Path):
    import peft

    model = save_model(tmp_path / "model", "qwen2")
    model.name_or_path = str(tmp_path / "model")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    torch.nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.k_proj.bias)
    adapted.save_pretrained(tmp_path / "adapters")
    module = PipelineModule(from_hf(tmp_path / "adapters"), num_stages=1)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(PROMPT), adapted.eval()(PROMPT).logits)


def test_directories_of_adapters_that_can_not_be_loaded(tmp_path: Path):
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    save_model(tmp_path / "model", "llama")
    model = peft.get_peft_model(load_model(tmp_path / "model"), lora)
    model.save_pretrained(tmp_path / "adapters")
    with pytest.raises(ConfigError, match="has adapters, and peft_config asks for new ones; leave peft_config out"):
        from_hf(tmp_path / "adapters", peft_config=lora)
    with pytest.raises(ConfigError, match="weights can't be given"):
        from_hf(tmp_path / "model", peft_config=lora, weights=False)
    with pytest.raises(ConfigError, match="peft_config is for directories"):
        from_hf(model, peft_config=lora)
    save_file(
        {"base_model.model.other.lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapters" / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"don't fit their model; .*q_proj.lora_A.weight.*other.lora_A.weight"):
        from_hf(tmp_path / "adapters")
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"base_model_name_or_path is '.*/model', and no model is there; correct it"):
        from_hf(tmp_path / "adapters")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("mixtral", {"trainable_token_indices": [3, 5]}),  # and both weights of its experts
    ],
)
def test_adapters_are_saved_and_merged_by_peft_s_own_rules(tmp_path: Path, name: str, options: dict[str, Any]):
    """With magnitudes of DoRA, a head that is trained whole, and some words of the embedding."""
    model = adapted(name, **options)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key or "trainable_tokens" in key:
                parameter.normal_()
    model.generation_config.update(do_sample=True, temperature=0.5)
    module = PipelineModule(from_hf(model), num_stages=1)
    save_hf(module, tmp_path / "own")
    model.save_pretrained(tmp_path / "reference")
    assert (tmp_path / "own" / "README.md").read_text() == (tmp_path / "reference" / "README.md").read_text()
    configs = (json.loads((tmp_path / f / "adapter_config.json").read_text()) for f in ("own", "reference"))
    # Lists of sets are in any order.
    first, second = ({k: sorted(v) if isinstance(v, list) else v for k, v in config.items()} for config in configs)
    assert first == second
    own, wanted = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("own", "reference"))
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[key], weight) for key, weight in wanted.items())
    save_hf(module, tmp_path / "merged", merge_adapters=True)
    assert load_model(tmp_path / "merged").generation_config.temperature == 0.5
    whole, exported = model.merge_and_unload().state_dict(), load_model(tmp_path / "merged").state_dict()
    assert exported.keys() == whole.keys()
    assert all(distance(exported[key], weight) < 1e-8 for key, weight in whole.items())


def logits_with_dropout(layout_independent: bool, attention_dropout: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits in training of 2 tensor-parallel ranks, and what each adapter of the first layer kept."""
    model = adapted("llama", lora_dropout=0.5, model={"attention_dropout": attention_dropout})
    config = {"tensor_parallel": {"size": 2}, "rng": {"layout_independent": layout_independent}}
    module, kept = PipelineModule(from_hf(model), num_stages=1, config=config).train(), {}
    for name, part in module.layers["1"].named_modules():
        if name.endswith("lora_dropout.default"):
            part.register_forward_hook(lambda _, __, y, name=name: kept.update({name.split(".")[2]: y != 0}))
    torch.manual_seed(3)
    return module(token_ids(BATCH, SEQ)).detach(), kept


def test_adapters_drop_the_same_before_column_layers_and_parts_of_one_mask_before_row_layers(run_ranks):
    model = adapted("llama", lora_dropout=0.5).train()
    torch.manual_seed(3)
    wanted = model(input_ids=token_ids(BATCH, SEQ)).logits.detach()
    for logits, _ in run_ranks(2, logits_with_dropout, True, 0.0):
        torch.testing.assert_close(logits, wanted, rtol=1e-8, atol=1e-8)
    (_, first), (_, second) = run_ranks(2, logits_with_dropout, False, 0.5)
    same = {
        name for name, mask in first.items() if mask.shape == second[name].shape and torch.equal(mask, second[name])
    }
    assert same == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert first.keys() - same == {"o_proj", "down_proj"}


def test_what_can_not_be_sharded_or_merged_is_refused_by_name(tmp_path: Path):
    import peft

    context = BuildContext(SimpleNamespace(model=Group((0, 1), None)), torch.device("cpu"))

    def build(model: nn.Module) -> list[nn.Module]:
        return [spec.build(context) for spec in from_hf(model)]

    with pytest.raises(
        ConfigError,
        match=r"q_proj is adapted by Linear, .* LoRA's plain linear layers alone; set tensor_parallel\.size to 1",
    ):
        build(adapted("llama", use_dora=True))
    with pytest.raises(ConfigError, match=r"lm_head is adapted by ModulesToSaveWrapper"):
        build(adapted("llama", modules_to_save=["lm_head"]))
    with pytest.raises(ConfigError, match=r"has adapters \{'default': 'IA3'\}; .* LORA: get_peft_model"):
        from_hf(peft.get_peft_model(make_model("llama"), peft.IA3Config(task_type="CAUSAL_LM")))
    tied = build(adapted("llama-tied", target_modules=["lm_head"]))
    below, above = tied[0].get_parameter("model.embed_tokens.weight"), tied[-1].model.lm_head.base_layer.weight
    assert below.shape == above.shape == (129, 32)
    unplanned = build(adapted("opt"))[1].layer.self_attn  # sharded by the usual names, as without adapters
    assert unplanned.q_proj.base_layer.weight.shape == (16, 32)
    module = PipelineModule(from_hf(make_model("phi")), num_stages=1)
    with pytest.raises(CheckpointError, match="merge_adapters is True, but the model has no adapters"):
        save_hf(module, tmp_path / "out", merge_adapters=True)
