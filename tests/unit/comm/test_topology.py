"""The topology against DeepSpeed's documented answers and against a brute-force enumeration of all coordinates."""

from __future__ import annotations

import pickle
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from parallel3d.errors import TopologyError

THREE_AXES = ProcessTopology(axes=["pipe", "data", "model"], dims=[2, 2, 2])
topologies = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda dims: ProcessTopology(["pipe", "data", "model", "expert"][: len(dims)], dims)
)


def coordinates(topology: ProcessTopology) -> list[dict[str, int]]:
    """The coordinate of each rank, by enumeration: the last axis varies fastest."""
    ranges = [range(dim) for dim in topology.dims]
    return [dict(zip(topology.axes, indices, strict=True)) for indices in product(*ranges)]


def test_2x2_ranks_and_axis_lists() -> None:
    topology = ProcessTopology(axes=["row", "col"], dims=[2, 2])
    assert topology.world_size() == 4
    assert [topology.get_rank(row=r, col=c) for r, c in [(0, 0), (0, 1), (1, 0), (1, 1)]] == [0, 1, 2, 3]
    assert topology.get_axis_list(axis="row", idx=0) == [0, 1]
    assert topology.get_axis_list(axis="row", idx=1) == [2, 3]
    assert topology.get_axis_list(axis="col", idx=0) == [0, 2]
    assert topology.get_axis_list(axis="col", idx=1) == [1, 3]


def test_2x2x2_coordinates_and_filters() -> None:
    assert THREE_AXES.get_rank(pipe=1, data=0, model=1) == 5
    assert THREE_AXES.get_coord(6) == THREE_AXES.ProcessCoord(1, 1, 0)
    assert THREE_AXES.get_coord(6).data == 1
    assert THREE_AXES.filter_match(pipe=0, data=1) == [2, 3]
    assert THREE_AXES.filter_match(data=1, model=1) == [3, 7]
    assert THREE_AXES.filter_match() == list(range(8))


def test_2x2x2_comm_lists() -> None:
    assert THREE_AXES.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert THREE_AXES.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert THREE_AXES.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_unknown_axis_has_dim_0_and_no_groups() -> None:
    assert THREE_AXES.get_dim("expert") == 0
    assert THREE_AXES.get_axis_comm_lists("expert") == []


def test_unequal_dims() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4])
    assert topology.world_size() == 24
    assert [topology.get_dim(axis) for axis in topology.get_axis_names()] == [2, 3, 4]
    assert topology.get_rank(a=1, b=2, c=3) == 23
    assert topology.get_axis_list("b", 1) == [4, 5, 6, 7, 16, 17, 18, 19]


def test_rank_repr() -> None:
    topology = ProcessTopology(axes=["a", "b"], dims=[2, 2])
    assert [topology.get_rank_repr(rank) for rank in range(4)] == ["a_00-b_00", "a_00-b_01", "a_01-b_00", "a_01-b_01"]
    assert topology.get_rank_repr(rank=3, inner_sep="+", outer_sep="/") == "a+01/b+01"
    assert topology.get_rank_repr(rank=3, omit_axes=["a"]) == "b_01"
    assert THREE_AXES.get_rank_repr(7) == "model_01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3, omit_axes=[]) == "pipe_01-data_01"


def test_named_topologies() -> None:
    assert PipeDataParallelTopology(num_pp=2, num_dp=3) == ProcessTopology(["pipe", "data"], [2, 3])
    tensor_last = PipeModelDataParallelTopology(num_pp=2, num_mp=4, num_dp=3)
    assert tensor_last == ProcessTopology(["pipe", "data", "model"], [2, 3, 4])


def test_equality_hash_text_and_pickle() -> None:
    topology = PipeDataParallelTopology(2, 3)
    assert len({topology, ProcessTopology(("pipe", "data"), (2, 3))}) == 1
    assert topology != ProcessTopology(["data", "pipe"], [2, 3])
    assert topology != "pipe=2 x data=3"
    assert str(topology) == "pipe=2 x data=3 (6 ranks)"
    assert repr(topology) == "ProcessTopology(axes=['pipe', 'data'], dims=[2, 3])"
    assert pickle.loads(pickle.dumps(topology)).get_coord(4) == (1, 1)


def test_it_is_immutable() -> None:
    topology = PipeDataParallelTopology(2, 3)
    topology.get_axis_names().append("model")
    assert topology.get_axis_names() == ["pipe", "data"]
    with pytest.raises(AttributeError):
        topology.dims = (1, 1)


@settings(deadline=None)
@given(topologies)
def test_rank_and_coordinate_are_inverse(topology: ProcessTopology) -> None:
    for rank, coord in enumerate(coordinates(topology)):
        assert topology.get_coord(rank)._asdict() == coord
        assert topology.get_rank(**coord) == rank
    assert topology.world_size() == len(coordinates(topology))


@settings(deadline=None)
@given(topologies)
def test_comm_lists_partition_the_world_into_ranks_that_differ_along_one_axis(topology: ProcessTopology) -> None:
    world = coordinates(topology)
    for axis in topology.axes:
        groups = topology.get_axis_comm_lists(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(len(world)))
        assert groups == sorted(groups)
        for group in groups:
            assert [world[rank][axis] for rank in group] == list(range(topology.get_dim(axis)))
            assert len({tuple(i for a, i in world[rank].items() if a != axis) for rank in group}) == 1


@settings(deadline=None)
@given(topologies, st.dictionaries(st.sampled_from(["pipe", "data", "model", "expert"]), st.integers(-1, 4)))
def test_filters_agree_with_a_scan(topology: ProcessTopology, wanted: dict[str, int]) -> None:
    wanted = {axis: index for axis, index in wanted.items() if axis in topology.axes}
    scan = [rank for rank, coord in enumerate(coordinates(topology)) if wanted.items() <= coord.items()]
    assert topology.filter_match(**wanted) == scan
    for axis, index in wanted.items():
        expected = [rank for rank, coord in enumerate(coordinates(topology)) if coord[axis] == index]
        assert topology.get_axis_list(axis, index) == expected


def test_dims_may_be_numpys_integers() -> None:
    topology = ProcessTopology(["pipe", "data"], numpy.array([2, 3]))
    assert topology == ProcessTopology(["pipe", "data"], [2, 3])
    assert repr(topology.get_coord(4)) == "ProcessCoord(pipe=1, data=1)"


def test_a_large_world_is_not_enumerated() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [1 << 20, 1 << 20, 1 << 20])
    rank = topology.get_rank(pipe=5, data=6, model=7)
    assert rank == (5 << 40) + (6 << 20) + 7
    assert topology.get_coord(rank) == (5, 6, 7)
    assert topology.filter_match(pipe=5, data=6, model=7) == [rank]


@pytest.mark.parametrize(
    ("coord", "message"),
    [
        ({"pipe": 0}, r"get_rank\(pipe=0\) lacks data, model: .*pipe=2 x data=2 x model=2.*filter_match\(pipe=0\)"),
        ({"pipe": 0, "data": 0, "modle": 0}, r"no axis 'modle' in pipe=2 .*Did you mean 'model'\?"),
        ({"pipe": 0, "data": 2, "model": 0}, r"data=2 is outside pipe=2 .*from 0 to 1"),
        ({"pipe": -1, "data": 0, "model": 0}, r"pipe=-1 is outside"),
        ({"pipe": "0", "data": 0, "model": 0}, r"pipe='0' is outside"),
    ],
)
def test_a_coordinate_that_is_not_in_the_world(coord: dict[str, int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        THREE_AXES.get_rank(**coord)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_in_the_world(rank: int) -> None:
    with pytest.raises(TopologyError, match=rf"rank {rank} is outside .*\(8 ranks\); ranks go from 0 to 7"):
        THREE_AXES.get_coord(rank)


def test_filters_on_an_unknown_axis() -> None:
    with pytest.raises(TopologyError, match=r"no axis 'pipes' in .* Did you mean 'pipe'\?"):
        THREE_AXES.filter_match(pipes=0)
    with pytest.raises(ValueError, match=r"no axis 'expert'"):  # ValueError is what DeepSpeed raises
        THREE_AXES.get_axis_list("expert", 0)


@pytest.mark.parametrize(
    ("axes", "dims", "message"),
    [
        (["pipe", "data"], [2, 0], r"axis 'data' has dim 0; set it to a whole number of ranks, 1 or more"),
        (["pipe", "data"], [2, -4], r"axis 'data' has dim -4"),
        (["pipe", "data"], [2.0, 2], r"axis 'pipe' has dim 2\.0"),
        (["pipe", "data"], [2, True], r"axis 'data' has dim True"),
        (["pipe", "data"], [2], r"2 axes \['pipe', 'data'\] but 1 dims \[2\]"),
        (["pipe", "pipe"], [2, 2], r"axes \['pipe', 'pipe'\] repeat a name"),
        (["pipe", "data parallel"], [2, 2], r"axis 'data parallel' can't be a keyword argument"),
        (["pipe", 3], [2, 2], r"axis 3 can't be a keyword argument"),
    ],
)
def test_axes_and_dims_that_describe_no_world(axes: list[str], dims: list[int], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        ProcessTopology(axes, dims)
