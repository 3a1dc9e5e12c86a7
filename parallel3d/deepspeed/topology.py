"""`deepspeed.runtime.pipe.topology`, as DeepSpeed scripts name it."""

from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]
