"""Generation in pipelines, tensor slices and ZeRO, token by token that of transformers on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from hf_models import VOCAB, make_model, token_ids, transformers
from torch import Tensor, nn

import parallel3d
from parallel3d.errors import ConfigError, Parallel3DError
from parallel3d.models import from_hf
from parallel3d.pipe import PipelineModule
from parallel3d.rng import stream_seed

BATCH, SEQ, NEW = 3, 6, 7
# (model, stages, tensor-parallel ranks, whether sequences are shared, ZeRO stage, chunks of a stage) on 4 ranks.
LAYOUTS = [
    ("llama", 2, 2, True, 0),
    ("mistral", 2, 1, False, 3, 2),
    ("gpt2", 1, 2, False, 1),
    ("gemma2", 2, 1, False, 3),
    ("phi", 1, 2, False, 3),
]
NAMES = ["llama", "mistral", "gpt2", "gemma", "gemma2", "phi"]
MORE = [(name, *layout) for name in NAMES for layout in [(4, 1, False, 0), (2, 2, False, 0), (1, 1, False, 3)]]
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}


def make_engine(
    model: nn.Module, stages: int, tensor_ranks: int = 1, shared: bool = False, zero: int = 0, chunks: int = 1
) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "tensor_parallel": {"size": tensor_ranks, "sequence_parallel": shared},
        "pipeline": {"schedule": "gpipe", "num_chunks": chunks, "placement": "loop" if chunks == 1 else "v"},
    }
    module = PipelineModule(from_hf(model), stages, partition_method="uniform", config=config)
    return parallel3d.initialize(model=module, config=config)[0]


def requests(replica: int, ends: list[int], of: Callable[..., Tensor]) -> list[Tensor]:
    """Generate by `of` from whole and padded prompts, which end early or not; each replica has its own prompts."""
    ids = token_ids(BATCH, SEQ, seed=replica)
    mask = torch.ones_like(ids)
    mask[0, : 2 + replica] = mask[1, :1] = 0
    return [
        of(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0),
        of(ids, max_new_tokens=NEW),
        of(ids, max_new_tokens=NEW, seed=11, **SAMPLING),
    ]


def by_transformers(model: Any, ids: Tensor, seed: int = 0, replica: int = 0, **options: Any) -> Tensor:
    torch.manual_seed(stream_seed(seed, replica) if replica else seed)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **({"do_sample": False} | options))


def ends_of(model: nn.Module) -> list[int]:
    """Return tokens after which all prompts of replica 0 end early: what its rows say third, fourth and fifth."""
    greedy = requests(0, [VOCAB + 1], partial(by_transformers, model))[0]
    return [int(greedy[row, SEQ + 2 + row]) for row in range(BATCH)]


def note_length(lengths: list[int], _: nn.Module, args: tuple[dict[str, Tensor]]) -> None:
    lengths.append(args[0]["input_ids"].shape[1])


def generate_all(
    layouts: list[tuple[Any, ...]], ends: dict[str, list[int]]
) -> list[tuple[int, list[Tensor], list[int]]]:
    """Return, of each layout, the replica, what it has generated, and the numbers of tokens that its first layer was given."""
    results = []
    for name, *layout in layouts:
        engine = make_engine(make_model(name), *layout)
        lengths: list[int] = []
        if engine.is_first_stage():
            engine.module.layers["0"].register_forward_pre_hook(partial(note_length, lengths))
        replica = engine.get_data_parallel_rank()
        engine.train()
        results.append((replica, requests(replica, ends[name], engine.generate), lengths))
        assert all(module.training for module in engine.module.modules())
        assert all(getattr(layer, "_past", None) is None for layer in engine.module.layers.values())
    return results


def test_every_layout_says_what_transformers_says(run_ranks, full: bool):
    layouts = LAYOUTS + (MORE if full else [])
    models = {name: make_model(name) for name in {name for name, *_ in layouts}}
    ends = {name: ends_of(model) for name, model in models.items()}
    ranks = run_ranks(4, generate_all, layouts, ends, timeout=500)

    @cache
    def said(name: str, replica: int) -> list[Tensor]:
        return requests(replica, ends[name], partial(by_transformers, models[name], replica=replica))

    for k, layout in enumerate(layouts):
        for replica, found, lengths in (rank[k] for rank in ranks):
            wanted = said(layout[0], replica)
            for own, theirs in zip(found, wanted, strict=True):
                assert torch.equal(own, theirs), (layout, own, theirs)
            assert replica or wanted[0].shape[1] < SEQ + NEW
            if lengths:  # each prompt once, and then one token a step
                assert lengths.count(SEQ) == 3
                assert set(lengths) == {SEQ, 1}


def refusals() -> tuple[list[str], list[Tensor]]:
    """Return the errors of bad requests on one of 2 stages; also what it, and a model that is no pipeline, generate."""
    ids, engine = token_ids(2, 4), make_engine(make_model("gpt2"), 2)
    rank = engine.global_rank
    cases: list[dict[str, Any]] = [
        {"input_ids": ids[0]},
        {"max_new_tokens": 61},
        {"max_new_tokens": 0},
        {"eos_token_id": 3},
        {"temperature": 0.0},
        {"attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)},
        {"seed": rank},
        {"num_beam": 2} if rank else {},
        {"temperature": "hot"} if rank else {},
        {"input_ids": ids.clone().fill_(VOCAB)},
    ]
    told = []
    for case in cases:
        with pytest.raises(ConfigError) as error:
            engine.generate(**{"input_ids": ids, "max_new_tokens": 2} | case)
        told.append(str(error.value))
    state = torch.get_rng_state()
    generated = [engine.generate(ids.int(), max_new_tokens=3)]
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn
    module = PipelineModule([nn.Embedding(9, 9), nn.Linear(9, 9)], num_stages=2)
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"size": 1}}
    with pytest.raises(ConfigError) as error:
        parallel3d.initialize(model=module, config=config)[0].generate(ids, max_new_tokens=2)
    whole = parallel3d.initialize(model=make_model("gpt2"), config=config)[0]
    mask = torch.ones_like(ids)
    generated.append(whole.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
    return [*told, str(error.value)], generated


def refuse(kind: str, sizes: dict[str, int]) -> str:
    """Return the error of a model of which no keys and values can be kept."""
    hf = transformers()
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, vocab_size=VOCAB, **sizes))
    with pytest.raises(Parallel3DError) as error:
        make_engine(model, 1).generate(token_ids(2, 4), max_new_tokens=3)
    return str(error.value)


def test_models_that_keep_no_keys_and_values_are_refused(run_ranks):
    (told,) = run_ranks(1, refuse, "openai-gpt", {"n_embd": 8, "n_layer": 2, "n_head": 2})
    assert "'openai-gpt' does not give its layers keys and values of each layer's positions; save it by save_hf" in told
    (told,) = run_ranks(1, refuse, "mamba", {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 4})
    assert "'mamba' keeps other states than keys and values" in told


def test_bad_requests_are_refused_on_all_ranks_with_the_remedy(run_ranks):
    wanted = [
        "input_ids are torch.int64 [4]; give integers [batch, seq]",
        "4 tokens of a prompt and 61 new ones exceed the model's 64 positions; set max_new_tokens to 60 or less",
        "max_new_tokens is 0; give 1 or more",
        "2 prompts may end at different places; give pad_token_id=3, or another",
        "temperature=0.0, top_k=None, top_p=1.0: give a temperature above 0",
        "attention_mask [2, 4] of input_ids [2, 4]: give one of the same shape whose last column is 1",
        "ranks called generate with different arguments; give all stages",
        "generate has no 'num_beam'.",
        "an argument of generate has a wrong type or value: '<=' not supported between instances of 'str' and 'int'",
        f"there is a token id {VOCAB}, but the model has words 0 to {VOCAB - 1}",
        "keeps no keys and values; generate by layers of models.from_hf or decoder",
    ]
    ids = token_ids(2, 4)
    for told, generated in run_ranks(2, refusals):
        assert [text for text, part in zip(told, wanted, strict=True) if part not in text] == []
        assert torch.equal(
            torch.stack(generated), by_transformers(make_model("gpt2"), ids, max_new_tokens=3).repeat(2, 1, 1)
        )


def whole_models_that_end_apart(end: int) -> Tensor:
    """Generate by a model's own code at ZeRO-3: rank 0 ends after a token, rank 1 after NEW."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine = parallel3d.initialize(model=make_model("gpt2"), config=config)[0]
    ids, ends = token_ids(1, 4), None if engine.global_rank else end
    mask = torch.ones_like(ids)
    return engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)


def test_replicas_of_a_whole_model_with_sharded_weights_may_end_apart(run_ranks):
    whole = by_transformers(make_model("gpt2"), token_ids(1, 4), max_new_tokens=NEW)
    found = run_ranks(2, whole_models_that_end_apart, int(whole[0, 4]), timeout=60)
    assert [tokens.tolist() for tokens in found] == [whole[:, :5].tolist(), whole.tolist()]
