"""Layer specs: what they build, what they refuse, and how they are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.errors import PartitionError
from parallel3d.pipe.ties import TieIndex
from parallel3d.specs import (
    BuildContext,
    LayerSpec,
    TiedLayerSpec,
    blueprint,
    check_layers,
    layer_name,
)

CONTEXT = BuildContext(groups=None, device=torch.device("cpu"))


def size_of(layer: Any, context: Any) -> int:
    return sum(parameter.numel() for parameter in blueprint(layer, context).parameters())


class Aware(nn.Module):
    def __init__(self, hidden: int, context: Any = None):
        super().__init__()
        self.hidden, self.context = hidden, context


class Language(nn.Module):
    """Its context is a number of tokens."""

    def __init__(self, hidden: int, context: int = 1024):
        super().__init__()
        self.context = context


class Unaware(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.hidden = hidden


class LooksByNumPy(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.largest = float(self.inner.weight.detach().numpy().max())


class Looks(nn.Module):
    """Can't be built without memory: it looks at a value."""

    def __init__(self, hidden: int):
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.first = self.inner.weight[0, 0].item()


def double(x: Any) -> Any:
    return 2 * x


class Doubler:
    def __call__(self, x: Any) -> Any:
        return 2 * x


def test_a_spec_builds_its_layer_anew_each_time():
    spec = LayerSpec(nn.Linear, 3, 4, bias=False)
    one, two = spec.build(), spec.build()
    assert (one.in_features, one.out_features, one.bias) == (3, 4, None)
    assert one is not two
    assert not torch.equal(one.weight, two.weight)
    assert repr(spec) == "LayerSpec(Linear)"
    assert repr(TiedLayerSpec("embed", nn.Linear, 3, 4)) == "TiedLayerSpec('embed', Linear)"


def test_the_context_goes_to_classes_that_declare_it_and_have_no_value_for_it():
    assert LayerSpec(Aware, 3).build(CONTEXT).context is CONTEXT
    assert LayerSpec(Aware, 3).build().context is None
    assert LayerSpec(Aware, 3, 128).build(CONTEXT).context == 128
    assert LayerSpec(Aware, 3, context=128).build(CONTEXT).context == 128
    assert LayerSpec(Language, 3).build(CONTEXT).context == 1024
    assert LayerSpec(Unaware, 3).build(CONTEXT).hidden == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        LayerSpec(Aware, width=3).build(CONTEXT)


@pytest.mark.parametrize("typename", [nn.Linear(2, 2), double, dict, "Linear", None])
def test_a_spec_of_what_is_no_module_class_is_refused(typename: Any):
    with pytest.raises(PartitionError, match=r"LayerSpec needs a class derived from torch\.nn\.Module"):
        LayerSpec(typename)


def test_lists_of_layers_are_checked():
    check_layers([LayerSpec(nn.Linear, 1, 1), nn.ReLU(), double, Doubler(), TiedLayerSpec("a", nn.ReLU)])
    with pytest.raises(PartitionError, match="empty list"):
        check_layers([])
    with pytest.raises(PartitionError, match=r"layer 1 is the class ReLU; write LayerSpec\(ReLU"):
        check_layers([nn.ReLU(), nn.ReLU])
    with pytest.raises(PartitionError, match="layer 0 is 3; give"):
        check_layers([3])
    check_layers([double], nn.MSELoss())
    with pytest.raises(PartitionError, match=r"loss_fn is the class MSELoss; give .* such as torch.nn.MSELoss\(\)"):
        check_layers([double], nn.MSELoss)  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match="loss_fn is 'mse'; give"):
        check_layers([double], "mse")  # type: ignore[arg-type]


def test_layers_have_the_names_of_their_classes_and_functions():
    layers = [LayerSpec(nn.Linear, 1, 1), TiedLayerSpec("k", nn.ReLU), nn.Tanh(), double, Doubler(), lambda x: x]
    assert [layer_name(layer) for layer in layers] == ["Linear", "ReLU", "Tanh", "double", "Doubler", "<lambda>"]


def test_parameters_are_counted_without_building_where_that_goes():
    huge = LayerSpec(nn.Linear, 1 << 20, 1 << 20)  # 4 TiB
    assert size_of(huge, CONTEXT) == (1 << 40) + (1 << 20)
    assert size_of(LayerSpec(Looks, 3), CONTEXT) == 12
    assert size_of(LayerSpec(LooksByNumPy, 3), CONTEXT) == 12
    assert size_of(nn.Linear(3, 4), CONTEXT) == 16
    assert size_of(double, CONTEXT) == 0


def test_specs_build_alike_when_class_and_arguments_are_equal():
    tensor, other = torch.ones(3), torch.ones(3)
    assert LayerSpec(nn.Linear, 3, 4).builds_like(LayerSpec(nn.Linear, 3, 4))
    assert LayerSpec(nn.Linear, 3, 4).builds_like(TiedLayerSpec("a", nn.Linear, 3, 4, forward_fn=double))
    assert not LayerSpec(nn.Linear, 3, 4).builds_like(LayerSpec(nn.Linear, 3, 5))
    assert not LayerSpec(nn.Linear, 3, 4).builds_like(LayerSpec(nn.Linear, 3, 4, bias=False))
    assert not LayerSpec(nn.Linear, 3, 4).builds_like(LayerSpec(nn.Bilinear, 3, 4))
    assert LayerSpec(Unaware, tensor).builds_like(LayerSpec(Unaware, tensor))
    assert not LayerSpec(Unaware, tensor).builds_like(LayerSpec(Unaware, other))


# Ties. Layers 0 to 7 on chunks 0 to 3.


def index(layers: list[Any]) -> TieIndex:
    return TieIndex(layers, lambda k: k // 2)


def filler(number: int) -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 2, 2) for _ in range(number)]


def test_equal_specs_of_a_key_are_one_module_and_others_share_what_the_attribute_names():
    a = ("a", nn.Linear, 2, 2)
    ties = index(
        [TiedLayerSpec(*a), *filler(2), TiedLayerSpec(*a), *filler(3), TiedLayerSpec("a", nn.Bilinear, 2, 2, 2)]
    )
    assert ties.builder == (0, 1, 2, 0, 4, 5, 6, 7)
    assert ties.origin(7, "weight") == (0, "weight")
    assert ties.origin(7, "bias") == (7, "bias")
    assert ties.owners(0, "weight") == ties.owners(7, "weight") == (0, 1, 3)
    assert ties.owners(0, "bias") == (0, 1)
    assert ties.owners(7, "bias") == (3,)
    assert ties.owners(4, "weight") == (2,)
    assert ties.shared_owners() == [(0, 1), (0, 1, 3)]


def test_attributes_are_matched_by_their_place_and_name_submodules_whole():
    first = TiedLayerSpec("a", nn.Linear, 2, 2, tied_weight_attr=("weight", "bias"))
    last = TiedLayerSpec("a", Unaware, 2, tied_weight_attr=("inner.w", "inner.b"))
    ties = index([first, *filler(6), last])
    assert ties.origin(7, "inner.b") == (0, "bias")
    assert ties.origin(7, "inner") == (7, "inner")
    whole = [TiedLayerSpec("a", c, 2, tied_weight_attr=at) for c, at in ((Unaware, "one"), (Aware, "two"))]
    ties = index([whole[0], *filler(6), whole[1]])
    assert ties.origin(7, "two.deep.weight") == (0, "one.deep.weight")
    assert ties.owners(7, "two.deep.weight") == (0, 3)
    assert ties.origin(7, "two_other.weight") == (7, "two_other.weight")


def test_unequal_numbers_of_attributes_are_refused():
    two = TiedLayerSpec("a", nn.Bilinear, 2, 2, 2, tied_weight_attr=("weight", "bias"))
    with pytest.raises(PartitionError, match=r"layers 0 and 1 of tie 'a' .* name equally many"):
        index([TiedLayerSpec("a", nn.Linear, 2, 2), two]).origin(1, "weight")


def test_one_module_object_is_one_module_and_one_spec_object_is_not():
    module, spec = nn.Linear(2, 2), LayerSpec(nn.Linear, 2, 2)
    ties = index([module, spec, spec, module])
    assert ties.builder == (0, 1, 2, 0)
    assert ties.owners(0, "weight") == (0, 1)


def test_keys_do_not_mix():
    ties = index([TiedLayerSpec(key, nn.Linear, 2, 2) for key in "abb"])
    assert ties.builder == (0, 1, 1)
    assert ties.owners(0, "weight") == (0,)
    assert ties.owners(1, "weight") == (0, 1)
