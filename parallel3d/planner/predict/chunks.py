"""Split of a layout's layers over its chunks."""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.layout import Layout


@dataclass(frozen=True)
class Chunks:
    """Layers of a layout's chunks: chunk c is on stage placement[c], and has layers bounds[c] to bounds[c + 1]."""

    layout: Layout
    placement: tuple[int, ...]
    bounds: tuple[int, ...]

    @staticmethod
    def one(layout: Layout, num_layers: int) -> Chunks:
        """Return all layers as one chunk."""
        return Chunks(layout, (0,), (0, num_layers))

    def span(self, chunk: int) -> range:
        """Return the layers of a chunk."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def on_stage(self, stage: int) -> list[int]:
        """Return the chunks of a stage."""
        return [chunk for chunk, own in enumerate(self.placement) if own == stage]

    def layers_on(self, stage: int) -> list[int]:
        """Return the layers of a stage."""
        return [layer for chunk in self.on_stage(stage) for layer in self.span(chunk)]
