"""Pipelines: PipelineModule, layer specs, and the topology classes, as in `deepspeed.pipe`."""

from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from parallel3d.pipe.module import PipelineModule
from parallel3d.specs import BuildContext, LayerSpec, TiedLayerSpec
