"""DeepSpeed's FLOPs profiler, at its import path: counts by torch.utils.flop_counter, of matrix products and attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from parallel3d.engine.flops import peak_of
from parallel3d.logs import logger
from parallel3d.monitor.memory import format_table


def number_to_string(number: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with a prefix, such as "1.5 G"; units: the prefix, T, G, M, K, m, u or "" for none."""
    factors = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
    if units is None:
        units = next((prefix for prefix, factor in factors.items() if abs(number) >= factor), "")
    return f"{number / factors[units]:.{precision}f} {units}"


def _with(word: str, number: float, units: str | None = None, precision: int = 2) -> str:
    return number_to_string(number, units, precision) + word


flops_to_string = partial(_with, "FLOPS")
macs_to_string = partial(_with, "MACs")
params_to_string = number_to_string
duration_to_string = partial(_with, "s")


class FlopsProfiler:
    """Counts the FLOPs of what runs between start_profile and stop_profile, on this process, and times it.

    model: the model whose modules are counted; ds_engine: has `monitor.peak_flops`. recompute_fwd_factor has no effect.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0):
        self._model = model
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._peak = None if ds_engine is None else ds_engine.config.monitor.peak_flops
        self._root = type(model).__name__
        self._modules = {
            f"{self._root}.{path}" if path else self._root: module for path, module in model.named_modules()
        }
        self._hooks: list[RemovableHandle] = []
        self.reset_profile()

    def reset_profile(self) -> None:
        """Forget what was counted, and end the count if it runs."""
        self.stop_profile()
        self._forwards: dict[str, tuple[int, float]] = {}  # FLOPs and seconds
        self._running: list[tuple[int, float]] = []  # the counts at which the forwards that run now began
        self._counter = FlopCounterMode(display=False)
        self._ignored: set[type[nn.Module]] = set()
        self._duration = 0.0

    def start_profile(self, ignore_list: Collection[type[nn.Module]] | None = None) -> None:
        """Begin to count. Forwards of modules of the classes in ignore_list are left out."""
        self.reset_profile()
        self._ignored = set(ignore_list or ())
        with FlopCounterMode(display=False):  # its first operator in a process imports for a second
            torch.relu(torch.empty(0))
        for name, module in self._modules.items():
            self._watch(name, module)
        self._duration = -_now()
        self._counter.__enter__()

    def stop_profile(self) -> None:
        """End the count, if it runs."""
        if not self._hooks:
            return
        self._counter.__exit__(None, None, None)
        self._duration += _now()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _watch(self, name: str, module: nn.Module) -> None:
        """Add the FLOPs and seconds of each forward of a module, those of its recomputation included, to `_forwards`.

        An outermost forward is the model's too: a pipeline calls its layers, not the model.
        """

        def begin(module: nn.Module, args: Any) -> None:
            self._running.append((self._counter.get_total_flops(), _now()))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            flops, seconds = self._running.pop()
            flops, seconds = self._counter.get_total_flops() - flops, _now() - seconds
            for module_name in {name} if self._running else {name, self._root}:
                others = self._forwards.get(module_name, (0, 0.0))
                self._forwards[module_name] = others[0] + flops, others[1] + seconds

        # Also for a recomputation, which is stopped by an exception once it has what it needs.
        self._hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]

    end_profile = reset_profile

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the number of floating-point operations."""
        ignored = [name for name in self._forwards if type(self._modules[name]) in self._ignored and name != self._root]
        outermost = [name for name in ignored if not any(name.startswith(f"{other}.") for other in ignored)]
        total = self._counter.get_total_flops() - sum(self._forwards[name][0] for name in outermost)
        return flops_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the number of multiply-accumulate operations: half of the FLOPs."""
        flops = self.get_total_flops()
        assert isinstance(flops, int)
        return macs_to_string(flops // 2) if as_string else flops // 2

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds from start_profile to stop_profile."""
        return duration_to_string(self._duration) if as_string else self._duration

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of the model's parameters on this rank."""
        number = sum(parameter.numel() for parameter in self._model.parameters())
        return params_to_string(number) if as_string else number

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """Print the totals, the modules with most FLOPs in forwards of each depth, and if `detailed` a table of all modules.

        The table has each module's parameters, and MACs and seconds in forwards, with their shares of the model's, then the
        FLOP/s of its forwards and, where the device's peak is known, their share of it (MFU).

        - module_depth: the deepest modules to print; -1 for all. top_modules: how many of each depth.
        - output_file: written instead, with the folders that it needs.
        """
        names = [name for name in sorted(self._forwards) if module_depth < 0 or name.count(".") <= module_depth]
        flops, seconds = self.get_total_flops(), self._duration
        assert isinstance(flops, int)
        lines = [
            f"FLOPs profile of step {profile_step}, on this rank",
            f"parameters {self.get_total_params(True)}, FLOPs {flops_to_string(flops)}, MACs {self.get_total_macs(True)}, "
            f"time {duration_to_string(seconds)}, {flops_to_string(flops / seconds if seconds else 0)} per second",
        ]
        for depth in sorted({name.count(".") for name in names}):
            counts = {name: self._forwards[name][0] for name in names if name.count(".") == depth}
            most = sorted(counts, key=lambda name: -counts[name])[:top_modules]
            lines.append(f"depth {depth}: " + ", ".join(f"{name} {flops_to_string(counts[name])}" for name in most))
        if detailed:
            lines.append(self._table(names))
        text = "\n".join(lines)
        if output_file:
            Path(output_file).parent.mkdir(parents=True, exist_ok=True)
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        else:
            logger.info("%s", text)

    def _table(self, names: Sequence[str]) -> str:
        """Format a row for each module that ran."""
        sizes = {name: sum(parameter.numel() for parameter in self._modules[name].parameters()) for name in names}
        whole = [number or 1 for number in (sizes.get(self._root, 0), *self._forwards.get(self._root, ()))]
        peak = self._peak or peak_of(self._device)
        rows: dict[str, Sequence[str]] = {"module": ("params", "", "MACs", "", "forward", "", "FLOPS", "MFU")}
        for name in names:
            flops, seconds = self._forwards[name]
            rate = flops / seconds if seconds else 0.0
            shares = [f"{number / full:.1%}" for number, full in zip((sizes[name], flops, seconds), whole, strict=True)]
            shown = params_to_string(sizes[name]), macs_to_string(flops // 2), duration_to_string(seconds)
            mfu = "-" if peak is None else f"{rate / peak:.1%}"
            cells = [cell for pair in zip(shown, shares, strict=True) for cell in pair]
            rows["  " * name.count(".") + name] = (*cells, flops_to_string(rate), mfu)
        return format_table(rows, 14)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the totals and the modules with most FLOPs of each depth."""
        self.print_model_profile(module_depth=module_depth, top_modules=top_modules, detailed=False)


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def counting(engine: Any, first: bool) -> Iterator[None]:
    """Count what runs inside, and print it, if the engine's configuration asks for it. first: of the step's micro-batches."""
    section = engine.config.flops_profiler
    if (
        not (section.enabled and first and engine.progress.global_steps == section.profile_step)
        or engine.process_groups.rank
    ):
        yield
        return
    profiler = FlopsProfiler(engine.module, engine)
    profiler.start_profile()
    try:
        yield
    finally:
        profiler.stop_profile()
    detailed, file = section.detailed, section.output_file
    profiler.print_model_profile(section.profile_step, section.module_depth, section.top_modules, detailed, file)


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Collection[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[Any, Any, Any]:
    """Return (FLOPs, MACs, parameters) of a model's forward, or of its `generate` if that is the mode, in evaluation mode.

    - input_shape: of the one input, of the parameters' dtype; else args and kwargs are given.
    - as_string: return texts such as "1.5 GFLOPS". The other arguments are those of FlopsProfiler's methods.
    """
    model.eval()
    if input_shape is not None:
        first = next(model.parameters())
        args = [torch.ones(tuple(input_shape), dtype=first.dtype, device=first.device)]
    run: Callable[..., Any] = model if mode == "forward" else getattr(model, mode)
    for _ in range(warm_up):
        run(*args, **(kwargs or {}))
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_modules)
    run(*args, **(kwargs or {}))
    profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )
