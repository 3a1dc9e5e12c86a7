"""Parser of this package's commands, and of numbers in them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from parallel3d import __version__


class Parser(argparse.ArgumentParser):
    """Parser whose long options may be written with - or _."""

    def add_version(self) -> None:
        """Add --version, which prints the command's name and the package's version."""
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")

    def add_number(self, *names: str, noun: str, least: int = 1, most: float = inf, **options: Any) -> None:
        """Add an option that takes an integer from `least` to `most`. noun: describes it in errors."""
        self.add_argument(*names, type=integer(noun, least, most), **{"metavar": "N", **options})

    # Ignored: argparse declares one signature for each type of `namespace`.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, with - and _ in long options alike; parse_args and subcommands' parsers call it, too."""
        known = self._option_string_actions
        for option, action in list(known.items()):
            if option.startswith("--"):
                for spelt in (option[2:].replace("_", "-"), option[2:].replace("-", "_")):
                    known.setdefault(f"--{spelt}", action)
        return super().parse_known_args(args, namespace)


def integer(noun: str, least: int, most: float = inf) -> Callable[[str], int]:
    """Return the type of an option that takes an integer from `least` to `most`. noun: describes it in errors."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            limits = f"of at least {least}" if most == inf else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}: give an integer {limits}")
        return int(text)

    return parse
