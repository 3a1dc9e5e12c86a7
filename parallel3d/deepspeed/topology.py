"""`deepspeed.runtime.pipe.topology`, as DeepSpeed scripts name it."""

from sympy import factorint

from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from parallel3d.errors import TopologyError

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineParallelGrid", "ProcessTopology"]


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number >= 1, each as often as it divides the number."""
    if number < 1:
        raise TopologyError(f"{number} has no prime factors; give a whole number >= 1")
    factors: list[int] = factorint(number, multiple=True)
    return factors
