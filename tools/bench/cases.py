"""Benchmark cases: their names, and the commands that run them.

    [FRAMEWORK-]LAYOUT[-OPTION...]      pp4-1f1b   pp2dp2-zero1-bf16acc   ds-dp4-zero2   torch-pp4-zbv-compile
                                        plain-pp1-compile-cudnn

LAYOUT is made of pp, dp and tp with their sizes. An OPTION is one of `OPTIONS`, `zero` with a stage, `cap` with the
activations that schedules zb-looped and auto may hold (in units of 1F1B's), or a schedule, its chunks a stage behind its
name (`interleaved2`, `zb-looped4`, `auto4`) or as `v4`; `auto` has two, placed as zbv's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

HERE = Path(__file__).parent

# What stands before the layout -> the framework's name.
FRAMEWORKS = {"ds": "deepspeed", "torch": "torch", "fsdp": "fsdp", "megatron": "megatron", "plain": "plain"}
OWN = "parallel3d"

OPTIONS = {
    "fp32acc": "gradients accumulate in fp32",
    "bf16acc": "gradients accumulate in bf16",
    "fp32comm": "gradients are reduced in fp32",
    "bf16comm": "gradients are reduced in bf16",
    "permicro": "gradients are reduced in every micro-batch",
    "once": "gradients are reduced in the last micro-batch alone",
    "compile": "blocks are compiled",
    "cpp": "compiled layers start kernels from C++, inductor's cpp_wrapper",
    "graphs": "forwards and backwards are CUDA graphs; needs 4 warm-up steps",
    "fp8": "linears of blocks are in fp8",
    "cudnn": "attention by cuDNN where it can",
    "sp": "sequence parallelism",
    "shardcopies": "tensor_parallel.peer_copies is true",
    "models": "layers of parallel3d.models, as with tensor parallelism",
    "half": "attention and feed-forward are layers of their own, between which a stage may end",
    "parameters": "layers are split by their parameters",
    "flops": "layers are split by their FLOPs",
    "profile": "layers are split by their measured times",
    "weights": "layers are split by the weights that the workload gives",
    "roofline": "one more step is profiled, kernel by kernel",
    "purebf16": "torch: bf16 weights without FSDP",
    "reshard": "fsdp: parameters are dropped after the forward",
}
# Options that ask for a kernel of this package -> its key.
_KERNELS = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "fusedstep": "optimizer_step",
}
OPTIONS |= {option: f"kernels.{key} is true" for option, key in _KERNELS.items()}
_PARTITIONS = {"parameters", "flops", "profile", "weights"}  # without one: equally many blocks
_PEER_OPTIONS = {"compile", "purebf16", "reshard"}
# Chunks a stage, for schedules whose name alone doesn't say.
_CHUNKS = {"zbv": 2, "dualpipev": 2, "interleaved": 2, "auto": 2}
_V_PLACED = {"zbv", "dualpipev"}
_TORCH_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "looped-bfs": "LoopedBFS",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class CaseError(ValueError):
    """A name that is no case."""


@dataclass(frozen=True)
class Case:
    """One framework in one layout. schedule: "" where the framework has no choice."""

    name: str
    framework: str
    pp: int
    dp: int
    tp: int
    zero: int
    schedule: str
    chunks: int
    max_in_flight: float | None
    options: frozenset[str]

    @property
    def world_size(self) -> int:
        """Processes, one a GPU."""
        return self.pp * self.dp * self.tp

    @property
    def layout(self) -> str:
        """Return the ranks along each axis: cases of one layout are compared."""
        axes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return "".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "one rank"


@dataclass(frozen=True)
class Workload:
    """The workload that all cases of a run train.

    Of this framework's cases alone: config, JSON merged into their configuration, or ""; weights, a JSON list of a number
    for each layer, by which cases with the option `weights` are split, or "".
    """

    size: str
    micro_batch: int
    micro_batches: int
    warmup: int
    steps: int
    config: str = ""
    weights: str = ""


def parse_case(name: str) -> Case:
    """The case of a name. Raises CaseError."""
    first, _, others = name.partition("-")
    framework = FRAMEWORKS.get(first, OWN)
    layout, _, options = (name if framework == OWN else others).partition("-")
    axes = re.findall(r"(pp|dp|tp)([1-9]\d*)", layout)
    sizes = {axis: int(size) for axis, size in axes}
    if not axes or "".join(map("".join, axes)) != layout or len(sizes) < len(axes):
        raise CaseError(
            f"case {name!r}: {layout!r} is no layout; write [FRAMEWORK-]LAYOUT[-OPTION...] such as pp4-1f1b or "
            f"ds-dp4-zero1, with FRAMEWORK one of {', '.join(FRAMEWORKS)}, or nothing for {OWN}"
        )
    words, numbers, schedule = _read_options(options)
    if framework == OWN:
        schedule = schedule or "1f1b"
    try:
        case = Case(
            name,
            framework,
            pp=sizes.get("pp", 1),
            dp=sizes.get("dp", 1),
            tp=sizes.get("tp", 1),
            zero=int(numbers.get("zero", 0)),
            schedule=schedule,
            chunks=int(numbers.get("v", _CHUNKS.get(schedule, 1))),
            max_in_flight=float(numbers["cap"]) if "cap" in numbers else None,
            options=frozenset(words),
        )
    except ValueError as error:
        raise CaseError(f"case {name!r}: {error}; zero and v take whole numbers, cap a number") from None
    _check(case)
    return case


def _read_options(text: str) -> tuple[set[str], dict[str, str], str]:
    """Read the words after the layout: flags of OPTIONS, numbers ("zero2" -> {"zero": "2"}), and the schedule or ""."""
    words: set[str] = set()
    numbers: dict[str, str] = {}
    rest = []
    for word in filter(None, text.split("-")):
        if word in OPTIONS:
            words.add(word)
        elif match := re.fullmatch(r"(zero|v|cap)([\d.]+)", word):
            numbers[match[1]] = match[2]
        else:
            rest.append(word)
    schedule = "-".join(rest)
    if match := re.fullmatch(r"([a-z-]*[a-z]{2})(\d+)", schedule):  # not "1f1b", not "zb-h1"
        schedule, numbers["v"] = match[1], match[2]
    return words, numbers, schedule


def _check(case: Case) -> None:
    allowed = set(OPTIONS) - {"purebf16", "reshard"} if case.framework == OWN else _PEER_OPTIONS
    allowed = {"compile", "cudnn"} if case.framework == "plain" else allowed
    if case.options - allowed:
        wrong = ", ".join(sorted(case.options - allowed))
        raise CaseError(f"case {case.name!r}: {wrong} is no option of {case.framework}")
    if len(case.options & _PARTITIONS) > 1:
        raise CaseError(f"case {case.name!r}: {', '.join(sorted(case.options & _PARTITIONS))} exclude each other")
    if case.framework in ("deepspeed", "fsdp", "plain") and case.schedule:
        near = get_close_matches(case.schedule, [*OPTIONS, "zero1", "zero2"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise CaseError(f"case {case.name!r}: {case.framework} has no option or schedule {case.schedule!r}.{hint}")
    if case.tp > 1 and case.framework not in (OWN, "megatron"):
        raise CaseError(f"case {case.name!r}: {case.framework} runs without tp here; leave tp{case.tp} out")
    if case.framework == "fsdp" and case.pp > 1:
        raise CaseError(f"case {case.name!r}: fsdp is data parallel alone; use torch-{case.layout}-1f1b")
    if case.framework == "plain" and case.world_size > 1:
        raise CaseError(f"case {case.name!r}: a plain loop runs on one GPU; use plain-pp1")
    if case.framework == "torch" and case.schedule not in _TORCH_SCHEDULES:
        known = ", ".join(_TORCH_SCHEDULES)
        raise CaseError(f"case {case.name!r}: torch has no schedule {case.schedule!r}; use one of {known}")


def command_of(case: Case, work: Workload, peers: Path | None) -> list[str]:
    """The script and its arguments, to be started once per rank. Raises CaseError for a peer without `peers`."""
    if case.framework == OWN:
        return [str(HERE / "ours.py"), *_own_arguments(case, work)]
    if case.framework == "plain":
        return [str(HERE / "plain.py"), *_workload(work), *_flags(case, compile="--compile", cudnn="--cudnn")]
    if peers is None:
        raise CaseError(f"case {case.name!r} needs --peers, the directory of the peers' scripts")
    script, arguments = _PEERS[case.framework](case)
    workload = ["--size", work.size, "--micro", str(work.micro_batch), "--acc", str(work.micro_batches)]
    steps = ["--warmup", str(work.warmup), "--steps", str(work.steps)]
    return [str(HERE / "peer.py"), *steps, str(peers / script), *workload, *arguments]


def _own_partition(case: Case, work: Workload) -> list[str]:
    arguments = ["--units", "half"] if "half" in case.options else []
    for method in case.options & _PARTITIONS:
        if method == "weights" and not work.weights:
            raise CaseError(f"case {case.name!r} needs --weights, a JSON list of a number for each layer")
        arguments += ["--partition", f'{{"weights": {work.weights}}}' if method == "weights" else method]
    return arguments


def _workload(work: Workload) -> list[str]:
    arguments = {"micro_batch": work.micro_batch, "micro_batches": work.micro_batches, "warmup": work.warmup}
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    return ["--size", work.size, *words, "--steps", str(work.steps)]


def _own_arguments(case: Case, work: Workload) -> list[str]:
    arguments: list[object] = [*_workload(work), "--pp", case.pp, "--dp", case.dp]
    arguments += ["--tp", case.tp] if case.tp > 1 else []
    arguments += _flags(
        case,
        sp="--sequence_parallel",
        shardcopies="--shard_copies",
        compile="--compile",
        cpp="--cpp",
        graphs="--graphs",
        fp8="--fp8",
        cudnn="--cudnn",
        models="--sliced_layers",
        roofline="--roofline",
    )
    arguments += ["--schedule", case.schedule, "--chunks", case.chunks, "--zero", case.zero]
    if case.max_in_flight is not None:
        arguments += ["--max_in_flight", case.max_in_flight]
    if case.schedule in _V_PLACED or (case.schedule, case.chunks) == ("auto", 2):
        arguments += ["--placement", "v"]
    arguments += _own_partition(case, work)
    for dtype in ("fp32", "bf16"):
        if f"{dtype}acc" in case.options:
            arguments += ["--accumulate", dtype]
        if f"{dtype}comm" in case.options:
            arguments += ["--communicate", dtype]
    for option, value in (("permicro", "true"), ("once", "false")):
        if option in case.options:
            arguments += ["--reduce_per_micro_batch", value]
    if kernels := [key for option, key in _KERNELS.items() if option in case.options]:
        arguments += ["--kernels", ",".join(kernels)]
    if work.config:
        arguments += ["--config", work.config]
    return [str(argument) for argument in arguments]


def _deepspeed(case: Case) -> tuple[str, list[str]]:
    # 0 stages: its plain data-parallel engine. A pipeline runs its ZeRO-1, which is what it does with bf16 anyway.
    pp = case.pp if case.pp > 1 else 0
    return "ds_pipe.py", ["--pp", str(pp), "--zero", str(max(case.zero, 1) if pp else case.zero)]


def _torch(case: Case) -> tuple[str, list[str]]:
    schedule = ["--schedule", _TORCH_SCHEDULES[case.schedule], "--chunks", str(case.chunks)]
    flags = _flags(case, compile="--compile", purebf16="--pure-bf16")
    return "torch_pipe.py", ["--pp", str(case.pp), *schedule, *flags]


def _fsdp(case: Case) -> tuple[str, list[str]]:
    return "fsdp.py", _flags(case, compile="--compile", reshard="--reshard")


def _megatron(case: Case) -> tuple[str, list[str]]:
    return "megatron_pipe.py", ["--pp", str(case.pp), "--tp", str(case.tp), "--chunks", str(case.chunks)]


def _flags(case: Case, **flags: str) -> list[str]:
    return [flag for option, flag in flags.items() if option in case.options]


_PEERS: dict[str, Callable[[Case], tuple[str, list[str]]]] = {
    "deepspeed": _deepspeed,
    "torch": _torch,
    "fsdp": _fsdp,
    "megatron": _megatron,
}
