"""Reports of a training: printed lines, times, memory, and run records."""

from __future__ import annotations

import math
import platform
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.profiler import record_function

from parallel3d.activity import Phase
from parallel3d.atomic_write import atomic_write
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import SELECTIVE, Config, leaves_open
from parallel3d.config.layout import Layout
from parallel3d.config.section import dumped
from parallel3d.costs.operators import step_flops
from parallel3d.engine.calls import StepProgress
from parallel3d.engine.flops import ForwardFlops
from parallel3d.engine.update import WeightUpdate
from parallel3d.errors import ConfigError
from parallel3d.logs import logger
from parallel3d.monitor.memory import MemoryProfile, MemoryRecorder, held_lines, memory_table
from parallel3d.monitor.records import Breakdown, StepRecord
from parallel3d.monitor.run_record import TIMELINE, RankRecord, RunRecord, StepTimeline, fingerprint, measure_times
from parallel3d.monitor.steps import Profile, StepMonitor
from parallel3d.monitor.traces import StepTracer
from parallel3d.parameters import whole_shape
from parallel3d.pipe.batch import TrainingData
from parallel3d.pipe.executor import Batch, Recorder, nest, no_record
from parallel3d.pipe.messages import Messages
from parallel3d.pipe.module import PipelineModule
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Program
from parallel3d.schedule.lifetimes import peak_live
from parallel3d.schedule.timing import Timeline, simulate
from parallel3d.zero.memory import StateBytes, moments_of, predict_state, unit_sizes

# Profiles of the steps after run_record.after_steps.
_RECORDED: tuple[Profile, ...] = ("memory", "time", "time", "time")


class Reports:
    """Profiles steps and reports on them. Collective: every rank calls its methods at the same points.

    - monitor: times the steps.
    - memory: the last memory profile; None before the first.
    - replays: whether CUDA graphs were replayed in the last training batch, if they were captured.
    """

    def __init__(
        self,
        model: PipelineModule,
        config: Config,
        checkpointer: Checkpointer,
        monitor: StepMonitor,
        update: WeightUpdate,
        data: TrainingData,
    ):
        self.monitor = monitor
        self.memory: MemoryProfile | None = None
        self._tracer: StepTracer | None = None
        self._model, self._config, self._groups = model, config, model.groups
        self._checkpointer, self._update, self._data = checkpointer, update, data
        self._instructions: Sequence[Instruction] = ()  # of the last training batch
        self._flops: ForwardFlops | None = None  # of the current step, if they are counted
        self.replays = False
        self._recorded_steps = 0  # number of steps that count towards run_record.after_steps

    def profile_next_batch(self, what: Profile = "time") -> None:
        """Record, in the next train_batch, when each instruction runs, or how much memory each holds.

        The results are those of `timeline` and `time_breakdown`, or of `memory_report`.
        """
        self.monitor.profile_next(what)

    def trace(self, tracer: StepTracer) -> None:
        """Trace the next steps, with their instructions by name."""
        self._tracer = tracer

    def timeline(self) -> tuple[Program, Timeline]:
        """Return the program of the last recorded batch and its measured timeline, of this rank's pipeline, in seconds.

        The batch after profile_next_batch is recorded and, with wall_clock_breakdown, each batch whose step prints.
        Collective over all ranks. Raises ConfigError if none was recorded.
        """
        program, [records] = self.monitor.records(most=1)
        spans = [span for rank in self._groups.pipe.ranks for span in records[rank].spans]
        return program, Timeline.of(spans, self._model.num_stages)

    def time_breakdown(self) -> list[Breakdown]:
        """Return the parts of the last recorded batch's time (see `timeline`), in seconds, for every rank.

        Collective over all ranks. Raises ConfigError if none was recorded.
        """
        return self.monitor.breakdown()

    def memory_report(self) -> list[dict[str, tuple[int, int]]]:
        """Return each rank's memory, (predicted, measured) bytes by component and by phase; rank 0 prints a table.

        Components: weights, gradients, masters, optimizer (from the first step on), transient (gradient buffers, from the
        first backward on), update (gradients in the masters' dtype), gathered (with stage 3, the most bytes of weights that
        were gathered at a time) and live (those that are gathered now). Phases: steady, between batches; backward, while
        layers run; step, while the optimizer runs. After a batch with `profile_next_batch("memory")` rank 0 also prints what
        layers hold under each policy of recomputation (see `layer_memory`), and there is one more
        component, activations: those of all micro-batches in flight, and the messages between stages; backward includes them.
        With offload, also window (buffers that the state passes through), host and disk, and rank 0 prints its disk's rates.
        The measured bytes of backward and step then also include the workspace of operations. Collective over all ranks.
        """
        everyone = all_gather_object(self._memory_rows(), self._groups.control)
        held = self.layer_memory()
        if self._groups.rank == 0:
            logger.info("%s", "\n".join([memory_table(everyone), *held_lines(held)]))
            for what, file in self._update.disks().items():
                read, written = (rate / 1e9 for rate in file.rates())
                if read or written:
                    rates = f"at {read:.2f} GB/s, and wrote at {written:.2f} GB/s"
                    logger.info("rank 0 read %s from its disk %s", what, rates)
        return everyone

    def layer_memory(self) -> list[list[tuple[tuple[int, ...], str, int]]]:
        """Return (layers, policy of their recomputation, bytes) of the runs of layers in a forward, a list for each rank.

        The bytes are those that are left for a micro-batch's backward, the layers' inputs included, in the last batch with
        `profile_next_batch("memory")`; before it the lists are empty. Collective over all ranks.
        """
        own = {} if self.memory is None else self.memory.batch.of_runs
        return all_gather_object([(*run, nbytes) for run, nbytes in own.items()], self._groups.control)

    def write_run_record(self, directory: str | Path | None) -> RunRecord:
        """Return the measurements so far; rank 0 writes them as run_record.json into `directory`, and a step's timeline.

        directory: rank 0's is used. The times of instructions come from the last (at most 5) batches after
        `profile_next_batch`, those of a step from the last 32 steps that were not recorded. Collective over all ranks. Raises
        ConfigError on all ranks if no batch was profiled, or the file can't be written.
        """
        program, steps = self.monitor.records()
        record = self._make_record(program, steps)
        problem: str | None = None
        if self._groups.rank == 0:
            try:
                if directory is None:
                    raise ConfigError("write_run_record needs a directory on rank 0")
                record.write(Path(directory))
                timeline = StepTimeline.of(steps[-1], self._groups.topology)
                atomic_write(Path(directory) / TIMELINE, timeline.model_dump_json() + "\n")
            except (OSError, ConfigError) as error:
                problem = f"the run record could not be written into '{directory}': {error}; name a directory that is writable"
        problem = all_gather_object(problem, self._groups.control)[0]
        if problem is not None:
            raise ConfigError(problem)
        return record

    @contextmanager
    def recording(self, program: Program, batch: Batch, messages: Messages) -> Iterator[tuple[Recorder, Recorder]]:
        """Record the batch that runs in this context, if its profile was requested.

        Yields the recorder of its instructions, and the recorder of its waits for messages.
        """
        if batch.training:
            self._instructions, self.replays = program.instructions[self._model.stage_id], batch.replays
        recorder = self.monitor.recorder_of(program) if batch.training else None
        running, wait = (recorder.running, recorder.waiting) if recorder is not None else (no_record, no_record)
        for inputs, _ in batch.micro_batches if batch.training else ():
            self.monitor.count_tokens(inputs)
        record = self.also(running) if batch.training else running
        if not (batch.training and "memory" in self.monitor.profiles):
            yield record, wait
            return
        with messages.tracking() as in_transit:
            memory = MemoryRecorder(self._model.device, partial(self._passing, in_transit))
            with memory.running(), self._model.calls.noting(memory.reach):
                yield nest(record, memory), wait
        self.memory = MemoryProfile(program, memory, MemoryRecorder(self._model.device))

    def also(self, record: Recorder) -> Recorder:
        """Nest the step's other recorders of instructions inside `record`."""
        if self.monitor.counts_flops():
            self._flops = ForwardFlops()
            record = nest(record, self._flops)
        return nest(record, lambda i: record_function(str(i))) if self._tracer is not None else record

    def _passing(self, in_transit: Callable[[], int]) -> int:
        """Return the bytes that no instruction holds: of sent messages, and of weights gathered into CUDA's memory."""
        units = self._update.units if self._model.device.type == "cuda" else None
        return in_transit() + (0 if units is None else units.live_bytes)

    def updating(self) -> AbstractContextManager[None]:
        """Record the memory of the optimizer's step in this context, if the batch's memory was recorded."""
        wanted = "memory" in self.monitor.profiles
        return self.memory.step.running() if wanted and self.memory is not None else nullcontext()

    def after_step(self, progress: StepProgress, loss: Tensor, records: bool) -> None:
        """Print what is due after a step and, if `records`, profile or write what run_record requests."""
        steps, update = progress.global_steps, self._update

        def describe() -> dict[str, str]:
            groups = update.optimizer.param_groups
            norm = "-" if update.grad_norm is None else f"{float(update.grad_norm):.4g}"
            rates = " ".join(f"{group['lr']:.4g}" for group in groups)
            moments = [str(g.get("betas", g.get("momentum"))) for g in groups if "betas" in g or "momentum" in g]
            momentum = {"mom": " ".join(moments)} if moments else {}
            parts = {"loss": f"{float(loss):.4f}", "grad norm": norm, "lr": rates}
            return {**parts, **momentum, "skipped": str(update.skipped_steps)}

        counter, self._flops = self._flops, None
        flops = None if counter is None else step_flops(counter.total, self._model.parameters())
        self.monitor.finish(steps, progress.global_samples, describe, flops)
        if self.monitor.prints(steps):
            if self._config.memory_breakdown:
                self.memory_report()
            if self._config.activation_checkpointing.profile and self._groups.rank == 0:
                logger.info("activation checkpointing on rank 0: %s", self._checkpointer.times())
        if records:
            self._record_run()
        if self._tracer is not None:
            with self._groups.activity.untimed(Phase.UNWATCHED):  # long traces take long to write
                self._tracer = None if self._tracer.after_step() else self._tracer

    def dump_state(self, program: Program) -> None:
        """Print, on rank 0, what was configured and built. Collective."""
        update, topology = self._update, self._groups.topology
        own = {str(owners): [b.numel for b in buckets] for owners, buckets in update.reducer.buckets.items()}
        everyone = all_gather_object(own, self._groups.control)
        if self._groups.rank:
            return
        state = {
            "configuration in force": self._config.model_dump(mode="json"),
            "batch": vars(self._data.sizes),
            "topology": dict(zip(topology.axes, topology.dims, strict=True)),
            "parts in which each gradient bucket is updated": update.policy.num_shards(self._groups.data.size),
            "elements of the gradient buckets of the chunks": {k: v for one in everyone for k, v in one.items()},
            f"program {program.name} of {program.num_micro_batches} micro-batches, bubble {simulate(program).bubble:.1%}": {
                f"stage {k}": dict(Counter(i.op.name for i in stage)) for k, stage in enumerate(program.instructions)
            },
        }
        text = yaml.safe_dump(state, sort_keys=False, default_flow_style=None, width=110)
        logger.info("%spartition:\n%s", text, self._model.partition_table)

    def _memory_rows(self) -> dict[str, tuple[int, int]]:
        """Return this rank's (predicted, measured) bytes by component and by phase."""
        update, profile, units = self._update, self.memory, self._update.units
        measured = update.reducer.state_bytes() + update.sharded.state_bytes()
        moments, replicas = moments_of(update.optimizer), self._groups.data.size
        infos, frozen = update.infos, update.frozen_infos
        predicted = predict_state(infos, update.policy, replicas, moments or 0, frozen=frozen)
        if moments is None:
            unknown = ("optimizer", "host", "disk", "window")
            predicted = replace(predicted, **{name: getattr(measured, name) for name in unknown})
        if units is not None:
            sizes = {u: s.nbytes for u, s in unit_sizes(infos, frozen, update.policy, replicas).items()}
            gathered = peak_live(self._instructions, sizes)
            predicted, measured = replace(predicted, gathered=gathered), replace(measured, gathered=units.peak_bytes)
        activations, workspace, needed = (0, 0), 0, measured.update + measured.window
        if profile is not None:
            activations = profile.activations(self._model.stage_id)
            workspace, needed = profile.batch.peak, profile.step.peak
            if units is not None:  # more may have been gathered in other batches, while there were fewer activations
                gathered = peak_live(profile.program.instructions[self._model.stage_id], sizes)
        # On CUDA the allocator's count includes the weights gathered in the batch.
        recorded = profile is not None and self._model.device.type == "cuda"
        beside = measured.backward - (measured.gathered if recorded else 0)
        rows = {f.name: (getattr(predicted, f.name), getattr(measured, f.name)) for f in fields(StateBytes)}
        rows["update"] = (predicted.update, needed - measured.window)
        if units is not None:
            rows["live"] = (0, units.live_bytes)
        else:
            del rows["gathered"]
        if update.sharded.offloaded is None and update.host_shards is None:
            del rows["window"], rows["host"]
        if not measured.disk:
            del rows["disk"]
        rows["activations"] = activations
        rows["steady"] = (predicted.steady, measured.steady)
        most = replace(predicted, gathered=gathered).backward if units is not None else predicted.backward
        rows["backward"] = (most + activations[0], beside + workspace)
        rows["step"] = (predicted.step, measured.steady + measured.transient + needed)
        return rows

    def _record_run(self) -> None:
        """After a step, profile the next one or write the record, as the configuration requests."""
        wanted = self._config.run_record
        if wanted.directory is None or self._recorded_steps == wanted.after_steps + len(_RECORDED):
            return
        self._recorded_steps += 1
        due = self._recorded_steps - wanted.after_steps
        if due == len(_RECORDED):
            try:
                self.write_run_record(wanted.directory)
            except ConfigError as error:  # training continues without it
                if self._groups.rank == 0:
                    warnings.warn(str(error), stacklevel=2)
        elif due >= 0:
            self.profile_next_batch(_RECORDED[due])

    def _make_record(self, program: Program, steps: Sequence[Sequence[StepRecord]]) -> RunRecord:
        layout, model = self.layout(program.num_micro_batches), self._model
        infos = (*model.parameter_infos(), *model.frozen_infos())
        config = self._config.model_dump(mode="json")
        # "auto" was resolved by the device's memory, which a reader of the record doesn't know.
        config["zero_optimization"]["reduce_per_micro_batch"] = self._update.policy.reduce_per_micro_batch
        config["compile"]["cuda_graphs"] = self.replays
        if leaves_open(self._config.activation_checkpointing.policy):
            config["activation_checkpointing"] |= {"policy": dumped(model.policies), "memory_budget": None}
        own = (
            {info.name: math.prod(whole_shape(info.parameter)) for info in infos},
            self.monitor.sequence,
            socket.gethostname(),
            self._rank_fields(),
        )
        counts, sequences, hosts, ranks = zip(*all_gather_object(own, self._groups.control), strict=True)
        numbers = {host: k for k, host in enumerate(dict.fromkeys(hosts))}
        return RunRecord(
            **dict(layout),
            layout=layout.text,
            bounds=tuple(model.partition.bounds),
            seq=next((length for length in sequences if length is not None), None),
            program=tuple(tuple(str(i) for i in rank if i.op in COMPUTE_OPS) for rank in program.instructions)
            if layout.schedule == "auto"
            else None,
            model=fingerprint(model.layer_names, counts),
            backend=self._groups.backend,
            versions=_versions(self._groups.backend),
            config=config,
            **measure_times(steps, self.monitor.unrecorded(program), self._groups.topology),
            ranks=tuple(RankRecord(host=numbers[host], **rank) for rank, host in zip(ranks, hosts, strict=True)),
        )

    def layout(self, num_micro_batches: int | None = None) -> Layout:
        """Return the layout that trains, by default with the configured number of micro-batches."""
        sizes, groups, settings = self._data.sizes, self._groups, self._model.settings
        schedule, policies = self._config.pipeline.schedule, self._model.policies
        return Layout(
            stages=settings.num_stages,
            tensor_ranks=groups.model.size,
            replicas=groups.data.size,
            zero=self._update.policy.stage,
            sequence_parallel=settings.sequence_parallel,
            micro_batch=sizes.micro_batch_size,
            micro_batches=num_micro_batches or sizes.num_micro_batches,
            chunks=settings.num_chunks,
            recompute=settings.activation_checkpoint_interval,
            policy=policies if policies in SELECTIVE else None,
            schedule=schedule if isinstance(schedule, str) else "written",
            placement=settings.placement,
        )

    def _rank_fields(self) -> dict[str, Any]:
        """Return all fields of this rank's record except the number of its host."""
        parts = {name: measured for name, (_, measured) in self._memory_rows().items()}
        device, profile = self._model.device, self.memory
        own = {"rank": self._groups.rank, "stage": self._model.stage_id, "parts": parts}
        if device.type != "cuda":
            most = None if profile is None else max(parts["backward"], parts["step"])
            return {**own, "device": platform.processor() or platform.machine(), "allocated": most}
        recorders = () if profile is None else (profile.batch, profile.step)
        peaks = [recorder.start + recorder.peak for recorder in recorders]
        free, capacity = torch.cuda.mem_get_info(device)
        return {
            **own,
            "device": torch.cuda.get_device_name(device),
            "capacity": capacity,
            "allocated": max(torch.cuda.max_memory_allocated(device), self.monitor.peak, *peaks),
            "reserved": torch.cuda.max_memory_reserved(device),
            "outside": capacity - free - torch.cuda.memory_reserved(device),
        }


def _versions(backend: str) -> dict[str, str]:
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if backend == "nccl":
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {name: str(version) for name, version in versions.items()}
