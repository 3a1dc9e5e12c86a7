"""CUDA graphs that share memory, with the random streams of the layers that they run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch

from parallel3d.comm.environment import reset_before_destroy
from parallel3d.config import Config
from parallel3d.errors import ConfigError, ExecutionError
from parallel3d.kernels.graph_memsets import clear_by_kernels
from parallel3d.pipe.module import PipelineModule
from parallel3d.rng import OwnStreams, own_seed
from parallel3d.zero.policy import ZeroPolicy

REMEDY = "set compile.cuda_graphs to false"


def check_cuda_graphs(config: Config, module: PipelineModule, policy: ZeroPolicy) -> None:
    """Raise ConfigError, with all reasons, if this configuration keeps instructions from being captured as CUDA graphs."""
    sliced = module.groups.model.size > 1
    recomputation = config.activation_checkpointing
    reasons = {
        "copies between tensor-parallel ranks (tensor_parallel.peer_copies)": sliced
        and config.tensor_parallel.copies_shards,
        "a log of tensor-parallel collectives (comms_logger)": sliced and config.comms_logger.enabled,
        "ZeRO-3 (zero_optimization.stage)": policy.stage == 3,
        "offloaded state (zero_optimization.offload_optimizer, offload_param)": policy.offload or policy.weight_offload,
        "reduction in every micro-batch (zero_optimization.reduce_per_micro_batch)": policy.reduce_per_micro_batch,
        "activations on the host (activation_checkpointing.cpu_checkpointing)": recomputation.cpu_checkpointing,
        "timed or synchronized recomputation (activation_checkpointing.profile, synchronize_checkpoint_boundary)": (
            recomputation.profile or recomputation.synchronize_checkpoint_boundary
        ),
        "check_numerics": config.check_numerics,
    }
    if found := [name for name, applies in reasons.items() if applies]:
        raise ConfigError(f"compile.cuda_graphs can't be combined with {', '.join(found)}; change these, or {REMEDY}")


class CudaGraphs:
    """Makes CUDA graphs that share a pool of memory. They must be replayed in the order in which they were captured.

    From its creation on, a stream of its own is the current one: the default stream can't be captured, and autograd would
    synchronize the two, since it computes each gradient on the stream on which its node was made.

    A graph can't seed a generator. A layer draws from states of its own instead, which are seeded before each replay: one in
    common with other tensor-parallel ranks, and one for each of own_streams.
    """

    def __init__(self, device: torch.device, own_streams: OwnStreams):
        if device.type != "cuda":
            raise ConfigError(f"compile.cuda_graphs needs a CUDA device, and this is {device}; {REMEDY}")
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._own_streams = own_streams
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._no_stream = self._generator.clone_state()
        self._no_stream.manual_seed(0)
        self._forget_streams()
        self._host_state = torch.get_rng_state()
        before, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(before)
        torch.cuda.set_stream(own)

    def _forget_streams(self) -> None:
        self._states: dict[int, list[torch.Generator]] = {}
        self._own: dict[int, dict[int, int]] = {}  # by layer: numbers of streams, and the shards that draw from them
        self._layer = -1

    def release(self) -> None:
        """Give back memory that the same work has reserved without graphs, before what will stay is allocated in between."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def begin(self) -> None:
        """Begin a new pool."""
        self.release()
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, layers: Sequence[int]) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the kernels that the block launches, which don't run. layers: those that may draw random numbers."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        own, spare = self._generator.graphsafe_get_state(), self._generator.clone_state()
        for layer in layers:
            states = self._states.setdefault(layer, [])
            states += [self._generator.clone_state() for _ in range(len(states), 1 + self._own_streams.most)]
            for state in states:
                graph.register_generator_state(state)
        self._host_state, collects = torch.get_rng_state(), gc.isenabled()
        gc.disable()  # a CUDA object that is freed now could break the capture
        reset_before_destroy(graph)  # also one whose capture fails
        # Only this thread's calls: NCCL's watchdog queries events at any time.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            # `drew` finds random numbers drawn outside of a layer's stream; older versions of PyTorch don't capture them.
            with self._own_streams.captured(self), self.without_draws():
                yield graph
            self._check_host()
        except BaseException:
            with suppress(Exception):
                graph.capture_end()
            # If a capture can't be ended regularly, PyTorch 2.11 leaves its generator states as if it still ran.
            own = spare
            self._forget_streams()
            raise
        else:
            graph.capture_end()
            clear_by_kernels(graph, self._device)
            graph.instantiate()
        finally:
            self._generator.graphsafe_set_state(own)
            if collects:
                gc.enable()

    def enter(self, layer: int) -> None:
        """Begin the random stream of a layer while it is captured."""
        self._check_host()
        self._layer = layer
        self._own_streams.enter_layer()
        self._generator.graphsafe_set_state(self._states[layer][0])

    def begin_own(self, number: int, index: int) -> Callable[[], object]:
        """Draw from the layer's stream with this number for shard `index` of a tensor, until the result is called."""
        before, states = self._generator.graphsafe_get_state(), self._states[self._layer]
        if number + 1 >= len(states):
            raise ExecutionError(f"a layer begins more random streams of its shards than in the steps before; {REMEDY}")
        self._own.setdefault(self._layer, {})[number] = index
        self._generator.graphsafe_set_state(states[number + 1])
        return partial(self._generator.graphsafe_set_state, before)

    @contextmanager
    def without_draws(self) -> Iterator[None]:
        """Let `drew` raise if random numbers are drawn in this context."""
        before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._no_stream)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(before)

    def _check_host(self) -> None:
        if not torch.equal(self._host_state, torch.get_rng_state()):
            raise ExecutionError(f"a layer draws random numbers on the host, which a graph would repeat; {REMEDY}")

    def seed(self, layer: int) -> None:
        """Seed a layer's states as the default generators are seeded now."""
        common, *own = self._states[layer]
        common.manual_seed(self._generator.initial_seed())
        for number, index in self._own.get(layer, {}).items():
            own[number].manual_seed(own_seed(index))

    def drew(self, layers: Sequence[int]) -> list[int]:
        """Return which of these layers the last replay drew for, since they were seeded.

        Raises ExecutionError if it drew outside of the streams of layers.
        """
        if self._no_stream.get_offset():
            self._no_stream.manual_seed(0)
            raise ExecutionError(
                "random numbers are drawn again in a recomputation within a layer, or in a backward, which a graph can't "
                f"repeat; {REMEDY}"
            )
        return [layer for layer in layers if any(state.get_offset() for state in self._states[layer])]
