"""PipelineModule: a list of layers, split over stages and chunks. Each rank builds only its own layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.comm.collectives import Group, all_gather_object, broadcast
from parallel3d.comm.environment import get_rank, local_device
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.structures import Structure, describe
from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import Config
from parallel3d.errors import DataError, PartitionError, note_place
from parallel3d.logs import logger
from parallel3d.parameters import ParameterInfo, slicing_of
from parallel3d.partition import Method
from parallel3d.pipe.calls import Call, LayerCalls, LayerChoice, policy_rule
from parallel3d.pipe.settings import BuildSettings, resolve_settings
from parallel3d.pipe.splitting import LayerSplitter, make_sample
from parallel3d.pipe.ties import TieIndex, broadcast_tied, share_tied_parameters, tied_parameters
from parallel3d.rng import EnterLayer, layer_seed, same_stream, seeded
from parallel3d.schedule.builders import placement_of
from parallel3d.specs import (
    BuildContext,
    Layer,
    LayerSpec,
    LossFunction,
    TiedLayerSpec,
    check_layers,
    function_of,
    layer_name,
    place_of,
)
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.init import host_shards, shard_parameter, shards_weights
from parallel3d.zero.weights import is_whole


class WeightUnits(Protocol):
    """Weights of layers that live as shards: each is gathered before a layer runs."""

    def before_layer(self, layer: int) -> None:
        """Gather a layer's weights before it runs."""

    def before_backward(self, layer: int, output: Any) -> None:
        """Gather a layer's weights when the gradient of its output arrives."""


class PipelineModule(nn.Module):
    """A model as a list of layers, each called with the result of the one before.

    - layers: LayerSpec, TiedLayerSpec, modules, or functions of one argument.
    - num_stages or topology: the number of pipeline stages; the rest of the world is data parallel.
    - loss_fn(outputs, labels): returns a mean, or (sum, count), where the gradient is divided once by the total count; or a
      LayerSpec of a module without parameters that declares a context. Without it the last layer's result is the loss.
    - partition_method ("parameters"): see partition.resolve_partition.
    - num_chunks (1): chunks of each stage. placement: "loop" (the default) or "v".
    - sample_input: inputs of one micro-batch, on every rank, for the methods "flops" and "profile" and for the activations
      under pipeline.max_stage_bytes. sample_labels: its labels, with which the loss counts as part of the last layer.
    - checkpointable_layers (all): the layers whose activations are recomputed: a list of class names, a regular expression
      that is searched in class and function names, or a function (layer index, layer) -> bool. Neighbours among them are
      recomputed in groups of activation_checkpoint_interval (0: never; 1 where checkpointable_layers is given).
    - activation_checkpoint_func(function, *tensors): runs such a group, function(*tensors) on all tensors of its input; by
      default a Checkpointer as `config` says.
    - dynamic_shape: as the configuration's pipeline.shapes "dynamic".

    An argument that is None is read from the `pipeline` section of `config`; else the default in brackets holds.

    Initial weights depend on the seed and on the layer's index, never on the layout: layer k is built with seed
    base_seed + k (seed_layers=True; seed_fn is called with it too), or torch's own seed + k (False). Ties (see
    TiedLayerSpec) hold across stages. Raises PartitionError, ConfigError, TopologyError. Collective: every rank builds the
    module at the same point of its script.
    """

    _units: WeightUnits | None = None
    _given_groups: ProcessGroups | None = None  # of layers that are sharded already

    def __init__(
        self,
        layers: Sequence[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: LossFunction = None,
        seed_layers: bool | None = None,
        seed_fn: Callable[[int], object] | None = None,
        base_seed: int = 1234,
        partition_method: Method | None = None,
        activation_checkpoint_interval: int | None = None,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: LayerChoice | None = None,
        dynamic_shape: bool = False,
        num_chunks: int | None = None,
        placement: str | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        sample_input: Any = None,
        sample_labels: Any = None,
    ):
        super().__init__()
        # Called with a module before its weights are read: a sharded optimizer may still be gathering them.
        self.wait_for_weights: Callable[[nn.Module], None] = lambda module: None
        layers = list(layers)
        check_layers(layers, loss_fn)
        settings = resolve_settings(
            config,
            topology,
            len(layers),
            num_stages=num_stages,
            seed_layers=seed_layers,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            checkpointable_layers=checkpointable_layers,
            num_chunks=num_chunks,
            placement=placement,
        )
        self._join(settings, shards_weights(config), host_shards(config))
        self.dynamic_shape, self._own_checkpoint_func = dynamic_shape, activation_checkpoint_func
        self.use_checkpointer(Checkpointer())
        self._seed_fn = seed_fn if settings.seed_layers else None
        self.layer_names = [layer_name(layer) for layer in layers]
        context = BuildContext(self.groups, self.device, settings.sequence_parallel, settings.layout_independent)
        self.loss_fn = _build_loss(loss_fn, context)
        seed = base_seed if settings.seed_layers else torch.initial_seed() % 2**62
        with seeded(seed, self.device):
            sample = make_sample(sample_input, sample_labels, loss_fn, config)
            splitter = LayerSplitter(layers, settings, self.placement, context, sample)
            self.partition, self.policies, self.predicted = splitter.split(config)
        self._place(layers, seed, context)

    def _join(self, settings: BuildSettings, shards_layers: bool, host: HostShards | None) -> None:
        """Make the process groups of the layout, and determine this rank's chunks."""
        self.settings, self.num_stages = settings, settings.num_stages
        self.placement = placement_of(settings.placement, settings.num_stages, settings.num_chunks)
        self.groups = self._given_groups or ProcessGroups(settings.topology)
        self._shards_layers, self._host = shards_layers and (self.groups.data.size > 1 or host is not None), host
        self.device = local_device()
        self.stage_id = self.groups.coordinate("pipe")
        self.own_chunks = tuple(c for c, stage in enumerate(self.placement) if stage == self.stage_id)

    def _place(self, layers: Sequence[Layer], seed: int, context: BuildContext) -> None:
        """Build this rank's layers on its device, with the same bits on all ranks that hold a copy."""
        self.partition_table = self._partition_table()
        if get_rank() == 0 and len(self.placement) > 1:
            logger.info("%s", self.partition_table)
        self._build_layers(layers, seed, context)
        self.to(self.device)
        self.replica_groups = self._make_replica_groups()
        self._synchronize()
        self._warn_if_no_layer_is_sharded()

    # Building

    def _partition_table(self) -> str:
        """Format the layers of each stage or chunk, one per line, and with several chunks the cost of each stage."""
        if self.settings.num_chunks == 1:
            return self.partition.table(self.layer_names)
        loads = self.partition.loads(self.placement)
        shares = ", ".join(f"{load:,.6g} ({load / max(loads):.0%})" if load else "0" for load in loads)
        return self.partition.table(self.layer_names, label="chunk") + f"\nchunks of each stage together: {shares}"

    def _build_layers(self, layers: Sequence[Layer], seed: int, context: BuildContext) -> None:
        """Build the layers of this rank's chunks, each with its own seed, and share what ties join."""
        self._ties = TieIndex(layers, self.partition.part_of)
        self.layers = nn.ModuleDict()
        self.calls = LayerCalls(self.settings.activation_checkpoint_interval)
        policy_of = policy_rule(self.settings.checkpointable_layers, self.policies, self.layer_names)
        for chunk in self.own_chunks:
            calls = []
            for k in self.partition.layers(chunk):
                layer, module = layers[k], self._build(layers, self._ties.builder[k], seed, context)
                policy = policy_of(k, layer if module is None else module)
                calls.append(Call(k, module, function_of(layer, module), policy))
            self.calls.add(chunk, calls)
        share_tied_parameters(self._modules_in_order(), self._ties)

    def _build(self, layers: Sequence[Layer], k: int, seed: int, context: BuildContext) -> nn.Module | None:
        """Return the module of layer k, built and registered at the first call; None for a function."""
        layer, key = layers[k], str(k)
        if key in self.layers:
            return self.layers[key]
        if isinstance(layer, LayerSpec):
            with seeded(layer_seed(seed, k), self.device), self.device:
                if self._seed_fn is not None:
                    self._seed_fn(layer_seed(seed, k))
                shards = self._shards_layers and not isinstance(layer, TiedLayerSpec)
                self.layers[key] = layer.build(replace(context, reads_later=shards))
            if shards:
                self._shard(self.layers[key])
        elif isinstance(layer, nn.Module):
            self.layers[key] = layer
        else:
            return None
        return self.layers[key]

    def _shard(self, layer: nn.Module) -> None:
        """Keep only this rank's shards of a layer that was just built (ZeRO-3), with the same bits on all ranks."""
        layer.to(self.device)
        for parameter in filter(is_whole, layer.parameters()):
            if slicing_of(parameter) is None:
                broadcast(parameter.data, self.groups.model.ranks[0], self.groups.model)
            shard_parameter(parameter, self.groups.data, self._host)

    def _modules_in_order(self) -> list[tuple[int, nn.Module]]:
        return sorted(((int(layer), module) for layer, module in self.layers.items()), key=lambda item: item[0])

    def _make_replica_groups(self) -> dict[tuple[int, ...], Group]:
        """Map owners (chunks that share a parameter) to the ranks of this pipeline that hold them.

        Collective: the groups are made on every rank, in one order.
        """
        groups = {}
        for owners in self._ties.shared_owners():
            stages = {self.placement[c] for c in owners}
            groups[owners] = self.groups.across_stages(stages) if len(stages) > 1 else self.groups.alone()
        return groups

    @torch.no_grad()
    def _synchronize(self) -> None:
        """Give all copies the same bits: those of replica 0 over data parallelism, then those of a tie's first owner.

        Raises PartitionError on all ranks when a copy is missing, or differs in shape, dtype or requires_grad.
        """
        for tensor in (*self.parameters(), *self.buffers()):
            if not is_whole(tensor):
                continue  # all ranks have the same bits: sharded while it was built, or still in a file
            if slicing_of(tensor) is None:
                broadcast(tensor.data, self.groups.model.ranks[0], self.groups.model)
            broadcast(tensor.data, self.groups.data.ranks[0], self.groups.data)
        broadcast_tied(self._all_infos(), self.groups, self.placement, self.replica_groups)

    def _warn_if_no_layer_is_sharded(self) -> None:
        size = self.groups.model.size
        if size == 1:
            return
        sharded = any(slicing_of(parameter) is not None for parameter in self.parameters())
        if not any(all_gather_object(sharded, self.groups.control)) and self.groups.rank == 0:
            warnings.warn(
                f"tensor_parallel.size is {size}, but no layer is sharded over the tensor-parallel ranks, which all do the "
                "same work; build layers of parallel3d.tensor_parallel or use parallelize, or set the size to 1",
                stacklevel=3,
            )

    # Parameters

    def use_waiter(self, wait_for_weights: Callable[[nn.Module], None]) -> None:
        """Call `wait_for_weights` with a module before its weights are read: they may still be gathered."""
        self.wait_for_weights = wait_for_weights

    def use_units(self, units: WeightUnits) -> None:
        """Let `units` gather each layer's weights before it runs."""
        self._units = units

    def parameter_infos(self) -> list[ParameterInfo]:
        """Return this rank's trainable parameters, in the order of the layers, each once."""
        self.wait_for_weights(self)
        return [info for info in self._all_infos() if info.parameter.requires_grad]

    def frozen_infos(self) -> list[ParameterInfo]:
        """Return this rank's parameters that are not trained, in the same order."""
        return [info for info in self._all_infos() if not info.parameter.requires_grad]

    def _all_infos(self) -> list[ParameterInfo]:
        infos: dict[nn.Parameter, ParameterInfo] = {}
        for layer, module in self._modules_in_order():
            tied = [item for a in self._ties.attributes(layer) for item in tied_parameters(module, a).items()]
            # A parameter with several names in its module is listed under the name that is tied.
            for name, parameter in (*tied, *module.named_parameters()):
                if parameter not in infos:
                    origin, source = self._ties.origin(layer, name)
                    owners = self._ties.owners(layer, name)
                    infos[parameter] = ParameterInfo(
                        self.global_name(origin, source), parameter, owners, self.unit_of(origin, source)
                    )
        return list(infos.values())

    def unit_of(self, layer: int, name: str) -> int:
        """Return the number of the unit that a layer's parameter is gathered with if weights are sharded."""
        return layer

    def global_name(self, layer: int, name: str) -> str:
        """Return the name of a layer's parameter in the whole model, the same in every layout."""
        return f"layers.{layer}.{name}"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Do the same as nn.Module, after waiting for the weights that the last step updated."""
        self.wait_for_weights(self)
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as nn.Module, after waiting for the weights that the last step updated."""
        self.wait_for_weights(self)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as nn.Module, after waiting for the last step's weights, which would overwrite those loaded."""
        self.wait_for_weights(self)
        return super().load_state_dict(*args, **kwargs)

    # Running

    def topology(self) -> ProcessTopology:
        """Return the topology of the world."""
        return self.settings.topology

    def pair(self, micro_batch: Any) -> tuple[Any, Any]:
        """Split a micro-batch into (inputs, labels). Raises DataError where it is not a pair."""
        is_sequence = isinstance(micro_batch, (tuple, list))
        if not is_sequence or len(micro_batch) != 2:
            given = type(micro_batch).__name__ + (f" of {len(micro_batch)}" if is_sequence else "")
            raise DataError(
                f"a micro-batch must be (inputs, labels), not {given}; several of them go in a tuple or dict of their own"
            )
        return micro_batch[0], micro_batch[1]

    def use_checkpointer(self, checkpointer: Checkpointer) -> None:
        """Recompute layers by `checkpointer`, unless the module was built with an activation_checkpoint_func."""
        self.activation_checkpoint_func = self._own_checkpoint_func or checkpointer

    def wrap_loss(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the loss function, if there is one, by wrap(loss function)."""
        if self.loss_fn is not None:
            self.loss_fn = wrap(self.loss_fn)

    def forward_chunk(self, chunk: int, x: Any, enter: EnterLayer = same_stream, restores: bool = False) -> Any:
        """Run the layers of one of this rank's chunks on `x`, the input of its first layer.

        - enter: called before each layer, and again before its recomputation.
        - restores: whether recomputations leave random states as they are; not where the caller restores those.
        """
        for calls, policy in self.calls.groups(chunk):
            if policy and torch.is_grad_enabled():
                run = partial(self._run, calls, enter, recomputed=True)
                again = self.activation_checkpoint_func
                if self._own_checkpoint_func is None and isinstance(again, Checkpointer):
                    x = again.under(policy, restores)(run, x)
                else:
                    structure, tensors = describe(x)
                    x = again(partial(_run_on, run, structure), *tensors)
            else:
                x = self._run(calls, enter, x)
        return x

    def _run(self, calls: Sequence[Call], enter: EnterLayer, x: Any, recomputed: bool = False) -> Any:
        units, last = self._units, calls[-1] if calls else None
        for call in calls:
            if call.module is not None:
                self.wait_for_weights(call.module)
            if units is not None:
                units.before_layer(call.layer)
            enter(call.layer)
            try:
                x = call.function(x)
            except Exception as error:
                note_place(error, place_of(call.layer, call.module or call.function, error))
                raise
            if units is not None and not (recomputed and call is last):
                units.before_backward(call.layer, x)
        return x

    def forward(self, x: Any, enter: EnterLayer = same_stream) -> Any:
        """Run this rank's layers in order: the whole model on a single stage, else the part that the rank holds."""
        for chunk in self.own_chunks:
            x = self.forward_chunk(chunk, x, enter, restores=True)
        return x


def _run_on(run: Callable[[Any], Any], structure: Structure, *tensors: Tensor) -> Any:
    """Run layers on an input of this structure: as arguments of their own, tensors get gradients from any recomputation."""
    return run(structure.rebuild(tensors))


def _build_loss(loss_fn: LossFunction, context: BuildContext) -> Callable[[Any, Any], Any] | None:
    """Build the loss function. Raises PartitionError if it has parameters to train: no stage would reduce their gradients."""
    built = loss_fn.build(context) if isinstance(loss_fn, LayerSpec) else loss_fn
    trained = [n for n, p in built.named_parameters() if p.requires_grad] if isinstance(built, nn.Module) else []
    if trained:
        raise PartitionError(
            f"loss_fn {type(built).__name__} has parameters to train, {trained}; move them to the last layer"
        )
    return built


def tied_copies(model: PipelineModule) -> dict[str, str]:
    """Return the further names of parameters that one layer has by several, each with the name that it is known by."""
    copies = {}
    for layer, module in model.layers.items():
        first: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if first.setdefault(parameter, name) != name:
                copies[model.global_name(int(layer), name)] = model.global_name(int(layer), first[parameter])
    return copies
