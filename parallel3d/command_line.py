"""Parser of this package's commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from parallel3d import __version__


class Parser(argparse.ArgumentParser):
    """Parser whose long options may be written with - or _."""

    def add_version(self) -> None:
        """Add --version, which prints the command's name and the package's version."""
        self.add_argument("--version", action="version", version=f"{self.prog} {__version__}")

    # Ignored: argparse declares one signature for each type of `namespace`.
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, which parse_args and the parsers of subcommands call too."""
        known = self._option_string_actions
        for option, action in list(known.items()):
            if option.startswith("--"):
                for spelt in (option[2:].replace("_", "-"), option[2:].replace("-", "_")):
                    known.setdefault(f"--{spelt}", action)
        return super().parse_known_args(args, namespace)
