"""What the server of fork_server.py imports for all of its processes."""

import importlib
from contextlib import suppress
from threading import RLock

import layouts
import layouts3d
import torch

names = ["torch._dynamo", "parallel3d.parity.check", "pytest", "ranks", "planned_memory"]
if not torch.backends.cuda.is_built():  # these look for CUDA, which no fork can use after that
    names += ["torch._inductor.compile_fx", "warm_transformers", "sklearn.datasets"]
for name in names:
    with suppress(ImportError):  # not all are always installed
        importlib.import_module(name)
with suppress(ImportError):  # a killed rank would leave behind the semaphore of tqdm's own lock
    importlib.import_module("tqdm").tqdm.set_lock(RLock())
layouts.all_pairs()  # which are kept, and which each of xdist's workers asks for
layouts3d.cover(max_ranks=8)
