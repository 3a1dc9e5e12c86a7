"""Partition of the layers into stages and chunks, each of contiguous layers."""

from parallel3d.partition.chain import Partition, segment_costs
from parallel3d.partition.methods import MEASURED, Method, resolve_partition
from parallel3d.partition.split import StageLimit, partition_layers
