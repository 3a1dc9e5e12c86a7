"""Random streams that parts of a sliced tensor draw from."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from parallel3d.rng import OwnStream, OwnStreams

INPUT = (torch.zeros(1),)


def draws(index: int, training: bool = True, abandoned: bool = False) -> tuple[Tensor, Tensor]:
    """Return the numbers that a part draws in its own stream, and afterwards."""
    layer, stream = nn.Identity().train(training), OwnStream(OwnStreams(), index)
    torch.manual_seed(5)
    if abandoned:
        stream.begin(layer, INPUT)
        torch.manual_seed(5)
    stream.begin(layer, INPUT)
    own = torch.rand(4)
    stream.end(layer, INPUT)
    return own, torch.rand(4)


def test_parts_draw_apart_and_go_on_alike():
    (own, after), (other, after_other) = draws(0), draws(1)
    assert not torch.equal(own, other)
    assert torch.equal(after, after_other)
    assert not torch.equal(own, after)


def test_a_stream_that_was_not_ended_changes_nothing():
    for drawn, wanted in zip(draws(1, abandoned=True), draws(1), strict=True):
        assert torch.equal(drawn, wanted)


def test_a_copied_layer_counts_as_drawing_on_the_same_rank():
    streams = OwnStreams()
    layer, stream = nn.Identity().train(), OwnStream(streams, 0)
    layer.register_forward_hook(stream.begin)
    copy.deepcopy(layer)(*INPUT)
    assert streams.most == 1


def test_evaluation_draws_from_the_common_stream():
    torch.manual_seed(5)
    wanted = torch.rand(4), torch.rand(4)
    for drawn, other, common in zip(draws(0, training=False), draws(1, training=False), wanted, strict=True):
        assert torch.equal(drawn, common)
        assert torch.equal(other, common)
