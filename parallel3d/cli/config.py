"""`p3d config`: explain a configuration, print the table of keys or the JSON schema."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.config import Config, read
from parallel3d.config.explain import DEFAULT, OF_MODULE, Explanation, explain, keys_as_markdown
from parallel3d.config.files import parse_yaml
from parallel3d.config.section import dumped
from parallel3d.errors import ConfigError


def add_command(commands: Any) -> None:
    """Add `config` to the subcommands of an argparse parser."""
    parser = commands.add_parser(
        "config",
        help="explain a configuration",
        description="Explain a configuration: every value in force and where it comes from, what is left out and why, and the "
        "batch arithmetic.",
    )
    parser.add_argument(
        "file", nargs="?", help="configuration file: JSON with comments, Hjson or YAML; or base64 of JSON"
    )
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline stages (default: pipeline.stages, or 1)")
    parser.add_argument(
        "--auto",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='value of a key that is "auto", such as optimizer.params.lr=1e-4; may be repeated',
    )
    parser.add_argument("--keys", action="store_true", help="print the table of all keys in Markdown, and nothing else")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema, and nothing else")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.schema:
        print(json.dumps(Config.model_json_schema(), indent=2))
    elif options.keys:
        print(keys_as_markdown(), end="")
    elif options.file is None or options.world is None:
        raise ConfigError("give a configuration file and --world N, the number of ranks; or --keys, or --schema")
    elif options.world < 1 or (options.pp is not None and options.pp < 1):
        raise ConfigError(f"--world is {options.world} and --pp is {options.pp}; give whole numbers >= 1")
    else:
        reading = read(options.file, _parse_autos(options.auto))
        show(explain(reading, options.world, options.pp))
    return 0


def _parse_autos(pairs: Sequence[str]) -> dict[str, Any]:
    autos = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--auto is {pair!r}; give KEY=VALUE, such as optimizer.params.lr=1e-4")
        autos[key] = parse_yaml(text, f"--auto {pair}")
    return autos


def show(explanation: Explanation) -> None:
    """Print an explanation as tables, and the batch arithmetic."""
    tables = (("In force", "from", explanation.values), ("Left out, or as it is anyway", "why", explanation.left_out))
    for title, why, values in tables:
        columns = (Column(name, overflow="fold") for name in ("key", "value", why))
        table = Table(*columns, title=title, title_justify="left")
        for value in values:
            style = "dim" if value.why in (DEFAULT, OF_MODULE) else ""
            table.add_row(value.path, _json(value.value), value.why, style=style)
        if values:
            Console().print(table)
    sizes, pipe, data, model = explanation.sizes, explanation.pipe, explanation.data, explanation.model
    print(
        f"world = tp x pp x dp = {model} x {pipe} x {data} = {model * pipe * data} ranks\n"
        "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp\n"
        f"{sizes.train_batch_size} = {sizes.micro_batch_size} x {sizes.num_micro_batches} x {data} samples a step"
    )


def _json(value: object) -> str:
    """Return a value as JSON, in which brackets are no markup of rich's."""
    return escape(json.dumps(dumped(value)))
