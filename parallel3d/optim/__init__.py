"""Optimizers and learning-rate schedules by the names that configurations use."""

from parallel3d.optim.optimizers import Lion, build_optimizer
from parallel3d.optim.schedules import build_scheduler
