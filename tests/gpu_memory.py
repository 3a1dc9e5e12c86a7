"""The memory of the GPU that a test process uses."""

import gc

import torch


def release_memory() -> None:
    """Return to the device what is not used any more, and begin a new peak."""
    gc.unfreeze()  # an engine before may be among what was frozen after its steps
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
