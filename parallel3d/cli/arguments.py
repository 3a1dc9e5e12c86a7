"""Arguments of the subcommands of `p3d`. The modules that carry them out are imported when called: help needs no torch."""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from parallel3d.command_line import Parser
from parallel3d.planner.search.presets import PRESETS

_CHECKPOINT = (
    "a checkpoint, or a directory of several, of which the one that `latest` names is used, or else the newest"
)
_DTYPES, _SAVED_DTYPES = ("float64", "float32", "bfloat16"), ("fp32", "bf16", "fp16")
_COUNTS = {
    "tensor-parallel": "tensor-parallel ranks (default: tensor_parallel.size, or this host's GPUs)",
    "stages": "stages of a pipeline (default: pipeline.stages, or this host's GPUs)",
    "replicas": "replicas of a stage (default: this host's GPUs)",
}


def make_parser() -> Parser:
    """Return the parser of the command line. A parsed `run` is "module:function" of parallel3d.cli."""
    parser = Parser(prog="p3d", description="Tools around a training with parallel3d.")
    parser.add_version()
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_config,
        _add_check,
        _add_ckpt,
        _add_plan,
        _add_report,
        _add_trace,
        _add_kernels,
        _add_deepspeed,
        _add_completion,
    ):
        add(commands)
    return parser


def _add_config(commands: Any) -> None:
    parser = commands.add_parser(
        "config",
        help="explain a configuration",
        description="Explain a configuration: every value in force and where it comes from, what is left out and why, and the "
        "batch arithmetic.",
    )
    parser.add_argument(
        "file", nargs="?", help="configuration file (JSON with comments, Hjson or YAML), or base64 of JSON"
    )
    parser.add_number("--world", noun="a number of ranks", help="number of ranks")
    parser.add_number("--pp", noun="a number of stages", help="pipeline stages (default: pipeline.stages, or 1)")
    parser.add_argument(
        "--auto",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help='value of a key that is "auto", such as optimizer.params.lr=1e-4; may be repeated',
    )
    parser.add_argument("--keys", action="store_true", help="print the table of all keys in Markdown, and nothing else")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema, and nothing else")
    parser.set_defaults(run="config:run")


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check",
        help="compare layouts with one process",
        description="Train a few steps in each layout and on one process in plain PyTorch, with the same data and seeds, and "
        "compare losses, gradients and weights. The exit code is 0 if all agree, 1 if any differ, 2 if the check can't run.",
    )
    parser.add_argument(
        "target",
        help="script.py:FUNCTION or package.module:FUNCTION that returns a parallel3d.parity.Subject; or the directory of a "
        "Hugging Face model, or its name in the hub's local cache",
    )
    parser.add_argument(
        "--layouts", nargs="+", required=True, metavar="LAYOUT", help='such as "pp2,dp2,tp2,zero2" "pp4,zero1,zb-h1"'
    )
    parser.add_number("--steps", noun="a number of steps", default=3, help="optimizer steps (default: 3)")
    seed = "seed of weights, data and dropout (default: 1234)"
    parser.add_number("--seed", noun="a seed", least=0, default=1234, help=seed)
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative difference that passes (default: 1e-10 for float64, 1e-5 for float32, 0.05 for bfloat16)",
    )
    parser.set_defaults(run="check:run")


def _add_ckpt(commands: Any) -> None:
    parser = commands.add_parser("ckpt", help="list, verify, import, export and compare checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    listing = actions.add_parser("ls", help="list the checkpoints of a directory, and what else is in it")
    listing.add_argument("directory", type=Path)
    listing.set_defaults(run="ckpt:list_checkpoints")

    verify = actions.add_parser("verify", help="verify all checksums; the exit code is 1 if one differs")
    verify.add_argument("checkpoint", type=Path, help=_CHECKPOINT)
    verify.set_defaults(run="ckpt:verify")

    importing = actions.add_parser(
        "import",
        help="convert a checkpoint that DeepSpeed or torch.distributed.checkpoint saved",
        description="Write TARGET/<tag> and TARGET/latest, which load_checkpoint and resume read in any layout.",
    )
    importing.add_argument("source", type=Path, help="directory that was given to save_checkpoint, or one of its tags")
    importing.add_argument("target", type=Path, help="directory of checkpoints to write to")
    importing.add_argument("--tag", help="the tag to import (default: the one that the file `latest` names)")
    importing.add_argument("--weights-only", action="store_true", help="leave out the optimizer's state")
    importing.set_defaults(run="ckpt:import_foreign")

    export = actions.add_parser(
        "export",
        help="write the weights as a Hugging Face directory",
        description="Write a directory that from_pretrained accepts, for a model of parallel3d.models; for any other model, or "
        "with --plain, write safetensors under the model's own names. With --format dcp, write the weights and the optimizer's "
        "state for torch.distributed.checkpoint.load.",
    )
    export.add_argument("checkpoint", type=Path, help=_CHECKPOINT)
    export.add_argument("directory", type=Path, help="directory to write; it must not exist or must be empty")
    export.add_argument("--dtype", choices=_SAVED_DTYPES, help="dtype of floating-point tensors (default: as saved)")
    export.add_argument("--masters", action="store_true", help="write the fp32 master weights, if there are any")
    export.add_argument("--plain", action="store_true", help="use the model's own names")
    export.add_argument("--format", choices=["safetensors", "dcp"], default="safetensors", help="default: safetensors")
    export.set_defaults(run="ckpt:export")

    diff = actions.add_parser("diff", help="compare the tensors of two checkpoints; the exit code is 1 if they differ")
    diff.add_argument("first", type=Path, help=_CHECKPOINT)
    diff.add_argument("second", type=Path)
    diff.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative difference that passes (default: 0)"
    )
    diff.set_defaults(run="ckpt:diff")


def _add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="find the best layout of a model on a cluster",
        description="Rank the layouts in which a model can be trained on a cluster, by the step time predicted from the "
        "program that would run; no GPU is needed. Writes a configuration, each rank's device, a start script and a report.",
    )
    parser.set_defaults(run="start_plan:run")
    option = parser.add_argument
    option(
        "--model",
        metavar="MODEL",
        help="a Hugging Face directory or a name in the hub's local cache; script.py:FUNCTION, as for p3d check; or one of "
        + ", ".join(PRESETS),
    )
    option(
        "--cluster",
        metavar="CLUSTER",
        help='a YAML file, or hosts and GPUs such as "8xH100" and "128x8xH100" (default: the host as --measure found it)',
    )
    number = parser.add_number
    number("--global-batch", noun="a number of samples", help="samples of a step, over all ranks")
    number("--seq", noun="a number of tokens", help="tokens of a sample (default: the most that the model takes)")
    option("--config", metavar="FILE", help="configuration of every layout: precision, optimizer, ...")
    number("--top", noun="a number of layouts", default=5, help="layouts to list (default: 5)")
    reserve = "share of each device's memory that a layout must leave free (default: 5%%)"
    option("--reserve", type=_share, default=0.05, metavar="SHARE", help=reserve)
    option(
        "--auto",
        action="store_true",
        help='plan schedule "auto" for all listed layouts, however long that takes; for the best one it is planned anyway if '
        "its pipeline is short",
    )
    option("--explain", metavar="LAYOUT", help='compare one layout, such as "pp4,dp2", with the winner')
    option("--out", type=Path, default="plan", metavar="DIR", help="directory of the output (default: plan)")
    option(
        "--measure",
        nargs="?",
        const="",
        metavar="FILE",
        help="first measure this host's GPUs and links, store them in FILE and plan for them, with the model's layers measured "
        "on one GPU; without --model, only measure",
    )
    runs: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "RUN"}
    option("--calibrate", **runs, help="correct the predictions by these recorded runs")
    option("--compare", **runs, help="print predicted and measured values of these runs, and end")
    option("--calibration", metavar="FILE", help="corrections that an earlier --calibrate wrote")


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write a page about a training",
        description="Write one HTML page, which needs no network, about a training with run_record.directory: loss, "
        "throughput, memory by rank, the timeline of a step measured and planned, and failures.",
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="the run_record.directory of the training")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")
    parser.add_argument("--plan", type=Path, metavar="DIR", help="output of p3d plan, whose timeline is shown")
    parser.add_argument(
        "--serve",
        nargs="?",
        const=8000,
        type=int,
        metavar="PORT",
        help="serve the page live, to browsers on this host only (default: 8000)",
    )
    parser.set_defaults(run="report:run")


def _add_trace(commands: Any) -> None:
    parser = commands.add_parser(
        "trace",
        help="merge the traces of all ranks into one",
        description="Merge the traces that engine.profile wrote on all ranks into one, which ui.perfetto.dev opens.",
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN", help="directory with trace-RANK.json.gz")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/trace.json.gz)")
    parser.set_defaults(run="report:trace")


def _share(text: str) -> float:
    """Parse "5%" or "0.05"."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a share: give a number such as 0.05, or 5%") from None


def _add_kernels(commands: Any) -> None:
    parser = commands.add_parser(
        "build-kernels",
        help="compile the CUDA kernels",
        description="Compile the CUDA kernels by nvcc, for A100, H100 and later GPUs, into the user's cache, unless they "
        "are there already. No GPU is needed.",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for them (default: the user's cache)")
    parser.set_defaults(run="kernels:build_kernels")
    parser = commands.add_parser(
        "doctor",
        help="say which kernels run here, and why others don't",
        description="Say for each kernel whether it runs on this host, or why it doesn't and what to do. The "
        "exit code is 1 if a kernel that the configuration turns on can't run.",
    )
    parser.add_argument("--config", metavar="FILE", help="the configuration that a training will have")
    for name, what in _COUNTS.items():
        parser.add_number(f"--{name}", noun="a number of ranks", help=what)
    parser.set_defaults(run="kernels:diagnose")


def _add_deepspeed(commands: Any) -> None:
    parser = commands.add_parser(
        "deepspeed",
        help="let libraries that import deepspeed use this package",
        description="Install a distribution named deepspeed into this environment, or remove it. Imports of deepspeed "
        "then give this package's modules, for libraries such as transformers and accelerate. An installed DeepSpeed is never "
        "replaced.",
    )
    parser.add_argument("action", choices=["install", "remove"])
    parser.set_defaults(run="deepspeed:run")


def _add_completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the shell's completion of p3d and parallel3d",
        description='Print the completion of p3d and parallel3d for a shell: eval "$(p3d completion bash)" turns it on.',
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    parser.set_defaults(run="completion:run")
