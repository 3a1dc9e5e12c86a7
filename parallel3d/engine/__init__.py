"""The engine: one class for all layouts."""

from parallel3d.engine.engine import Engine
