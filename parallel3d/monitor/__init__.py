"""What a run shows of itself: timers, progress, metrics."""
