"""Gradient buckets, and the sharding of weights, gradients and optimizer state over data-parallel ranks (arXiv:1910.02054)."""

from parallel3d.zero.external import register_external_parameter, unregister_external_parameter
from parallel3d.zero.gathered import GatheredParameters
from parallel3d.zero.init import Init
from parallel3d.zero.weights import WeightState as ZeroParamStatus
