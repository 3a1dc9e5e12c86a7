"""Parameter groups in a checkpoint: their settings, and those of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel3d.checkpoint.optimizer import describe_groups, merge_groups
from parallel3d.errors import CheckpointError


def group(name: str, place: int = 0, **settings: Any) -> dict[str, Any]:
    return {"names": [name], "settings": settings, "place": place}


def test_groups_of_one_place_and_equal_settings_are_one_in_whatever_order_the_settings_were_set() -> None:
    ranks = [[group("b", lr=0.1, eps=1e-8)], [group("a", eps=1e-8, lr=0.1)]]
    assert merge_groups(ranks) == [{"names": ["a", "b"], "settings": {"lr": 0.1, "eps": 1e-8}, "place": 0}]


def test_groups_of_other_places_or_settings_stay_apart() -> None:
    ranks = [[group("a", lr=0.1), group("b", place=1, lr=0.1)], [group("c", lr=0.2)]]
    assert [g["names"] for g in merge_groups(ranks)] == [["a"], ["b"], ["c"]]


def test_a_learning_rate_in_a_tensor_is_stored_as_a_number() -> None:
    optimizer = torch.optim.SGD([{"params": []}], lr=torch.tensor(0.25))
    (described,) = describe_groups(optimizer, [])
    assert described["settings"]["lr"] == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor([0.25, 0.5])
    with pytest.raises(CheckpointError, match="lr is a tensor of several elements"):
        describe_groups(optimizer, [])
