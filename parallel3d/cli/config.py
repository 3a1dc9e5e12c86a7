"""`p3d config`: explain a configuration, print the table of keys or the JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.config import BatchSizes, Config, batch_sizes, read
from parallel3d.config.batch import ACCUMULATION, MICRO, TRAIN
from parallel3d.config.files import parse_yaml
from parallel3d.config.load import Reading
from parallel3d.config.section import Section, Support, dumped, section_of, shown_default, what_to_give
from parallel3d.errors import ConfigError

# Origins of values that are not given.
DEFAULT, DERIVED, OF_MODULE = "default", "derived", "argument of PipelineModule"
_ALREADY = "in effect already"


def run(options: argparse.Namespace) -> int:
    """Run `p3d config`. Raises ConfigError for a wrong option or configuration."""
    if options.schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    elif options.keys:
        print(keys_as_markdown(), end="")
    elif options.file is None:
        raise ConfigError("give a configuration file and --world N, the number of ranks; or --keys, or --schema")
    else:
        reading = read(options.file, _parse_autos(options.auto))
        check_names(reading.config)
        if options.world is None:
            raise ConfigError(f"{options.file} can be read; give --world N, the number of ranks, to have it explained")
        show(explain(reading, options.world, options.pp))
    return 0


def check_names(config: Config) -> None:
    """Raise ConfigError for an optimizer or a learning-rate schedule that `initialize` doesn't know, or can't make."""
    if config.optimizer is None and config.scheduler is None:
        return
    from parallel3d.optim.optimizers import empty_optimizer  # imports torch
    from parallel3d.optim.schedules import scheduler_class

    if config.optimizer is not None:
        empty_optimizer(config.optimizer.type, config.optimizer.params)
    if config.scheduler is not None:
        scheduler_class(config.scheduler.type)


def _parse_autos(pairs: Sequence[str]) -> dict[str, Any]:
    autos = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--auto is {pair!r}; give KEY=VALUE, such as optimizer.params.lr=1e-4")
        autos[key] = parse_yaml(text, f"--auto {pair}")
    return autos


class Entry(NamedTuple):
    """A value by its dotted key, with its origin if it is in force, or the reason why it was left out."""

    path: str
    value: Any
    why: str


@dataclass(frozen=True)
class Explanation:
    """Explanation of a configuration for a world of data x pipe x model ranks."""

    values: tuple[Entry, ...]
    left_out: tuple[Entry, ...]
    sizes: BatchSizes
    pipe: int
    data: int
    model: int


def explain(reading: Reading, world: int, pipe: int | None = None) -> Explanation:
    """Explain a configuration for `world` ranks in pipelines of `pipe` stages (default: pipeline.stages, or 1).

    Raises ConfigError where ranks or batch sizes don't divide, or `pipe` is not pipeline.stages.
    """
    config = reading.config
    stages, model = config.pipeline.stages, config.tensor_parallel.size or 1
    if pipe is not None and stages is not None and pipe != stages:
        raise ConfigError(f"--pp is {pipe}, but pipeline.stages is {stages}; make the two equal or drop one")
    pipe = pipe or stages or 1
    if world % (pipe * model):
        raise ConfigError(
            f"{world} ranks can't be {pipe} stages x {model} tensor-parallel ranks x dp; give a multiple of {pipe * model} "
            "ranks, or another number of stages"
        )
    data = world // (pipe * model)
    sizes = batch_sizes(config, pipe=pipe, data=data, model=model)
    derived = {
        TRAIN: sizes.train_batch_size,
        MICRO: sizes.micro_batch_size,
        ACCUMULATION: sizes.num_micro_batches,
        "pipeline.stages": pipe,
        "data_types.grad_accum_dtype": "fp32",
        "communication_data_type": config.data_types.grad_accum_dtype or "fp32",
    }
    values = tuple(_values(config, "", reading.origins, derived))
    return Explanation(values, tuple(_left_out(reading)), sizes, pipe, data, model)


def _values(section: Section, path: str, origins: Mapping[str, str], derived: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield the fields of a section; if it is not enabled, only `enabled`."""
    off = getattr(section, "enabled", True) is False
    for name in ["enabled"] if off else type(section).model_fields:
        value, where = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            yield from _values(value, f"{where}.", origins, derived)
        elif name == "params":
            yield from (Entry(f"{where}.{k}", v, origins.get(f"{where}.{k}", DEFAULT)) for k, v in value.items())
        elif value is None and where in derived:
            yield Entry(where, derived[where], DERIVED)
        elif value is None and path == "pipeline." and name != "max_in_flight":
            yield Entry(where, value, OF_MODULE)
        else:
            yield Entry(where, value, origins.get(where, DEFAULT))


def _left_out(reading: Reading) -> list[Entry]:
    """Return the keys that were left out, and then those that are in effect already."""
    entries = [
        Entry(path, value, _ALREADY if key.asks_nothing(value) else f"{key.support.value}: {key.reason}")
        for path, (key, value) in reading.left_out.items()
    ]
    return sorted(entries, key=lambda entry: entry.why == _ALREADY)


def show(explanation: Explanation) -> None:
    """Print an explanation as tables, and the batch arithmetic."""
    tables = (("In force", "from", explanation.values), ("Left out, or in effect already", "why", explanation.left_out))
    for title, why, values in tables:
        columns = (Column(name, overflow="fold") for name in ("key", "value", why))
        table = Table(*columns, title=title, title_justify="left")
        for value in values:
            style = "dim" if value.why in (DEFAULT, OF_MODULE) else ""
            shown = escape(json.dumps(dumped(value.value)))  # rich would read brackets as markup
            table.add_row(value.path, shown, value.why, style=style)
        if values:
            Console().print(table)
    sizes, pipe, data, model = explanation.sizes, explanation.pipe, explanation.data, explanation.model
    print(
        f"world = tp x pp x dp = {model} x {pipe} x {data} = {model * pipe * data} ranks\n"
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp\n"
        f"{sizes.train_batch_size} = {sizes.micro_batch_size} x {sizes.num_micro_batches} x {data} samples a step"
    )


def keys_as_markdown() -> str:
    """Return the table of all keys, by status, in Markdown."""
    rows = list(_key_rows(Config, ""))
    lines = [
        "# Every configuration key",
        "",
        "Made from the schema by `p3d config --keys`. [configuration.md](configuration.md) is the guide.",
    ]
    for support in Support:
        lines += ["", f"## {support.heading}", "", "| key | default | |", "|---|---|---|"]
        lines += [row for kind, row in rows if kind is support]
    return "\n".join(lines) + "\n"


def _key_rows(section: type[Section], path: str) -> Iterator[tuple[Support, str]]:
    """Yield (how it is handled, row of the table) of each key of a section and of the sections inside."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _key_rows(inner, f"{path}{name}.")
            continue
        marks: Any = field.json_schema_extra or {}
        difference = marks.get("difference")
        status = Support.DIFFERENT if difference else Support.SUPPORTED
        meaning = what_to_give(field) + (f"; {difference}" if difference else "")
        yield Support.OWN if marks.get("own") else status, _row(f"{path}{name}", shown_default(field), meaning)
    for old, new in section.renamed.items():
        yield Support.OLD_NAME, _row(f"{path}{old}", "", f"of `{path}{new}`")
    for name, key in section.known_keys.items():
        inside = f"; its keys: {', '.join(key.inner)}" if key.inner else ""
        yield key.support, _row(f"{path}{name}", "", key.reason + inside)


def _row(path: str, default: str, meaning: str) -> str:
    shown, escaped = f"`{default}`" if default else "", meaning.replace("|", "\\|")
    return f"| `{path}` | {shown} | {escaped} |"
