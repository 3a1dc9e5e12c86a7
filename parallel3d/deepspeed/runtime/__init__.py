"""`parallel3d.deepspeed.runtime`, where DeepSpeed scripts look for some functions."""

from parallel3d.deepspeed.runtime import utils
