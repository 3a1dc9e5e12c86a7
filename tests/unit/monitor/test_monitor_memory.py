"""Live storages are those that operations made and that something still holds."""

from __future__ import annotations

import torch

from parallel3d.monitor.memory import LiveStorages


def test_what_operations_made_counts_while_it_lives():
    weight = torch.ones(100, requires_grad=True)
    with LiveStorages() as storages:
        kept = weight * 2
        assert storages.nbytes == 400
        view = kept.view(10, 10)[2:]
        assert storages.nbytes == 400
        loss = (kept.exp() + 1).sum()  # exp's result is saved for its backward
        assert storages.nbytes == 804
        loss.backward()
        assert weight.grad is not None
        assert storages.nbytes == 400 + 4 + 400  # kept, the loss and the gradient
        del kept
        assert storages.nbytes == 804
        del view
        assert storages.nbytes == 404
    assert storages.peak >= 1200


def test_storages_from_outside_do_not_count():
    weight = torch.ones(100)
    with LiveStorages() as storages:
        views = [weight.view(10, 10), weight[:5], weight.add_(1)]
        assert storages.nbytes == 0
    assert len(views) == 3
