"""`python -m parallel3d.cli` is the command `p3d`."""

from parallel3d.cli import command

command()
