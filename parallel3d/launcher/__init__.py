"""The command `parallel3d`: starts a script once per rank on this node. Also `python -m parallel3d.launcher`."""

from parallel3d.launcher.cli import main

__all__ = ["main"]
