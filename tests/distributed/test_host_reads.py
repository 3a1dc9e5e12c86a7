"""A step asks no tensor for its value, on which a GPU would make the host wait; fp16's asks for one flag."""

from __future__ import annotations

from typing import Any

import pytest
from host_reads import LAYOUTS, PRECISIONS, READS, data, decoder_data, make, make_decoder
from torch.utils._python_dispatch import TorchDispatchMode

# What copies a value, or a shape that depends on values, to the host.
READING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


class Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in READING:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def read_in_a_step(layout: str, precision: str) -> list[str]:
    engine, iterator = (
        (make_decoder(precision), decoder_data()) if layout == "decoder" else (make(layout, precision), data())
    )
    engine.train_batch(iterator)
    with Reads() as reads:
        engine.train_batch(iterator)
    return reads.names


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "decoder"])
def test_a_step_reads_no_value_but_fp16s_flag(run_ranks, layout: str, precision: str):
    num_ranks = LAYOUTS[layout][0] if layout in LAYOUTS else 2
    wanted = ["_local_scalar_dense"] * READS[precision]
    assert run_ranks(num_ranks, read_in_a_step, layout, precision) == [wanted] * num_ranks
