"""How a shard is cut into messages: none takes more than a slot, and they are few."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from parallel3d.tensor_parallel.shard_products import rows_of_message


@given(st.integers(1, 10_000), st.integers(1, 70_000), st.integers(1, 1 << 20))
@example(rows=5, row_bytes=10, most_bytes=26)  # 2.6 rows a slot: two messages of 3 and 2 rows would not fit
def test_messages_fit_a_slot_and_are_as_few_as_can_be(rows: int, row_bytes: int, most_bytes: int) -> None:
    length = rows_of_message(rows, row_bytes, most_bytes)
    assert 1 <= length <= rows
    assert length == 1 or length * row_bytes <= most_bytes
    fitting = max(1, most_bytes // row_bytes)
    messages = -(-rows // length)
    assert (messages - 1) * fitting < rows, "one message less would do"
