"""Which wrapped Hugging Face models are refused tensor slices, and what is told; what slicing leaves of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import make_model
from torch import nn

from parallel3d.comm.collectives import Group
from parallel3d.errors import ConfigError, PartitionError
from parallel3d.models import from_hf
from parallel3d.models.huggingface.tp_regions import UnknownRegion, regions_of
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import ColumnParallelLinear
from parallel3d.tensor_parallel.parallelize import STYLES


def on_first_of(ranks: int, sequence_parallel: bool = False, layout_independent: bool = False) -> BuildContext:
    groups: Any = SimpleNamespace(model=Group(tuple(range(ranks)), None))
    return BuildContext(groups, torch.device("cpu"), sequence_parallel, layout_independent)


def build(model: nn.Module, context: BuildContext) -> list[nn.Module]:
    return [spec.build(context) for spec in from_hf(model)]


LATENT = r"DeepseekV2.*\.kv_a_proj_with_mqa is 'mla_kv_a_proj' in its plan, which is not supported"
OUT_OF_PLAN = (
    r"take 'layers\.\*\.self_attn\.kv_a_proj_with_mqa' and what is inside it out of model\.config\.base_model_tp_plan"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cohere-norms", r"Cohere.* model\.layers\.0\.self_attn has q_norm, which would compute with sharded inputs"),
        ("deepseek", f"{LATENT} here; set tensor_parallel.size to 1, or {OUT_OF_PLAN}"),
        ("gpt-oss", r"GptOss.* nothing in the base_model_tp_plan .* names its layers; set tensor_parallel\.size to 1"),
    ],
)
def test_an_architecture_that_can_not_be_sliced_is_refused_by_name(name: str, message: str):
    model = make_model(name)
    build(model, on_first_of(1))
    with pytest.raises(ConfigError, match=message):
        build(model, on_first_of(2))


def test_a_mixture_goes_with_its_experts_whole():
    model = make_model("mixtral")
    plan = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {key: word for key, word in plan.items() if "experts" not in key}
    layer = build(model, on_first_of(2))[1].layer
    assert layer.self_attn.q_proj.weight.shape[0] == 16
    assert sum(p.numel() for p in layer.mlp.parameters()) == sum(
        p.numel() for p in model.model.layers[0].mlp.parameters()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"*.self_attn.v_proj": None}, r"self_attn has q_proj, k_proj: no attention whose heads are known here"),
        ({"*.self_attn.v_proj": "colwise_gather_output"}, r"has q_proj, k_proj: no attention"),
        ({"*.mlp.fc2": None}, r"mlp has 1 column and 0 row layers \(fc1\)"),
        ({"*.mlp.fc1": "packed_colwise"}, r"mlp has fc1 of 48 outputs before 48 inputs"),
        ({"*.mlp.activation_fn": "colwise"}, r"mlp has activation_fn, a \w+ and no nn\.Linear"),
        ({"*.self_attn.q_proj": "embedding_colwise"}, r"q_proj is 'embedding_colwise' in its plan"),
        ({"*.mlp.fc1.bias": "colwise"}, r"fc1\.bias is 'colwise' in its plan, which is not supported here"),
    ],
)
def test_a_plan_whose_outcome_is_not_known_is_refused(changes: dict[str, str | None], message: str):
    model = make_model("phi")
    words = {
        **model.config.base_model_tp_plan,
        **{key.replace("*", "layers.*", 1): word for key, word in changes.items()},
    }
    model.config.base_model_tp_plan = {key: word for key, word in words.items() if word is not None}
    with pytest.raises(ConfigError, match=message):
        build(model, on_first_of(2))


@pytest.mark.parametrize("features", [30, 36])
def test_projections_that_are_not_heads_are_refused(features: int):
    """With 4 heads of 8: 30 numbers are not 4 heads, and 36 are not a query, a key and a value of each."""
    attention: Any = nn.Module()
    attention.head_size = 8
    attention.query_key_value, attention.dense = nn.Linear(4, features), nn.Linear(32, 4)
    layer = nn.ModuleDict({"attention": attention})
    words = {"attention.query_key_value": "colwise", "attention.dense": "rowwise"}
    (region,) = regions_of(layer, {name: STYLES[word] for name, word in words.items()})
    with pytest.raises(UnknownRegion, match=f"query_key_value of {features} numbers for 4 heads of 8"):
        region.prepare(Group((0, 1), None))


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(PartitionError, match="4 attention heads can't be split over 5 ranks"):
        build(make_model("phi"), on_first_of(5))


def test_masks_of_whole_tensors_are_refused_by_name():
    build(make_model("phi"), on_first_of(2, layout_independent=True))
    model = make_model("phi", attention_dropout=0.1)
    build(model, on_first_of(2))
    with pytest.raises(
        ConfigError, match=r"PhiForCausalLM drops inside .*self_attn.* set rng\.layout_independent to false"
    ):
        build(model, on_first_of(2, layout_independent=True))


def test_sequence_parallelism_is_refused_by_name():
    model = make_model("phi")
    build(model, on_first_of(1, sequence_parallel=True))
    with pytest.raises(ConfigError, match=r"PhiForCausalLM .* set tensor_parallel\.sequence_parallel to false"):
        build(model, on_first_of(2, sequence_parallel=True))


def test_a_head_is_sliced_by_its_outputs_and_an_embedding_needs_no_other_weights():
    model = make_model("phi")
    model.tp_plan["lm_head"] = "rowwise"
    with pytest.raises(
        ConfigError, match=r"lm_head would be sharded by inputs .* take 'lm_head' .* out of model\.tp_plan"
    ):
        build(model, on_first_of(2))
    model = make_model("gemma2")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.scale = nn.Parameter(torch.ones(32))
    with pytest.raises(ConfigError, match=r"embed_tokens is an embedding with more than the rows it looks up"):
        build(model, on_first_of(2))


def test_the_model_is_left_as_it_was():
    """Its modules, and what is said of its parameters: it may be built again, for other ranks."""
    model = make_model("phi-norms")
    before = {name: type(module) for name, module in model.named_modules()}
    layer = build(model, on_first_of(4))[1].layer
    assert isinstance(layer.self_attn.q_proj, ColumnParallelLinear)
    assert layer.self_attn.num_key_value_groups == 1
    assert layer.self_attn.q_layernorm.weight.partial_over.size == 4
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not any({"slicing", "partial_over"} & set(vars(p)) for p in model.parameters())
    assert model.model.layers[0].self_attn.num_key_value_groups == 2
    whole = build(model, on_first_of(1))[1].layer
    assert whole is model.model.layers[0]
