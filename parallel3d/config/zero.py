"""The zero_optimization section."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from parallel3d.config.known_keys import keys_of
from parallel3d.config.section import NonNegative, Positive, Section, key, own_key

STAGE_3_AS_2 = (
    "trains as stage 2: the same numbers, but each rank holds the weights of its whole pipeline stage (2 bytes a parameter "
    "in half precision, 4 in fp32); if they don't fit, split the model over more stages"
)


class ZeroConfig(Section):
    """Partitioning over the data-parallel ranks, and the buckets of gradients."""

    known_keys = keys_of("zero_optimization")
    unset_by_auto = frozenset({"reduce_per_micro_batch", "reduce_bucket_size", "allgather_bucket_size"})

    stage: NonNegative = key(0, "0, 1, 2 or 3", differs="stage 3 trains as stage 2, with a warning", le=3)
    reduce_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    allgather_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    reduce_per_micro_batch: bool | Literal["auto"] = own_key("auto", 'true, false or "auto"')

    @property
    def effective_stage(self) -> int:
        """The stage that runs: 3 trains as 2."""
        return min(self.stage, 2)

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if self.reduce_per_micro_batch is True and self.stage < 2:
            raise ValueError(
                f"reduce_per_micro_batch needs partitioned gradients, but stage is {self.stage}; set stage to 2, or "
                'reduce_per_micro_batch to "auto"'
            )
        return self
