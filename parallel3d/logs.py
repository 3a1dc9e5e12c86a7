"""The package's logger, "parallel3d", to which all that a training prints goes."""

from __future__ import annotations

import logging
import sys


class _Console(logging.Handler):
    """Prints to sys.stdout as it is at the time, warnings and errors to sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)


logger = logging.getLogger("parallel3d")
# As in DeepSpeed: messages are shown even if the script doesn't configure logging, and only once if it does.
logger.propagate = False
logger.setLevel(logging.INFO)
logger.addHandler(_Console())
