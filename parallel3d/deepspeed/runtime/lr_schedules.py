"""`parallel3d.deepspeed.runtime.lr_schedules`, as libraries and DeepSpeed scripts name it.

Each parameter of a schedule is a constant, too: WARMUP_MIN_LR is "warmup_min_lr".
"""

from __future__ import annotations

from inspect import signature

from parallel3d.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

for _schedule in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR):
    globals().update({_name.upper(): _name for _name in signature(_schedule).parameters})
