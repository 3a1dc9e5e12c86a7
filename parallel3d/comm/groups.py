"""Process groups of a topology, and DeepSpeed's view of them (`engine.grid`)."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from parallel3d.activity import Activity
from parallel3d.comm.collectives import Group, ImaginedGroup, Work
from parallel3d.comm.environment import get_world_size, init_distributed, world_backend
from parallel3d.comm.topology import ProcessTopology, pipelines_of
from parallel3d.errors import CommunicationError, TopologyError
from parallel3d.membership import PROOF_BYTES, TOKEN, proof
from parallel3d.rng import OwnStreams


class ProcessGroups:
    """The groups that this rank belongs to. Every rank must make them from the same topology at the same place.

    - world: all ranks; control: all ranks, on the CPU, for the few integers that ranks agree on before a batch.
    - pipe, data, model: the ranks along each axis, this one included.
    - activity: records what this process does, for all of its groups.
    - own_streams: random streams of this rank's shards, for all of its groups.

    Raises TopologyError if the topology doesn't fit the world.
    """

    def __init__(self, topology: ProcessTopology):
        init_distributed()
        self.topology = topology
        self.rank = dist.get_rank()
        world_size = dist.get_world_size()
        if topology.world_size() != world_size:
            sizes = " x ".join(f"{axis} {topology.get_dim(axis)}" for axis in topology.get_axis_names())
            raise TopologyError(
                f"the topology {sizes} = {topology.world_size()} ranks does not fit a world of {world_size}; "
                f"start {topology.world_size()} processes or change the axes"
            )
        self.activity, self.own_streams = Activity(), OwnStreams()
        self._mapped = WeakIdKeyDictionary()
        everyone = tuple(range(world_size))
        world, control = (None, None) if world_size == 1 else (dist.group.WORLD, dist.new_group(backend="gloo"))
        for handle in (world if self.backend == "gloo" else None, control):
            if handle is not None:
                prove_membership(handle)
        self.world, self.control = self._group(everyone, world), self._group(everyone, control)
        self.pipe = self._axis("pipe")
        self.data = self._axis("data")
        self.model = self._axis("model")

    def count_mapped(self, memory: Tensor) -> None:
        """Count memory that ranks of these groups map, for as long as it lives: torch.cuda.memory_allocated leaves it out."""
        self._mapped[memory] = None

    def mapped_bytes(self) -> int:
        """Return how many bytes of this process's device are counted by `count_mapped`."""
        return sum(memory.numel() for memory in self._mapped)

    def __deepcopy__(self, memo: object) -> ProcessGroups:
        """Return these groups: a copy of a model communicates with the same ranks."""
        return self

    @property
    def backend(self) -> str:
        """Name of the backend: 'nccl' or 'gloo'."""
        return world_backend()

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Return the position of a rank (default: this one) along an axis; 0 if the topology doesn't have the axis."""
        coord = self.topology.get_coord(self.rank if rank is None else rank)
        return int(getattr(coord, axis, 0))

    def _axis(self, axis: str) -> Group:
        lists = self.topology.get_axis_comm_lists(axis)
        if [tuple(ranks) for ranks in lists] == [self.world.ranks]:
            return self.world
        return self.build(lists)

    def build(self, lists: Iterable[Iterable[int]], max_ctas: int | None = None, backend: str | None = None) -> Group:
        """Make a group of each list, in order, on every rank, and return the one with this rank.

        A rank in none of the lists gets a group with only itself. max_ctas: under NCCL, the most thread blocks, and so
        streaming multiprocessors, that a kernel of the group uses. backend: the world's by default; "gloo" for a group on the
        host.
        """
        options, backend = None, backend or self.backend
        if max_ctas is not None and backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = max_ctas
        mine = self.alone()
        for ranks in (tuple(r) for r in lists):
            if len(ranks) == 1:
                continue
            handle = dist.new_group(list(ranks), backend=backend, pg_options=options)
            if self.rank in ranks:
                if backend == "gloo":
                    prove_membership(handle)
                mine = self._group(ranks, handle)
        return mine

    def alone(self) -> Group:
        """Return the group of this rank alone."""
        return self._group((self.rank,), None)

    def _group(self, ranks: tuple[int, ...], handle: dist.ProcessGroup | None) -> Group:
        return Group(ranks, handle, activity=self.activity, own_streams=self.own_streams)

    @classmethod
    def imagined(cls, tensor_ranks: int, note: Callable[[str, int], Work]) -> ProcessGroups:
        """Return groups of a world that does not exist: this is the first of several tensor-parallel ranks, see ImaginedGroup.

        They are for traces of layers, and neither join a world nor use one that this process has joined.
        """
        groups = cls.__new__(cls)
        groups.topology = ProcessTopology(["pipe", "data", "model"], [1, 1, tensor_ranks])
        groups.rank = 0
        groups.activity, groups.own_streams = Activity(), OwnStreams()
        groups.pipe = groups.data = alone = Group((0,), None)
        groups.model = ImaginedGroup(tensor_ranks, note) if tensor_ranks > 1 else alone
        groups.world = groups.control = groups.model
        return groups

    def across_stages(self, stages: Iterable[int], max_ctas: int | None = None) -> Group:
        """Return the group of these stages in this rank's pipeline, see `build`. Collective over the world, in one order."""
        stages = sorted(stages)
        return self.build(([ranks[s] for s in stages] for ranks in pipelines_of(self.topology)), max_ctas)


def whole_world() -> Group:
    """Return the group of all ranks; joins the world first if needed."""
    ranks = tuple(range(get_world_size()))
    return Group(ranks, dist.group.WORLD if len(ranks) > 1 else None)


class PipelineParallelGrid:
    """DeepSpeed's `mpu`: this rank's position along each axis, and the torch group of each.

    topology: makes new groups, collectively. groups: instead of them.
    """

    def __init__(self, topology: ProcessTopology | None = None, groups: ProcessGroups | None = None):
        if groups is None:
            if topology is None:
                raise TopologyError("PipelineParallelGrid needs a topology; give a ProcessTopology, or use engine.grid")
            groups = ProcessGroups(topology)
        self._groups = groups
        self.pp_group, self.dp_group = list(groups.pipe.ranks), list(groups.data.ranks)
        self.is_first_stage = self.get_stage_id() == 0
        self.is_last_stage = self.get_stage_id() == groups.pipe.size - 1

    def _is_grid_valid(self) -> bool:
        """Return whether the axes fill the world, as they always do here; DeepSpeed's scripts ask."""
        return self._groups.topology.world_size() == self._groups.world.size

    def topology(self) -> ProcessTopology:
        """Topology of the groups."""
        return self._groups.topology

    def get_global_rank(self) -> int:
        """Rank in the world."""
        return self._groups.rank

    def get_stage_id(self) -> int:
        """Position along the pipeline."""
        return self._groups.coordinate("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        """Number of stages."""
        return self._groups.pipe.size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of this rank's pipeline; None for a single stage."""
        return self._groups.pipe.handle

    def get_data_parallel_id(self) -> int:
        """Position along data parallelism."""
        return self._groups.coordinate("data")

    def get_data_parallel_world_size(self) -> int:
        """Number of data-parallel replicas."""
        return self._groups.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of this rank's replicas; None for a single one."""
        return self._groups.data.handle

    def get_model_parallel_rank(self) -> int:
        """Position along tensor parallelism."""
        return self._groups.coordinate("model")

    def get_model_parallel_world_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self._groups.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of this rank's tensor-parallel ranks; None for a single one."""
        return self._groups.model.handle

    get_pipe_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size
    get_slice_parallel_group = get_model_parallel_group

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the world rank of a stage in this rank's pipeline, with other coordinates replaced by `kwargs`."""
        topology = self._groups.topology
        coord = topology.get_coord(self._groups.rank)
        own = {axis: getattr(coord, axis) for axis in topology.get_axis_names()}
        return topology.get_rank(**{**own, "pipe": stage_id, **kwargs})


# NCCL's buffers of one connection and channel, one for each protocol: of Simple NCCL_BUFFSIZE (NCCL's documentation), of LL 8
# lines of 16 bytes for each of 512 threads, of LL128 120 words of 8 bytes for each of 640, both 8 steps deep (its device.h).
_CONNECTION_BYTES = 4 * 2**20 + 8 * 16 * 512 * 8 + 120 * 8 * 640 * 8
# An estimate of the number of channels that it opens over NVLink; fewer elsewhere.
_CHANNELS = 16
_CONNECTIONS = 2  # of a ring: with both neighbours


def communicator_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of NCCL's buffers for communicators of these numbers of ranks; a single rank has none."""
    return sum(_CHANNELS * min(_CONNECTIONS, size - 1) * _CONNECTION_BYTES for size in sizes)


def prove_membership(handle: dist.ProcessGroup) -> None:
    """Prove to the members of a new group over gloo that this rank is of the job, and check their proofs. Collective.

    Each rank signs random numbers of all members, so that no earlier proof can be repeated. Raises CommunicationError, on ranks
    with a token, if a member's proof is wrong: before anything else that it sends is used.
    """
    rank, size = dist.get_rank(handle), dist.get_world_size(handle)
    numbers = _gather(secrets.token_bytes(PROOF_BYTES), handle, size)
    proofs = _gather(_proof_of(rank, numbers), handle, size)
    if not os.environ.get(TOKEN):
        return
    for other, found in enumerate(proofs):
        if not hmac.compare_digest(found, _proof_of(other, numbers)):
            raise CommunicationError(
                f"rank {dist.get_global_rank(handle, other)} can't prove that it belongs to this job: another process has "
                f"taken its place, or {TOKEN} differs between hosts; start the job on a network that strangers can't reach"
            )


def _proof_of(rank: int, numbers: list[bytes]) -> bytes:
    return proof(b"member", rank.to_bytes(8, "big"), *numbers)


def _gather(value: bytes, handle: dist.ProcessGroup, size: int) -> list[bytes]:
    """Return the bytes of all members, of one length."""
    mine = torch.frombuffer(bytearray(value), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(gathered, mine, group=handle)
    return [bytes(tensor.tolist()) for tensor in gathered]
