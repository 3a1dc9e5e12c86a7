"""Layers -> stages and chunks: which contiguous layers each part of a pipeline holds."""

from parallel3d.partition.chain import Partition, segment_costs
from parallel3d.partition.methods import MEASURED, Method, resolve_partition
from parallel3d.partition.split import StageLimit, partition_layers
