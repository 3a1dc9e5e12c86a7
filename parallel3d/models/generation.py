"""Generation of text by layers in a pipeline: the prompts once, then a token at a time, with keys and values kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from parallel3d.activity import Phase
from parallel3d.comm.collectives import all_gather_object, all_reduce_max, broadcast
from parallel3d.errors import ConfigError, Parallel3DError, nearest
from parallel3d.models.loss import SlicedLogits
from parallel3d.pipe.batch import signature
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import stream_seed

# (inputs of a micro-batch, their signature) -> logits of the last stage; None on ranks of other stages.
Forward = Callable[[dict[str, Tensor], int], Any]


@runtime_checkable
class KeepsPast(Protocol):
    """Layer that can cache keys and values of earlier positions, or needs none."""

    @property
    def max_positions(self) -> int | None:
        """Number of positions that the model is made for, if it says so."""

    def keep_past(self, length: int | None) -> None:
        """Keep keys and values of up to `length` positions from the next call on; None: drop them, and keep no more."""


@dataclass(frozen=True, eq=False)
class Request:
    """Prompts, and how they are continued; the fields are arguments of DeepSpeedEngine.generate."""

    input_ids: Tensor
    max_new_tokens: int
    attention_mask: Tensor | None = None
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    pad_token_id: int | None = None
    seed: int | None = None

    @property
    def ends(self) -> list[int]:
        """The tokens at which a sequence ends."""
        return [self.eos_token_id] if isinstance(self.eos_token_id, int) else list(self.eos_token_id or ())

    def digest(self) -> str:
        """Return a hash of all fields."""
        values = [value.tolist() if isinstance(value, Tensor) else value for value in vars(self).values()]
        return hashlib.blake2b(repr(values).encode(), digest_size=16).hexdigest()

    @classmethod
    def of(cls, inputs: Sequence[Any], options: Mapping[str, Any]) -> Request:
        """Return the request of these arguments. Raises ConfigError for an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"generate has no {name!r}.{nearest(name, known)} It has {', '.join(known)}")
        return cls(*inputs, **options)

    def problem(self, max_positions: int | None) -> str | None:
        """Return what is wrong with the request, and the remedy; None if nothing is."""
        ids, mask, shape = self.input_ids, self.attention_mask, list(self.input_ids.shape)
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            return f"input_ids are {ids.dtype} {shape}; give integers [batch, seq] with one token or more"
        if mask is not None and (mask.shape != ids.shape or not mask[:, -1].all()):
            return (
                f"attention_mask {list(mask.shape)} of input_ids {shape}: give one of the same shape whose last column is 1, "
                "with prompts padded on the left (tokenizer.padding_side = 'left')"
            )
        if self.max_new_tokens < 1:
            return f"max_new_tokens is {self.max_new_tokens}; give 1 or more"
        prompt = shape[1] if mask is None else int(mask.sum(1).max())
        if max_positions is not None and prompt + self.max_new_tokens > max_positions:
            return (
                f"{prompt} tokens of a prompt and {self.max_new_tokens} new ones exceed the model's {max_positions} positions; "
                f"set max_new_tokens to {max_positions - prompt} or less, or shorten the prompts"
            )
        if self.temperature <= 0 or not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            return (
                f"temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}: give a temperature above 0, top_k of "
                "1 or more, or None, and top_p in (0, 1]; do_sample=False takes the likeliest token"
            )
        if self.ends and self.pad_token_id is None and len(ids) > 1:
            return f"{shape[0]} prompts may end at different places; give pad_token_id={self.ends[0]}, or another"
        return None

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return the next tokens [batch] by logits [batch, vocab]."""
        if not self.do_sample:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p < 1:
            ascending, order = logits.sort(-1)
            left_out = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            left_out[:, -1] = False
            logits = logits.masked_fill(left_out.scatter(-1, order, left_out), -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def generate(
    module: PipelineModule, forward: Forward, together: bool, inputs: Sequence[Any], options: Mapping[str, Any]
) -> Tensor:
    """Return the prompts and what follows them, [batch, seq + new], on every rank.

    - together: whether all replicas must run as many forwards.
    - inputs, options: the fields of a Request, by place and by name.

    Collective; raises ConfigError on all ranks.
    """
    request = _agree(module, inputs, options)
    module.groups.activity.enter(Phase.GENERATING)
    layers: Any = list(module.layers.values())
    length = request.input_ids.shape[1] + request.max_new_tokens
    for layer in layers:
        layer.keep_past(length)
    try:
        with torch.compiler.set_stance("force_eager"):  # a graph for each length would be compiled
            return _continue(module, forward, together, request, length)
    finally:
        for layer in layers:
            layer.keep_past(None)


def _agree(module: PipelineModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> Request:
    """Return the request. Raises ConfigError on all ranks if one can't generate, or got other arguments."""
    replica, problem, digest, common = module.groups.coordinate("data"), None, "", None
    try:
        request = Request.of(inputs, options)
        _check(module, request)
        digest, common = request.digest(), (request.max_new_tokens, request.ends)
    except Parallel3DError as error:
        problem = str(error)
    except Exception as error:
        problem = f"an argument of generate has a wrong type or value: {error}"
    mine = (replica, digest), common, problem
    replicas, everyone, problems = zip(*all_gather_object(mine, module.groups.control), strict=True)
    if found := next(filter(None, problems), None):
        raise ConfigError(found)
    if len(set(replicas)) > module.groups.data.size or any(other != common for other in everyone):
        raise ConfigError(
            "ranks called generate with different arguments; give all stages and tensor-parallel ranks of a replica the same "
            "arguments, and all replicas the same max_new_tokens and eos_token_id"
        )
    return request


def _check(module: PipelineModule, request: Request) -> None:
    """Raise ConfigError or DataError for layers that keep no keys and values, and for a request that they can't carry out."""
    layers = dict[str, Any](module.layers.items())
    for k, layer in layers.items():
        if not isinstance(layer, KeepsPast):
            raise ConfigError(
                f"layer {k}, a {type(layer).__name__}, keeps no keys and values; generate by layers of models.from_hf or "
                "decoder"
            )
    if problem := request.problem(next((layer.max_positions for layer in layers.values()), None)):
        raise ConfigError(problem)
    first: Any = layers.get("0")
    if hasattr(first, "check_inputs"):
        first.check_inputs(request.input_ids)


def _continue(module: PipelineModule, forward: Forward, together: bool, request: Request, length: int) -> Tensor:
    """Append tokens until there are `length`, or all prompts of this replica (with `together`: of all replicas) have ended."""
    device, ends, replica = module.device, request.ends, module.groups.coordinate("data")
    draws = request.do_sample and request.seed is None  # otherwise torch's generator must not change
    seed = int(torch.randint(2**62, ())) if draws else request.seed or 0
    generator = torch.Generator(device).manual_seed(stream_seed(seed, replica) if replica else seed)
    tokens, mask = request.input_ids.to(device, torch.int64), request.attention_mask
    mask = None if mask is None or mask.all() else mask.to(device).long()
    unfinished = torch.ones(len(tokens), dtype=torch.bool, device=device)
    seen, end, others = 0, length, module.groups.data if together else module.groups.alone()
    while tokens.shape[1] < length:
        inputs = {"input_ids": tokens[:, seen:]}
        if mask is not None:
            inputs |= {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, seen:], "attention_mask": mask}
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        elif seen:  # those of the prompts are the default
            inputs["position_ids"] = torch.arange(seen, tokens.shape[1], device=device)[None]
        logits = forward(inputs, signature((inputs, seen)))
        module.groups.activity.enter(Phase.GENERATING)  # the forward was another phase
        following, seen = _chosen(module, logits, request, generator, tokens), tokens.shape[1]
        following = following.where(unfinished, tokens.new_tensor(request.pad_token_id or 0))
        tokens = torch.cat([tokens, following[:, None]], 1)
        unfinished &= ~torch.isin(following, tokens.new_tensor(ends))
        if ends:
            going_on = unfinished.any().long()
            if not going_on:
                end = min(end, tokens.shape[1])
            all_reduce_max(going_on, others).wait()
            if not going_on:
                break
    return tokens[:, :end]


def _chosen(
    module: PipelineModule, logits: Any, request: Request, generator: torch.Generator, tokens: Tensor
) -> Tensor:
    """Return the next tokens [batch] on every rank, as the first tensor-parallel rank of the last stage chooses them."""
    groups, following = module.groups, tokens.new_zeros(len(tokens))
    if logits is not None:
        if isinstance(logits, SlicedLogits):
            logits = SlicedLogits(logits.local[:, -1:], logits.group, logits.vocab_size).whole()
        following = request.choose(logits[:, -1], generator)
        broadcast(following, groups.model.ranks[0], groups.model)
    broadcast(following, groups.pipe.ranks[module.placement[-1]], groups.pipe)
    return following
