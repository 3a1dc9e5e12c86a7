"""The engine: one for every layout; see Engine."""

from parallel3d.engine.engine import Engine

__all__ = ["Engine"]
