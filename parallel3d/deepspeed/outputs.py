"""Engine that writes to monitors, profiles FLOPs, traces steps, and saves the script zero_to_fp32.py as DeepSpeed's does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.atomic_write import atomic_write
from parallel3d.deepspeed.profiling.flops_profiler import counting
from parallel3d.deepspeed.utils.zero_to_fp32 import SCRIPT
from parallel3d.engine.engine import Engine
from parallel3d.engine.state import Location
from parallel3d.errors import ConfigError
from parallel3d.monitor.traces import StepTracer
from parallel3d.monitor.writers import MonitorMaster


class WritingEngine(Engine):
    """The engine, with DeepSpeed's outputs and torch.profiler's."""

    @cached_property
    def monitor(self) -> MonitorMaster:
        """The configuration's monitors: `monitor.write_events([(name, value, samples)])` writes values of the script's own."""
        monitor = MonitorMaster(self.config, self.process_groups.rank == 0)
        monitor.describe(layout=self.reports.layout().text)
        return monitor

    def _finish_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super()._finish_step(*args, **kwargs)
        update = self.update
        values: dict[str, Any] = {"train_loss": loss, "lr": update.optimizer.param_groups[0]["lr"]}
        if update.scaler is not None:
            values["loss_scale"] = update.loss_scale
        if update.grad_norm is not None:
            values["grad_norm"] = update.grad_norm
        self.monitor.collect(self.progress.global_samples, {**values, **self.reports.monitor.values})
        return loss

    def profile(self, steps: int, directory: str | Path | None = None, memory: bool = False) -> None:
        """Trace the next steps by torch.profiler, with the schedule's instructions by name: trace-RANK.json.gz in a directory.

        - directory: by default that of `run_record`. `p3d trace DIRECTORY` makes one trace of all ranks'.
        - memory: record allocations, too, and on CUDA write torch's snapshot memory-RANK.pickle.

        Collective. Raises ConfigError without a directory, and for less than one step.
        """
        chosen = directory or self.config.run_record.directory
        if chosen is None or steps < 1:
            raise ConfigError(
                f"engine.profile({steps}) is to write into {chosen}; give 1 step or more, and a directory, or set "
                "run_record.directory"
            )
        self.reports.trace(StepTracer(steps, Path(chosen), memory, self.process_groups, self.pipeline_module.device))

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Do what Engine's does, and count the FLOPs in the step that `flops_profiler` names."""
        with counting(self, first=True):
            return super().train_batch(data_iter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what Engine's does, and count the FLOPs in the step that `flops_profiler` names."""
        with counting(self, first=self.pipeline_module.training and not self.progress.num_backwards):
            return super().__call__(*args, **kwargs)

    forward = __call__

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Do what Engine's does, in time that doesn't count for the speed of the steps."""
        self.reports.monitor.pause()
        return super().eval_batch(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        """Do what Engine's does; time in evaluation mode doesn't count for the speed of the steps."""
        if not mode:
            self.reports.monitor.pause()
        return super().train(mode)

    def save_checkpoint(self, save_dir: Location, *args: Any, **kwargs: Any) -> bool:
        """Do what Engine's does, and write zero_to_fp32.py next to the checkpoints."""
        self.reports.monitor.pause()
        super().save_checkpoint(save_dir, *args, **kwargs)
        with suppress(OSError):  # the checkpoint is what counts
            if self.process_groups.rank == 0:
                atomic_write(Path(save_dir) / "zero_to_fp32.py", SCRIPT)
        return True

    def load_checkpoint(
        self, load_dir: Location, *args: Any, custom_load_fn: object = None, **options: Any
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Do what Engine's does. Raises ConfigError for DeepSpeed's custom_load_fn(src=state_dict, dst=module)."""
        if custom_load_fn is not None:
            raise ConfigError(
                "custom_load_fn can't be called: no rank reads a whole state_dict; load_module_strict=False leaves out what "
                "differs, and load_state_dict of the module, before initialize, takes any that the script has read and changed"
            )
        return super().load_checkpoint(load_dir, *args, **options)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state_dict. Raises ExecutionError for weights that live as shards, or are on the host."""
        self.update.parking.check("lp_params")
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if exclude_frozen_parameters and not parameter.requires_grad:
                state.pop(prefix + name, None)
        return state
