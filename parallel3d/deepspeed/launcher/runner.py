"""`deepspeed.launcher.runner`, as accelerate and scripts name it."""

from parallel3d.launcher.deepspeed import DEEPSPEED_ENVIRONMENT_NAME, main, parse_args
from parallel3d.launcher.hosts import parse_hostfile, parse_resource_filter

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main", "parse_args", "parse_resource_filter"]

_parse_hostfile = parse_hostfile
