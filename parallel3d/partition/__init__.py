"""Partition of the layers into stages and chunks, each of contiguous layers."""

from parallel3d.partition.chain import Partition, segment_costs
from parallel3d.partition.split import MEASURED, Method, StageLimit, partition_layers, resolve_partition
