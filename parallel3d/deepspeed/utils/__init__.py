"""Utilities at DeepSpeed's import path, `parallel3d.utils`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel3d.comm.environment import is_initialized
from parallel3d.deepspeed.utils.logging import log_dist, logger, set_log_level_from_string

if TYPE_CHECKING:
    from parallel3d.deepspeed.names import OnDevice, instrument_w_nvtx
    from parallel3d.deepspeed.whole_state import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from parallel3d.pipe.data import RepeatingLoader
    from parallel3d.zero.external import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "fragment_address",
    "get_z3_leaf_modules",
    "instrument_w_nvtx",
    "is_initialized",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


_PLACES = {
    "RepeatingLoader": "pipe.data",
    **dict.fromkeys(("OnDevice", "fragment_address", "instrument_w_nvtx"), "deepspeed.names"),
}


def __getattr__(name: str) -> Any:
    """Import what needs pipelines when it is used, because they take two seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = _PLACES.get(name, "deepspeed.whole_state" if name.startswith("safe_") else "zero.external")
    return getattr(import_module(f"parallel3d.{place}"), name)
