"""Entry of another chunk's tensors into the autograd graph."""

from __future__ import annotations

import gc
import weakref

import torch

from parallel3d.autograd.entry import Entry


def test_gradients_arrive_and_are_zeros_where_the_backward_did_not_come():
    used, unused = torch.ones(2, 3), torch.ones(4, dtype=torch.float64)
    entry = Entry([used, unused])
    (used * 3).sum().backward()
    first, second = entry.gradients()
    assert torch.equal(first, torch.full((2, 3), 3.0))
    assert torch.equal(second, torch.zeros(4, dtype=torch.float64))


def test_an_input_lives_no_longer_than_the_chunk_holds_it():
    """A recomputed region may then keep its only copy on the host."""
    tensor = torch.ones(3)
    entry, reference = Entry([tensor]), weakref.ref(tensor)
    y = tensor + 1
    del tensor
    gc.collect()
    assert reference() is None
    y.sum().backward()
    assert torch.equal(entry.gradients()[0], torch.ones(3))
