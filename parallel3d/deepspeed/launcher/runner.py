"""`deepspeed.launcher.runner`, as accelerate and scripts name it."""

import base64
import json
from collections.abc import Mapping

from parallel3d.launcher.deepspeed import DEEPSPEED_ENVIRONMENT_NAME, main, parse_args
from parallel3d.launcher.hosts import parse_hostfile, parse_resource_filter

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "encode_world_info", "main", "parse_args", "parse_resource_filter"]

_parse_hostfile = parse_hostfile


def encode_world_info(world_info: Mapping[str, object]) -> str:
    """Return the base64 of the hosts and their slots as JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
