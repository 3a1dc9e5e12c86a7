"""What a run shows of itself: timers, progress, metrics."""

from parallel3d.monitor.progress import MetricsFile, ProgressBar, plot_losses

__all__ = ["MetricsFile", "ProgressBar", "plot_losses"]
