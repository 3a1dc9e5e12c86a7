"""Compares offload, ZeRO stages, precisions, links and memory on one host: five tables, and one JSON file.

python tools/bench/zero_tables.py --model 1b --nvme_path /local --out zero.json
python tools/bench/zero_tables.py --model path/to/Qwen2.5-0.5B --seq 4096 --tables 1,5
python tools/bench/zero_tables.py --cpu --steps 2                         # the model "tiny" on gloo

Each row is a training of its own by torchrun, on this framework and on DeepSpeed where it is installed. Rows that can't run on
this host, fail or take too long are printed with the reason. The file is written after each row: run.py's keys, and
"zero_tables": [{"table", "row", "framework", "status", "wall_s"}, ...] with "result" (of zero_run.py) or "error". Exits
with 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from host import cuda_version, find_gpus
from results import as_text
from run import ROOT, describe_run, environment, error_lines, find_result, run_process, split_names, start_command
from zero_rows import FRAMEWORKS, STEPS, TITLES, Host, Row, obstacle, rows, table

from parallel3d.config import read
from parallel3d.errors import ConfigError

SCRIPT = ROOT / "tools" / "bench" / "zero_run.py"
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Workload:
    """The workload of all rows. seq: of all tables but the second. steps: 0 for each table's own number."""

    model: str
    seq: int
    processes: int
    micro_batch: int
    micro_batches: int
    warmup: int
    steps: int


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="1b", help="tiny, 1b, 3b, 7b, or a Hugging Face directory; default on the CPU: tiny"
    )
    parser.add_argument("--seq", type=int, default=0, help="tokens of a sample (default: the model's longest sequence)")
    parser.add_argument("--tables", default="1,2,3,4,5")
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--processes", type=int, default=0, help="replicas (default: one for each GPU; 2 on the CPU)")
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--micro_batches", type=int, default=1, help="micro-batches a step, of each replica")
    parser.add_argument("--steps", type=int, default=0, help="timed steps (default: 20 or 50, as the table has them)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--nvme_path", default="", metavar="DIR", help="for state on disk")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a row may take")
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("zero.json"))
    return parser.parse_args()


def configuration(row: Row, work: Workload) -> dict[str, Any]:
    """Return the configuration of a row, the same for both frameworks."""
    # At its default, all layers of the model "tiny" would stay whole.
    tiny = {"stage3_param_persistence_threshold": 0} if work.model == "tiny" else {}
    schedule = {"warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 10_000}
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "bf16": {"enabled": True},
        "zero_optimization": {"overlap_comm": True, **tiny, **row.zero},
        **row.config,
    }


def refusal(config: Mapping[str, Any]) -> str:
    """Return why this framework would not train as a configuration says, or ""."""
    try:
        missing = [line for line in read(config).warnings if line.startswith("not yet supported")]
    except ConfigError as error:
        return str(error)
    return "; ".join(missing)


def run_row(row: Row, framework: str, work: Workload, env: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """Train; return the status with the result or the error's lines."""
    seq = max(1, work.seq // 8) if row.table == 2 else work.seq
    config, steps = json.dumps(configuration(row, work)), work.steps or STEPS[row.table]
    arguments = {"framework": framework, "model": work.model, "seq": seq, "warmup": work.warmup, "steps": steps}
    words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
    command = start_command([str(SCRIPT), *words, "--config", config], work.processes)
    status, output = run_process(command, {**env, **row.environment}, timeout)
    result = find_result(output)
    if result is None:
        late = [f"no result after {timeout:.0f} s"] if status == "timed out" else []
        return {"status": "failed" if status == "ok" else status, "error": [*late, *error_lines(output)]}
    samples = work.micro_batch * work.micro_batches * work.processes
    return {"status": "ok", "result": result | {"samples_s": samples / result["step_s"]}}


def describe_workload(args: argparse.Namespace, gpus: list[dict[str, str]]) -> Workload:
    """Return what all rows train on this host."""
    from zero_run import vocabulary_and_length  # not at the top: it imports the framework

    model = "tiny" if not gpus and args.model == "1b" else args.model
    processes = args.processes or len(gpus) or 2
    seq = args.seq or vocabulary_and_length(model)[1]
    return Workload(model, seq, processes, args.micro_batch, args.micro_batches, args.warmup, args.steps)


def main() -> int:
    """Run all rows, print the tables; 0 unless a row failed."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    work, env = describe_workload(args, gpus), environment(gpus)
    if gpus and work.processes > len(gpus):
        raise SystemExit(
            f"zero_tables.py: --processes {work.processes}, but there are {len(gpus)} GPUs; give at most these"
        )
    has_infiniband = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    host = Host(work.processes, bool(gpus), args.nvme_path, has_infiniband)
    missing = {name: "not installed" for name in split_names(args.frameworks) if find_spec(name) is None}
    run = describe_run(args, gpus, work, "zero_tables.py") | {"missing": missing}
    records: list[dict[str, Any]] = []
    for row in rows(args.nvme_path):
        if str(row.table) not in split_names(args.tables):
            continue
        for framework in split_names(args.frameworks):
            if framework in missing:
                continue
            start, reason = time.monotonic(), obstacle(row, framework, host)
            if not reason and framework == "parallel3d":
                reason = refusal(configuration(row, work))
            found = (
                {"status": "not run", "error": [reason]} if reason else run_row(row, framework, work, env, args.timeout)
            )
            named = {"table": row.table, "row": row.name, "framework": framework}
            records.append(named | {"wall_s": round(time.monotonic() - start, 1)} | found)
            said = (
                f"{found['result']['step_s']:.3f} s/step"
                if "result" in found
                else f"{found['status']}: {found['error'][0]}"
            )
            print(f"table {row.table}, {row.name}, {framework}: {said[:300]}", flush=True)
            args.out.write_text(json.dumps(run | {"zero_tables": records}, indent=1) + "\n", encoding="utf-8")
    for number, title in TITLES.items():
        if len(lines := table(records, number)) > 1:
            print("", f"{number}. {title}", as_text(lines), sep="\n")
    print(*(f"{name}: {reason}" for name, reason in missing.items()), sep="\n")
    return int(any(record["status"] not in ("ok", "not run") for record in records))


if __name__ == "__main__":
    sys.exit(main())
