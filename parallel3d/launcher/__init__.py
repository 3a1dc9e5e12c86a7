"""Command `parallel3d`, also `python -m parallel3d.launcher`: starts a script once per rank on this node."""

from parallel3d.launcher.cli import main
