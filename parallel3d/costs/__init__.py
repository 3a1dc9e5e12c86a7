"""Costs of a layer: one operator counter, one layer tracer, one stopwatch."""
