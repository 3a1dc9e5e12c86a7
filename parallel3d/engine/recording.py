"""An engine's side of run records: what a training measured, gathered from all ranks and written by the first."""

from __future__ import annotations

import math
import platform
import socket
import warnings
from pathlib import Path
from typing import Any, Literal

import torch

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import BatchSizes, Config
from parallel3d.config.run_layout import RunLayout
from parallel3d.engine.planning import AutoSchedule
from parallel3d.engine.report import Reports, memory_rows
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RankRecord, RunRecord, Timing, measure_times, print_of
from parallel3d.parameters import whole_shape
from parallel3d.schedule.instructions import COMPUTE_OPS, Program

# What is recorded of the steps behind run_record.after_steps.
_STEPS: tuple[Literal["time", "memory"], ...] = ("memory", "time", "time", "time")


class Recording(Reports):
    """What a training measured, as a file."""

    config: Config
    _auto: AutoSchedule | None
    _batch_sizes: BatchSizes
    _recorded_steps: int = 0  # those that count towards run_record.after_steps

    def write_run_record(self, directory: str | Path | None) -> RunRecord:
        """What this training measured so far, written by rank 0 as run_record.json into `directory`: whole or not at all.

        directory: rank 0's counts. Instructions are those of the last batches after `profile_next_batch` (at most 5), the
        step's seconds those of the last 32 that were not recorded. Collective over all ranks, and the same on all. Raises
        ConfigError on all when no batch was profiled, or the file can't be written.
        """
        record = self._make_record()
        problem: str | None = None
        if self._groups.rank == 0:
            try:
                if directory is None:
                    raise ConfigError("write_run_record needs a directory on rank 0")
                record.write(Path(directory))
            except (OSError, ConfigError) as error:
                problem = (
                    f"the run record could not be written into '{directory}': {error}; name a directory that can be"
                )
        problem = all_gather_object(problem, self._groups.control)[0]
        if problem is not None:
            raise ConfigError(problem)
        return record

    def _record_run(self) -> None:
        """Behind every step: profile the next one, or write what was measured, where the configuration asks for it."""
        wanted = self.config.run_record
        still_plans = self._auto is not None and self._auto.plan is None
        if wanted.directory is None or still_plans or self._recorded_steps == wanted.after_steps + len(_STEPS):
            return
        self._recorded_steps += 1
        due = self._recorded_steps - wanted.after_steps
        if due == len(_STEPS):
            self._write_wanted(wanted.directory)
        elif due >= 0:
            self.profile_next_batch(_STEPS[due])

    def _write_wanted(self, directory: str) -> None:
        try:
            self.write_run_record(directory)
        except ConfigError as error:  # training doesn't end for it
            if self._groups.rank == 0:
                warnings.warn(str(error), stacklevel=2)

    def _make_record(self) -> RunRecord:
        program, steps = self._monitor.last_records()
        times = measure_times(steps, self._groups.topology)
        others = self._monitor.step_seconds(program)
        recorded = [max(r.end for r in records) - max(r.begin for r in records) for records in steps]
        layout, model = self._run_layout(program), self._model
        infos = (*model.parameter_infos(), *model.frozen_infos())
        own = (
            {info.name: math.prod(whole_shape(info.parameter)) for info in infos},
            self._monitor.sequence,
            socket.gethostname(),
            self._rank_record(),
        )
        counts, sequences, hosts, ranks = zip(*all_gather_object(own, self._groups.control), strict=True)
        return RunRecord(
            **RunRecord.fields_of(layout),
            bounds=tuple(model.partition.bounds),
            seq=next((length for length in sequences if length is not None), None),
            program=_compute_lists(program) if layout.schedule == "auto" else None,
            model=print_of(model.layer_names, counts),
            backend=self._groups.backend,
            versions=_versions(self._groups.backend),
            config=self._config_in_force(),
            instructions=times.instructions,
            step=Timing.of(others or recorded),
            optimizer=times.optimizer,
            breakdown=times.breakdown,
            bubble=times.bubble,
            ranks=tuple(r.model_copy(update={"host": _place(hosts, h)}) for r, h in zip(ranks, hosts, strict=True)),
        )

    def _run_layout(self, program: Program) -> RunLayout:
        groups, settings, schedule = self._groups, self._model.settings, self.config.pipeline.schedule
        return RunLayout(
            stages=settings.num_stages,
            slices=groups.model.size,
            replicas=groups.data.size,
            zero=self._update.policy.stage,
            sequence_parallel=settings.sequence_parallel,
            micro_batch=self._batch_sizes.micro_batch_size,
            micro_batches=program.num_micro_batches,
            chunks=settings.num_chunks,
            recompute=settings.activation_checkpoint_interval,
            schedule=schedule if isinstance(schedule, str) else None,
            placement=settings.placement,
        )

    def _config_in_force(self) -> dict[str, Any]:
        """All values, and what "auto" has found of the device's memory, which isn't known where the record is read."""
        found = self.config.model_dump(mode="json")
        found["zero_optimization"]["reduce_per_micro_batch"] = self._update.policy.reduce_per_micro_batch
        return found

    def _rank_record(self) -> RankRecord:
        """This rank's; its host is to be numbered."""
        rows = memory_rows(self._model, self._update, self._memory_profile)
        parts = {name: measured for name, (_, measured) in rows.items()}
        device, profile = self._model.device, self._memory_profile
        own = RankRecord(rank=self._groups.rank, stage=self._model.stage_id, device=_processor(), parts=parts)
        if device.type != "cuda":
            most = None if profile is None else max(parts["backward"], parts["step"])
            return own.model_copy(update={"allocated": most})
        recorders = () if profile is None else (profile.batch, profile.step)
        peaks = [recorder.start + recorder.peak for recorder in recorders]
        free, capacity = torch.cuda.mem_get_info(device)
        measured = {
            "device": torch.cuda.get_device_name(device),
            "capacity": capacity,
            "allocated": max(torch.cuda.max_memory_allocated(device), self._monitor.peak, *peaks),
            "reserved": torch.cuda.max_memory_reserved(device),
            "outside": capacity - free - torch.cuda.memory_reserved(device),
        }
        return own.model_copy(update=measured)


def _place(hosts: tuple[str, ...], host: str) -> int:
    return list(dict.fromkeys(hosts)).index(host)


def _compute_lists(program: Program) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(i) for i in rank if i.op in COMPUTE_OPS) for rank in program.instructions)


def _processor() -> str:
    return platform.processor() or platform.machine()


def _versions(backend: str) -> dict[str, str]:
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if backend == "nccl":
        versions |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {name: str(version) for name, version in versions.items()}
