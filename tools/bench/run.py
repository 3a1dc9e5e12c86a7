"""Runs this framework and its peers in turn on one host, and compares them: one JSON file, one table.

python tools/bench/run.py --cases dp4-zero1,dp4-zero2 --peers PEERS --peer_cases ds-dp4-zero1,ds-dp4-zero2
python tools/bench/run.py --cpu --cases pp2-1f1b,dp2-zero1 --micro_batches 4

What a case's name may say is in cases.py. PEERS is a directory of one script a peer, each of which prints `RESULT {json}`.
A case that fails or takes too long is recorded with its last error lines, and the others go on. The file is written after
each case. Exits with 1 when a case has no result or losses disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Last, so that a package that PYTHONPATH names goes before this checkout's.
sys.path.append(str(Path(__file__).parents[2]))

from cases import Case, CaseError, Workload, command_of, parse_case
from host import cuda_version, describe_hardware, find_commit, find_gpus, find_versions
from results import agreement, as_text, describe_agreement, make_table, rooflines

ROOT = Path(__file__).parents[2]
OWN_CASES = "dp4-zero1,dp4-zero2,pp2dp2-zero1,pp2dp2-zero2,pp4-1f1b,pp4-zb-h1,pp4-zbv,pp4-interleaved2"
PEER_CASES = "ds-dp4-zero1,ds-dp4-zero2,ds-pp2dp2-zero1,ds-pp4,torch-pp4-1f1b,torch-pp4-zbv"
SHORTEST = 20.0  # seconds: with less left of the budget a case isn't started
GRACE = 10.0  # seconds that a case has to end, after its result or after it was asked to
POLL = 0.2  # seconds between two looks at a case


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="7b", help="of the model: tiny, 125m, 1b, 3b or 7b; always tiny on the CPU")
    parser.add_argument("--cases", default=OWN_CASES, help="this framework's, separated by commas, in their order")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the peers' scripts; without it none is run")
    parser.add_argument("--peer_cases", "--peer-cases", default=PEER_CASES, help="the peers', run after ours")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--micro_batch", type=int, default=1, help="samples")
    parser.add_argument("--micro_batches", type=int, default=16, help="micro-batches a step, of each replica")
    parser.add_argument("--config", default="", help="JSON merged into this framework's configuration, in every case")
    parser.add_argument(
        "--weights", default="", help="JSON list of a number a layer, for cases with the option weights"
    )
    parser.add_argument("--baseline", default="", help="cases to compare with, first choice first; default: the peers")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds a case may take")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds all may take; the rest is skipped")
    parser.add_argument("--commit", help="of the code, where git can't say")
    parser.add_argument("--cpu", action="store_true", help="use no GPU")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    if args.steps < 1 or args.micro_batches < 1 or args.micro_batch < 1 or args.warmup < 0:
        parser.error("--steps, --micro_batch and --micro_batches are at least 1, --warmup at least 0")
    return args


def split_names(text: str) -> list[str]:
    """'a,b' -> ['a', 'b']; nothing for ''."""
    return [name.strip() for name in text.split(",") if name.strip()]


def environment(gpus: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the environment of every case: the same number of threads, the visible GPUs, the path of this package."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (env.get("PYTHONPATH", ""), str(ROOT)) if p)
    env |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "8" if gpus else "1"}
    if gpus:
        env |= {"TORCH_CUDA_ARCH_LIST": gpus[0]["compute_cap"], "NCCL_DEBUG": env.get("NCCL_DEBUG", "WARN")}
    else:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def start_command(command: Sequence[str], num_processes: int) -> list[str]:
    """torchrun on a port of its own: one that the case before used may still be taken."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(num_processes)]
    return [*torchrun, "--master_addr", "127.0.0.1", "--master_port", str(port), *command]


def run_process(command: Sequence[str], env: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """(status, output) of a command: "ok" if it exits with 0, "failed", or "timed out"; no process of its is left.

    After a line with a result it may take GRACE seconds to end: not all leave their process groups in order.
    """
    with tempfile.TemporaryFile() as log:

        def output() -> str:
            # By position: the processes write where this file's own offset stands.
            return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")

        process = subprocess.Popen(command, env=dict(env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        end = time.monotonic() + timeout
        try:
            while process.poll() is None and time.monotonic() < end:
                time.sleep(POLL)
                if find_result(output()) is not None:
                    end = min(end, time.monotonic() + GRACE)
            status = {None: "timed out", 0: "ok"}.get(process.poll(), "failed")
        finally:
            if process.poll() is None:
                stop(process)
        return status, output()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its descendants, which may have sessions of their own, and wait until their memory is free."""
    family = descendants(process.pid)
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    family = [pid for pid in family if is_running(pid)]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + GRACE
    while any(map(is_running, family)) and time.monotonic() < end:
        time.sleep(POLL)


def is_running(pid: int) -> bool:
    """Return whether a process runs, rather than only waiting for its exit code to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have, as Linux lists them."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def find_result(output: str) -> dict[str, Any] | None:
    """Return the JSON of the last line `RESULT {json}`."""
    lines = re.findall(r"^RESULT (\{.*\})\s*$", output, re.MULTILINE)
    return json.loads(lines[-1]) if lines else None


def error_lines(output: str) -> list[str]:
    """Return up to 6 different lines that name an error, without their rank; else the last 6 and the exit code."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line.rstrip()) for line in output.splitlines() if line.strip()]
    errors = [line for line in dict.fromkeys(lines) if re.match(r"\S*(Error|Exception)\b", line)]
    errors = [line for line in errors if "ChildFailedError" not in line]
    codes = [line.strip() for line in lines if re.match(r"\s+exitcode\s+:", line)]
    return errors[:6] or [*lines[-6:], *codes[:1]]


def run_case(case: Case, command: Sequence[str], env: Mapping[str, str], timeout: float) -> dict[str, Any]:
    """The record of a case; see results.py."""
    start = time.monotonic()
    status, output = run_process(start_command(command, case.world_size), env, timeout)
    result = find_result(output)
    if result is not None:
        status = "ok"  # what it measured counts, even if it can't leave its process group in order
    elif status == "ok":
        status = "failed"
    record = make_record(case, status, round(time.monotonic() - start, 1))
    return record | ({"result": result} if result is not None else {"error": error_lines(output)})


def make_record(case: Case, status: str, wall_s: float = 0.0) -> dict[str, Any]:
    """A record without what came of it."""
    return {
        "case": case.name,
        "framework": case.framework,
        "layout": case.layout,
        "dp": case.dp,
        "zero": case.zero,
        "schedule": case.schedule,
        "status": status,
        "wall_s": wall_s,
    }


def show(record: Mapping[str, Any]) -> None:
    """A line about a case that has just ended; more if it failed."""
    result = record.get("result")
    said = f"{result['step_s']:.3f} s/step" if result else record["status"]
    print(f"{record['case']}: {said}   ({record['wall_s']:.0f} s)", flush=True)
    for line in record.get("error", []):
        print(f"    {line[:400]}", flush=True)


def describe_run(
    args: argparse.Namespace, gpus: list[dict[str, str]], work: object, script: str = "run.py"
) -> dict[str, Any]:
    """Return a run's JSON without its cases. work: the workload, a dataclass; of paths on the command line only the last part
    is kept: the rest says nothing."""
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": args.commit or find_commit(),
        "command": shlex.join(["python", f"tools/bench/{script}", *words]),
        "hardware": describe_hardware(gpus),
        "versions": find_versions(),
        "workload": vars(work),
    }


def main() -> int:
    """Run all cases; 0 if all have a result and their losses agree."""
    args = parse_arguments()
    gpus = find_gpus() if not args.cpu and cuda_version() else []
    size = args.size if gpus else "tiny"
    work = Workload(size, args.micro_batch, args.micro_batches, args.warmup, args.steps, args.config, args.weights)
    names = split_names(args.cases) + (split_names(args.peer_cases) if args.peers else [])
    try:
        cases = [parse_case(name) for name in names]
        commands = [command_of(case, work, args.peers and args.peers.resolve()) for case in cases]
    except CaseError as error:
        raise SystemExit(f"run.py: {error}") from None
    run, env = describe_run(args, gpus, work), environment(gpus)
    hardware = run["hardware"]
    print(f"{hardware['count']} x {hardware['name']}, commit {run['commit']}, model {work.size}", flush=True)
    records: list[dict[str, Any]] = []
    end = time.monotonic() + args.budget
    for case, command in zip(cases, commands, strict=True):
        timeout = min(args.timeout, end - time.monotonic())
        records.append(run_case(case, command, env, timeout) if timeout >= SHORTEST else make_record(case, "skipped"))
        show(records[-1])
        run |= {"cases": records, "agreement": agreement(records)}
        args.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    table = make_table(records, split_names(args.baseline))
    for heading, parts in rooflines(records):
        print("", heading, as_text(parts), sep="\n")
    print("", as_text(table), "", *describe_agreement(run["agreement"]), sep="\n")
    good = all(record["status"] == "ok" for record in records) and all(group["agree"] for group in run["agreement"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
