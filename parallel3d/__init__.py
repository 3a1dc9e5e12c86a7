"""parallel3d: trains neural networks across pipeline stages, ZeRO data parallelism and tensor slices at once."""

from parallel3d import checkpointing, comm, pipe, utils
from parallel3d.arguments import add_config_arguments
from parallel3d.comm import init_distributed
from parallel3d.data import RepeatingLoader
from parallel3d.engine import Engine
from parallel3d.errors import Parallel3DError
from parallel3d.initialization import initialize
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "LayerSpec",
    "Parallel3DError",
    "PipelineModule",
    "RepeatingLoader",
    "TiedLayerSpec",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "pipe",
    "utils",
]
