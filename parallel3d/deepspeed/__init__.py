"""DeepSpeed's import paths: `parallel3d.utils` is parallel3d.deepspeed.utils, and so on for each module here."""

import sys
from importlib import import_module

_OPS = ("ops", "ops.adagrad", "ops.adam", "ops.lion")
_RUNTIME = ("runtime", "runtime.lr_schedules", "runtime.utils")
for _name in ("accelerator", "arguments", "checkpointing", *_OPS, *_RUNTIME, "utils", "utils.logging"):
    sys.modules[f"parallel3d.{_name}"] = import_module(f"parallel3d.deepspeed.{_name}")
