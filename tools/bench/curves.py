"""Loss curves of cases beside those of plain PyTorch on the same data: a JSON file and a plot.

python tools/bench/curves.py --size 1b --cases dp2-zero2,pp2-zb-h1-compile-cudnn --out curves.json --plot loss_curves.svg
python tools/bench/table.py curves.json --into docs/benchmarks.md --name loss_curves
python tools/bench/curves.py --redraw tools/bench/results/2026-11-22-curves-1b.json --plot docs/loss_curves.svg

The plain runs (curve_run.py) are one in fp32, and some in bf16 that differ in rounding alone: by how much they differ is the
noise. Initial weights depend on the list of layers: where a case has tensor parallelism, all runs have layers that can be
sharded; half is for all cases or none. Exits with 1 when a case has no curve, or one that isn't within noise (deviations.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cases import OWN, Case, CaseError, Workload, command_of, parse_case
from deviations import deviation_table, verdict
from host import cuda_version, find_gpus
from results import as_text
from run import describe_run, environment, error_lines, find_result, run_process, split_names, start_command
from table import selected

CASES = "dp2-zero1,dp2-zero2-permicro,pp2-zb-h1,pp2-zbv,pp2-zb-looped4-cap1.5"
WORKER = str(Path(__file__).with_name("curve_run.py"))
# Of "1b" at 1e-4 the losses of some batches jump by a nat, and by how much depends on rounding: 0.17 nats, 1.8 at 3e-4.
TINY_LR, LR = 3e-3, 3e-5
PLAIN = 6  # processes, one for each of curve_run.PLAIN, which only a process with PyTorch can read


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b", help="of the model; always tiny on the CPU")
    parser.add_argument(
        "--cases", default=CASES, help="separated by commas; all with --micro_batches micro-batches a step"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--micro_batches", type=int, default=8, help="a step, of all replicas together")
    parser.add_argument("--lr", type=float, help=f"default: {TINY_LR:g} for tiny, else {LR:g}")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a case may take, and the plain runs")
    parser.add_argument(
        "--without_plain", action="store_true", help="compare cases in fp8 with the others, and train no plain runs"
    )
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("curves.json"))
    parser.add_argument("--plot", type=Path, help="an image; the suffix says which kind")
    parser.add_argument("--redraw", type=Path, help="train nothing: --plot the curves of this file")
    args = parser.parse_args()
    if args.redraw and not args.plot:
        parser.error("--redraw needs --plot, the picture to draw")
    return args


def commands_of(cases: list[Case], args: argparse.Namespace, size: str) -> dict[str, tuple[list[str], int]]:
    """(command, processes) of the plain runs (""), and of each case. Raises CaseError."""
    lr = args.lr or (TINY_LR if size == "tiny" else LR)
    settings = json.dumps({"optimizer": {"params": {"lr": lr}}})
    sliced = ["--sliced_layers"] if any(case.tp > 1 for case in cases) else []
    halves = {"half" in case.options for case in cases}
    if len(halves) > 1:
        raise CaseError(
            "initial weights depend on the list of layers; run cases with half and others in separate calls"
        )
    plain = parse_case("dp1-half" if True in halves else "dp1")
    commands = {}
    for name, case in {"": plain, **{case.name: case for case in cases}}.items():
        if case.framework != OWN or args.micro_batches % case.dp:
            raise CaseError(
                f"case {name!r}: only this framework's, whose replicas share {args.micro_batches} micro-batches"
            )
        work = Workload(size, args.micro_batch, args.micro_batches // case.dp, 0, args.steps, settings)
        command = [WORKER, *([] if name else ["--plain"]), *command_of(case, work, None)[1:], *sliced]
        commands[name] = (command, case.world_size if name else PLAIN)
    return commands


def train(
    name: str, command: list[str], processes: int, env: Mapping[str, str], timeout: float
) -> dict[str, list[float]]:
    """The curves of a command, by their names or that of the case; none, and its errors printed, where it fails."""
    start = time.monotonic()
    status, output = run_process(start_command(command, processes), env, timeout)
    result = find_result(output)
    if result is None:
        print(f"{name or 'plain runs'}: {status}", *error_lines(output), sep="\n    ", flush=True)
        return {}
    print(f"{name or 'plain runs'} ({time.monotonic() - start:.0f} s)", flush=True)
    return {name or own: [round(loss, 5) for loss in curve] for own, curve in result["curves"].items()}


def plain_name(case: Case) -> str:
    """Return the layout of a case in words."""
    axes = {"stages": case.pp, "replicas": case.dp, "tensor-parallel ranks": case.tp}
    words = [f"{size} {axis}" for axis, size in axes.items() if size > 1] or ["one process"]
    words += [f"schedule {case.schedule}"] * (case.pp > 1) + [f"ZeRO-{case.zero}"] * (case.zero > 0)
    options = {"sp": "sequence-parallel", "bf16acc": "bf16 gradient sums", "fp8": "linears in fp8"}
    return ", ".join(words + [text for option, text in options.items() if option in case.options])


def plot(run: Mapping[str, Any], picture: Path) -> None:
    """Draw the loss of one process in plain PyTorch, and how far other layouts are from it, over the band of bf16's noise.

    Drawn for the width of a page, 830 pixels, with text of 12 pixels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # The same curves make the same file.
    matplotlib.rcParams |= {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 9}
    plain = [run["curves"][name] for name in run["plain_bf16"]]
    steps = range(1, len(plain[0]) + 1)
    left, right = (figure := Figure(figsize=(830 / 96, 4.2), layout="constrained")).subplots(1, 2, width_ratios=(2, 3))
    left.plot(steps, plain[0], color="black", linewidth=1.2)
    left.set_title("loss, all runs (they lie on one line)", fontsize=9)
    bands = [(min(losses) - one, max(losses) - one) for one, *losses in zip(plain[0], *plain, strict=True)]
    low, high = zip(*bands, strict=True)
    right.fill_between(steps, low, high, color="0.8", label=f"noise: {len(plain)} runs in bf16, other rounding")
    for name in run["cases"]:
        curve = run["curves"][name]
        left.plot(steps, curve, linewidth=0.8)
        differences = [a - b for a, b in zip(curve, plain[0], strict=True)]
        right.plot(steps, differences, linewidth=1, label=plain_name(parse_case(name)))
    right.set_title(f"difference from {run['plain_bf16'][0]}", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.set_ylabel("nats a token")
        axes.grid(alpha=0.3)
    figure.legend(fontsize=9, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> int:
    """Train all, write, print; 0 if every case has a curve within noise."""
    args = parse_arguments()
    if args.redraw:
        plot(selected(json.loads(args.redraw.read_text(encoding="utf-8"))), args.plot)
        return 0
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    size = args.size if gpus else "tiny"
    names = split_names(args.cases)
    try:
        commands = commands_of([parse_case(name) for name in names], args, size)
    except CaseError as error:
        raise SystemExit(f"curves.py: {error}") from None
    env = environment(gpus)
    plainly, curves = commands.pop(""), {}
    if not args.without_plain:
        curves = train("", *plainly, env, args.timeout)
    for name, command in commands.items():
        curves |= train(name, *command, env, args.timeout)
    in_fp8 = [name for name in names if "fp8" in parse_case(name).options]
    compared = in_fp8 if args.without_plain else names
    plain = [name for name in curves if name not in compared and name != "plain fp32"]
    if not plain:
        raise SystemExit("curves.py: no run to compare with")
    work = Workload(size, args.micro_batch, args.micro_batches, 0, args.steps)
    run = describe_run(args, gpus, work, "curves.py") | {"plain_bf16": plain}
    run |= {"cases": [name for name in compared if name in curves], "curves": curves}
    args.out.write_text(json.dumps(run) + "\n", encoding="utf-8")
    print("", as_text(deviation_table(run)), "", verdict(run), sep="\n")
    if args.plot:
        plot(run, args.plot)
    return 0 if len(run["cases"]) == len(compared) and "NOT" not in verdict(run) else 1


if __name__ == "__main__":
    sys.exit(main())
