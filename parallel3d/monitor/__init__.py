"""Timers, memory, metrics and records of a training run."""
