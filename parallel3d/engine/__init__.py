"""The engine, one for all layouts."""

from parallel3d.engine.engine import Engine
