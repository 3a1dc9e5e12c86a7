"""Layout of a training run, and the words that it is written in: "pp2,tp2,dp2,zero1,sp,zb-h1,m8"."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from parallel3d.config.pipeline import SCHEDULES, SELECTIVE, RecomputationPolicy, SelectivePolicy
from parallel3d.errors import ConfigError, nearest

# A word that ends in a number -> the field that it sets, and what it counts.
_NUMBERED = {
    "pp": ("stages", "pipeline stages"),
    "tp": ("tensor_ranks", "tensor-parallel ranks"),
    "dp": ("replicas", "data-parallel replicas"),
    "zero": ("zero", "the ZeRO stage"),
    "mb": ("micro_batch", "samples of a micro-batch"),
    "m": ("micro_batches", "micro-batches of a replica"),
    "chunks": ("chunks", "chunks of a stage"),
    "ckpt": ("recompute", "layers recomputed together"),
}
_FROM_ZERO = ("zero", "ckpt")  # numbers that may be 0
# A word without a number -> the field, and its value.
_FLAGS: dict[str, tuple[str, Any]] = {
    "sp": ("sequence_parallel", True),
    "half": ("units", "half"),
    "v": ("placement", "v"),
    "ckpt-auto": ("policy", "auto"),
    **{name: ("policy", name) for name in SELECTIVE},
    **{name: ("schedule", name) for name in SCHEDULES},
}
_POLICIES = {"none": "ckpt0", "full": "ckpt1"}  # values of activation_checkpointing.policy that have other words here
_TWO_CHUNKS = ("interleaved", "zb-looped", "zbv")  # schedules that run 2 chunks a stage unless a word says otherwise

# The configuration's key of each field.
_KEYS = {
    "micro_batch": "train_micro_batch_size_per_gpu",
    "micro_batches": "gradient_accumulation_steps",
    "stages": "pipeline.stages",
    "schedule": "pipeline.schedule",
    "chunks": "pipeline.num_chunks",
    "placement": "pipeline.placement",
    "recompute": "pipeline.activation_checkpoint_interval",
    "tensor_ranks": "tensor_parallel.size",
    "sequence_parallel": "tensor_parallel.sequence_parallel",
    "zero": "zero_optimization.stage",
}
_AXES = ("stages", "tensor_ranks", "sequence_parallel")  # an axis that no word names has 1 rank
_Count = Annotated[int, Field(ge=1, lt=10**9)]
_Number = Annotated[int, Field(ge=0, lt=10**9)]
# What each layer recomputes: the same part of all, what the memory needs, or what was chosen for each layer.
LayerPolicy = SelectivePolicy | Literal["auto"] | tuple[RecomputationPolicy, ...]


class Layout(BaseModel):
    """Layout of a training run: its ranks along each axis, its batch, ZeRO stage and schedule.

    - stages, tensor_ranks, replicas: ranks of the pipeline, tensor-parallel and data-parallel axes.
    - chunks: number per stage; schedule: a name, or "written" for lists of instructions.
    - micro_batch: samples of a micro-batch; micro_batches: number in a step of each replica.
    - recompute: layers recomputed together, as pipeline.activation_checkpoint_interval.
    - policy: "cheap" or "attention" if only a part of them is recomputed, "auto" if the memory decides, as
      activation_checkpointing.policy; or what it has decided, by layer.
    - units: "half" where layers are half blocks, as the units of models.decoder; None for layers as they are given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stages: _Count = 1
    replicas: _Count = 1
    tensor_ranks: _Count = 1
    sequence_parallel: bool = False
    chunks: _Count = 1
    placement: Literal["loop", "v"] = "loop"
    schedule: str = "1f1b"
    micro_batch: _Count = 1
    micro_batches: _Count = 1
    zero: _Number = 0
    recompute: _Number = 0
    policy: LayerPolicy | None = None
    units: Literal["half"] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Ranks along the pipe, data and model axes."""
        return self.stages, self.replicas, self.tensor_ranks

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.stages * self.tensor_ranks * self.replicas

    @property
    def is_by_layer(self) -> bool:
        """Whether each layer has a policy of its own."""
        return self.policy == "auto" or isinstance(self.policy, tuple)

    @property
    def text(self) -> str:
        """Words that parse_layout reads, the same for equal layouts; axes of 1 rank and usual values are left out."""
        axes = {"pp": self.stages, "dp": self.replicas, "tp": self.tensor_ranks}
        words = [f"{name}{size}" for name, size in axes.items() if size > 1] or ["pp1"]
        words += ["sp"] * self.sequence_parallel + [f"zero{self.zero}"] * (self.zero > 0)
        words += [] if self.units is None else [self.units]
        words += [self.schedule] if self.schedule in SCHEDULES else []
        words += ["v"] * (self.placement == "v" and self.schedule != "zbv")
        words += [f"chunks{self.chunks}"] * (self.chunks != (2 if self.schedule in _TWO_CHUNKS else 1))
        words += [f"m{self.micro_batches}", f"mb{self.micro_batch}"]
        words += ["ckpt-auto"] if self.is_by_layer else [] if self.policy is None else [str(self.policy)]
        return ",".join(words + [f"ckpt{self.recompute}"] * (self.recompute != (self.policy is not None)))


class PartialLayout(Layout):
    """Layout that a user's words decide in part.

    - words: as the user wrote them; given: the fields that they set. The other fields are open, and have their defaults.
    """

    words: str = ""
    given: frozenset[str] = frozenset()

    @property
    def text(self) -> str:
        """The user's words."""
        return self.words

    def decided(self, name: str) -> Any:
        """Return the value of a field that the words set, None for one that they leave open."""
        return getattr(self, name) if name in self.given else None

    def complete(self, **defaults: Any) -> Layout:
        """Return the layout with these values of open fields, else the usual ones."""
        return Layout(**(defaults | {name: getattr(self, name) for name in self.given}))


def parse_layout(text: str) -> PartialLayout:
    """Read words separated by commas, in any order.

    Raises ConfigError for a word that is unknown, sets a field a second time, or gives 0 where that makes no sense, and for
    words that contradict each other.
    """
    fields: dict[str, Any] = {}
    for word in (part.strip() for part in text.lower().split(",")):
        field, value = _read(word, text)
        if field in fields:
            raise ConfigError(f"layout {text!r}: {word!r} sets the {field} a second time; give one of them")
        fields[field] = value
    if fields.get("schedule") in _TWO_CHUNKS:
        fields.setdefault("chunks", 2)
    if fields.get("schedule") == "zbv":
        fields["placement"] = "v"
    if "policy" in fields and not fields.setdefault("recompute", 1):
        raise ConfigError(
            f"layout {text!r}: {fields['policy']!r} recomputes a part of layers, ckpt0 none; leave one out"
        )
    return PartialLayout(words=text, given=frozenset(fields), **fields)


def _read(word: str, text: str) -> tuple[str, Any]:
    """Return the field that a word of a layout sets, and its value."""
    if word in _FLAGS:
        return _FLAGS[word]
    match = re.fullmatch(r"([a-z]+)([0-9]{1,9})", word)
    if match is None or match[1] not in _NUMBERED:
        letters = word.rstrip("0123456789")
        near = [*_FLAGS, *(name + (word[len(letters) :] or "1") for name in _NUMBERED)]
        hint = nearest(word, near) if letters else ""
        if word in _POLICIES:
            hint = f" As policy of recomputation it is {_POLICIES[word]!r}."
        known = [f"{name}N ({meaning})" for name, (_, meaning) in _NUMBERED.items()]
        known += ["sp (sequence parallelism)" if flag == "sp" else flag for flag in _FLAGS]
        raise ConfigError(
            f"layout {text[:200]!r}: unknown word {word[:50]!r}.{hint} Give words from {', '.join(known)}, separated "
            "by commas; N has at most 9 digits"
        )
    name, number = match[1], int(match[2])
    field, meaning = _NUMBERED[name]
    if number < 1 and name not in _FROM_ZERO:
        raise ConfigError(f"layout {text!r}: {word!r} asks for no {meaning}; give {name}1 or more, or leave it out")
    return field, number


def configuration(
    layout: Layout, base: Mapping[str, Any], bounds: Sequence[int] | None = None, live: int | None = None
) -> dict[str, Any]:
    """Return `base` with a layout's values in place of its own.

    - layout: a PartialLayout replaces only the values that it gives, and the axes.
    - bounds: the partition in layers; live: most elements of weights that are gathered with ZeRO-3.

    A complete layout without a policy that recomputes layers keeps policies by layer.

    A complete layout with ZeRO-2 or 3 reduces gradients in every micro-batch, without which gradients would take as much memory
    as unsharded ones, unless `base` sets reduce_per_micro_batch to false.
    """
    given = {*layout.given, *_AXES} if isinstance(layout, PartialLayout) else _KEYS.keys()
    config: dict[str, Any] = {key: value for key, value in base.items() if key != "train_batch_size"}
    for name, key in _KEYS.items():
        if name in given:
            section, _, last = key.rpartition(".")
            own = {last: getattr(layout, name)}
            config |= {section: {**given_section(config, section), **own}} if section else own
    if layout.units is not None or "units" in given_section(base, "pipeline"):
        config["pipeline"]["units"] = layout.units or "block"
    recomputation = given_section(base, "activation_checkpointing")
    is_by_layer = layout.recompute > 0 and isinstance(recomputation.get("policy"), Mapping)
    complete = not isinstance(layout, PartialLayout)
    if layout.policy is not None or ("policy" in recomputation and complete and not is_by_layer):
        others = {
            key: value for key, value in recomputation.items() if key != "memory_budget" or layout.policy == "auto"
        }
        config["activation_checkpointing"] = {**others, "policy": _policies(layout.policy)}
    if bounds is not None:
        config["pipeline"]["partition"] = list(bounds)
    if live is not None:
        config["zero_optimization"]["stage3_max_live_parameters"] = live
    each = given_section(config, "zero_optimization").get("reduce_per_micro_batch")
    if layout.zero >= 2 and not isinstance(layout, PartialLayout):
        config["zero_optimization"]["reduce_per_micro_batch"] = each is not False
    elif each is True and layout.zero < 2 and "zero" in given:  # stages 0 and 1 refuse it
        config["zero_optimization"]["reduce_per_micro_batch"] = "auto"
    return config


def _policies(policy: LayerPolicy | None) -> Any:
    """Return the value of activation_checkpointing.policy; by layer the most frequent one as the default."""
    if not isinstance(policy, tuple):
        return policy
    ((most, _),) = Counter(policy).most_common(1)
    return {"default": most, **{str(k): own for k, own in enumerate(policy) if own != most}}


def given_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a configuration as given; an empty one where it is absent, "auto", or true or false.

    Raises ConfigError for another value.
    """
    given = config.get(name)
    if not isinstance(given, Mapping | bool | None) and given != "auto":
        raise ConfigError(f"{name} is {reprlib.repr(given)}; give a mapping of its keys")
    return given if isinstance(given, Mapping) else {}
