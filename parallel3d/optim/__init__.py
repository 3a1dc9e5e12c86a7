"""Optimizers and learning-rate schedules by the names that configurations use."""

from parallel3d.optim.lion import Lion
from parallel3d.optim.optimizers import build_optimizer
from parallel3d.optim.schedules import build_scheduler
