"""Timers, memory, metrics and records of a training run."""

from parallel3d.monitor.progress import MetricsFile, ProgressBar, plot_losses
