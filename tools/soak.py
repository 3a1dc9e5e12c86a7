"""Plants faults in a training at random moments, and checks that nothing acknowledged is lost.

python tools/soak.py --rounds 200 --layout pp2,dp2

Several may run on one host at a time, each with its own --seed: ports and folders are their own.

A round is one of --faults, on a random rank:

- kill: SIGKILL during steps; save: SIGKILL during a save; stop: SIGSTOP.
- join: SIGKILL, and a rank never joins the next start.
- disk: no file may grow during one save, as on a full disk; clock: the rank's clock is set back by days.

The launcher restarts the training after the first four, and it goes on by engine.resume: from the last save that was
acknowledged, or from a later one. After the others it goes on by itself. Every step that is run again must have the loss, bit
for bit, that it had before; no process may be left at the end; and what is on the disk must be whole. Exits with 1, saying what
was wrong, if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import parallel3d
from parallel3d import atomic_write
from parallel3d.checkpoint import Reader, complete_checkpoints
from parallel3d.config import parse_layout
from parallel3d.pipe import LayerSpec, PipelineModule

ENDING, HARMLESS = ("kill", "save", "stop", "join"), ("disk", "clock")
TIMEOUT = 5.0  # seconds after which a stopped rank is late
JOIN = 60.0  # seconds that ranks wait for each other at a start
ABSENT = 5.0  # the same at a start at which one never joins
QUIET = 200.0  # seconds without progress after which the run is given up
LEFT = 30.0  # seconds that processes have to be gone


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="number of faults")
    parser.add_argument("--faults", nargs="+", choices=ENDING + HARMLESS, default=ENDING + HARMLESS)
    parser.add_argument("--layout", default="pp2,dp2")
    parser.add_argument("--seed", type=int, default=0, help="of moments and ranks")
    parser.add_argument(
        "--longest", type=float, default=1.0, help="seconds from a start's first step to the fault, at most"
    )
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no further fault is planted"
    )
    parser.add_argument("--out", type=Path, help="file for the summary as JSON")
    parser.add_argument("--directory", type=Path, help="where checkpoints and notes go (default: a temporary one)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def note(path: Path, **what: Any) -> None:
    """Write a line of JSON, which another process may read at once."""
    with path.open("a") as file:
        file.write(json.dumps(what) + "\n")


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines; a killed process may have written half of the last."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def make_engine(args: argparse.Namespace, attempt: int) -> parallel3d.Engine:
    """A small model with dropout; every other start saves while training goes on."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # a start before the first save is whole must draw the same dropout
    layout = parse_layout(args.layout)
    config = {
        "train_batch_size": 4 * layout.replicas,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": layout.zero or 1},
        "pipeline": {"stages": layout.stages},
        "checkpoint": {"keep_last": 2, "async_save": attempt % 2 == 1},
        "failures": {"timeout_s": TIMEOUT, "directory": str(args.directory)},
        "steps_per_print": None,
    }
    widths = [LayerSpec(nn.Linear, 256, 256), LayerSpec(nn.Dropout, 0.1), LayerSpec(nn.Tanh)]
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), torch.zeros(64, 256)
    )
    module = PipelineModule(widths * 4, loss_fn=nn.functional.mse_loss, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=module, config=config, training_data=data)
    return engine


def work(args: argparse.Namespace) -> None:
    """Train one rank until the step after which the file `enough` exists."""
    attempt, directory = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), args.directory
    absent = directory / f"absent.{attempt}"
    if absent.exists() and absent.read_text() == os.environ["RANK"]:
        time.sleep(QUIET)
    parallel3d.init_distributed(timeout=timedelta(seconds=ABSENT if absent.exists() else JOIN))
    engine = make_engine(args, attempt)
    engine.resume(directory / "saved")
    notes, first = directory / "notes.jsonl", engine.global_rank == 0
    if first:
        note(notes, resumed=engine.global_steps, attempt=attempt)
    (directory / f"pid.{engine.global_rank}").write_text(f"{attempt} {os.getpid()}")
    pending: int | None = None
    enough = False
    while not enough:
        loss = engine.train_batch()
        step = engine.global_steps
        if first:
            note(notes, step=step, loss=float(loss).hex())
        if step % 3 == 0:
            acknowledged = pending if engine.config.checkpoint.async_save else step
            if save(engine, directory, obey(directory / f"order.{engine.global_rank}")):
                pending = step  # an asynchronous one is on the disk when the next save begins
                if first and acknowledged is not None:
                    note(notes, saved=acknowledged)
            else:
                pending = None
                if first:
                    note(notes, refused=step)
        told = [(directory / "enough").exists()]
        parallel3d.comm.broadcast_object_list(told, 0)
        enough = told[0]
    with suppress(parallel3d.errors.CheckpointError):  # of a disk that was full at the end
        engine.checkpoints.wait()
    parallel3d.comm.destroy()


def obey(order: Path) -> bool:
    """Carry out what this rank is told, if anything. Returns whether no file may grow during the next save."""
    if not order.exists():
        return False
    word = order.read_text()
    order.unlink()
    if word == "clock":
        before = time.time
        time.time = lambda: before() - 3 * 86400
    return word == "disk"


def save(engine: parallel3d.Engine, directory: Path, is_full: bool) -> bool:
    """Save; return whether neither this save nor the one before it has failed."""
    mark = directory / f"saving.{engine.global_rank}"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    mark.touch()
    try:
        if is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        engine.save_checkpoint(directory / "saved")
        for thread in threading.enumerate() if is_full else ():
            if thread.name == "parallel3d saves":
                thread.join()  # its error stays until the next save, where all ranks raise it
        return True
    except parallel3d.errors.CheckpointError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        mark.unlink()


def wait_for(args: argparse.Namespace, attempt: int, job: subprocess.Popen[bytes], ranks: int) -> dict[int, int]:
    """Wait until a start has taken a step. Return its processes by rank. Raises SystemExit if the training can't get there."""
    end = time.monotonic() + QUIET
    while time.monotonic() < end:
        if job.poll() is not None:
            raise SystemExit(f"the training ended with exit code {job.returncode} at start {attempt}")
        notes = read_notes(args.directory / "notes.jsonl")
        if any(n.get("attempt", 0) > attempt for n in notes):
            raise SystemExit(f"start {attempt} ended by itself")
        places = [k for k, n in enumerate(notes) if n.get("attempt") == attempt]
        pids = {rank: args.directory / f"pid.{rank}" for rank in range(ranks)}
        texts = {rank: path.read_text().split() for rank, path in pids.items() if path.exists()}
        own = {rank: int(text[1]) for rank, text in texts.items() if len(text) == 2 and int(text[0]) == attempt}
        if places and len(own) == ranks and any("step" in n for n in notes[places[0] :]):
            return own
        time.sleep(0.02)
    raise SystemExit(f"no step within {QUIET:.0f} s of start {attempt}")


def wait_for_a_save(notes: Path) -> None:
    """Return when something has been saved: on a busy machine no start may have come so far before its kill."""
    end = time.monotonic() + QUIET
    while not any("saved" in entry for entry in read_notes(notes)) and time.monotonic() < end:
        time.sleep(0.02)


def check(notes: list[dict[str, Any]], restarts: int) -> tuple[dict[str, int], list[str]]:
    """Return what the notes count up to, and the errors that they show."""
    problems, losses, saved = [], {}, 0
    counts = dict.fromkeys(("starts", "steps", "saves acknowledged", "saves refused", "lost", "wrong"), 0)
    for entry in notes:
        if "resumed" in entry:
            counts["starts"] += 1
            if entry["resumed"] < saved:
                counts["lost"] += 1
                problems.append(f"start {entry['attempt']} went on from step {entry['resumed']}, but {saved} was saved")
        elif "saved" in entry:
            counts["saves acknowledged"] += 1
            saved = max(saved, entry["saved"])
        elif "refused" in entry:
            counts["saves refused"] += 1
        elif losses.setdefault(entry["step"], entry["loss"]) != entry["loss"]:
            counts["wrong"] += 1
            problems.append(
                f"step {entry['step']} had loss {losses[entry['step']]}, and {entry['loss']} after a restart"
            )
    counts["steps"] = len(losses)
    if counts["starts"] != restarts + 1:
        problems.append(f"{restarts} restarts, but {counts['starts']} times the training went on")
    if not saved:
        problems.append("nothing was ever saved")
    return counts, problems


def plant(fault: str, rank: int, directory: Path, attempt: int, processes: dict[int, int], draw: random.Random) -> None:
    """Plant a fault in a rank; of those that don't end the training, return when the rank has met it."""
    end = time.monotonic() + QUIET
    if fault in HARMLESS:
        order = directory / f"order.{rank}"
        with atomic_write.atomic_path(order) as part:
            part.write_text(fault)
        while order.exists() and time.monotonic() < end:
            time.sleep(0.02)
        if order.exists():
            raise SystemExit(f"no save of rank {rank} within {QUIET:.0f} s of start {attempt}")
        return
    if fault == "save":
        while not (directory / f"saving.{rank}").exists() and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.02))
    if fault == "join":
        (directory / f"absent.{attempt + 1}").write_text(str(draw.choice(sorted(processes))))
    os.kill(processes[rank], signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def plant_all(
    args: argparse.Namespace, job: subprocess.Popen[bytes], ranks: int, planted: Counter[str]
) -> dict[int, int]:
    """Plant a fault in each round, and count how many of each. Return the last start's processes by rank."""
    draw, attempt, end = random.Random(args.seed), 0, time.monotonic() + args.limit
    processes = wait_for(args, attempt, job, ranks)
    for _ in range(args.rounds):
        if time.monotonic() > end:
            break
        time.sleep(draw.uniform(0, args.longest))
        fault = draw.choice(args.faults)
        plant(fault, draw.randrange(ranks), args.directory, attempt, processes, draw)
        attempt += 2 if fault == "join" else int(fault in ENDING)
        processes = wait_for(args, attempt, job, ranks)
        planted[fault] += 1  # and survived
    return processes


def train_through(args: argparse.Namespace, planted: Counter[str]) -> list[str]:
    """Train while faults are planted, to the end. Return what was wrong with the processes; counts the faults in `planted`."""
    ranks = parse_layout(args.layout).world_size
    own = [__file__, "--worker", "--layout", args.layout, "--directory", str(args.directory)]
    launcher = ["-m", "parallel3d.launcher", "--num_procs", str(ranks), "--max_restarts", str(2 * args.rounds)]
    with (args.directory / "output.txt").open("wb") as output:
        job = subprocess.Popen([sys.executable, *launcher, *own], stdout=output, stderr=output)
    try:
        processes = plant_all(args, job, ranks, planted)
        wait_for_a_save(args.directory / "notes.jsonl")
        (args.directory / "enough").touch()
        if code := job.wait(QUIET):
            return [f"the training ended with exit code {code}"]
    except SystemExit as stuck:
        return [str(stuck)]
    except subprocess.TimeoutExpired:
        return [f"the training did not end within {QUIET:.0f} s after its last step"]
    finally:
        job.terminate()
        job.wait()
    end = time.monotonic() + LEFT
    while any(Path(f"/proc/{pid}").exists() for pid in processes.values()) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"process {pid} of rank {r} is left" for r, pid in processes.items() if Path(f"/proc/{pid}").exists()]


def summary(planted: Counter[str], counts: dict[str, int], problems: list[str]) -> str:
    """A table of what was planted and what came of it, then what was wrong."""
    rows = [*(f"  {fault:<17} {number:5}" for fault, number in sorted(planted.items()))]
    rows += [f"{name:<19} {number:5}" for name, number in counts.items()]
    return "\n".join([f"{'rounds':<19} {planted.total():5}", *rows, *(problems or ["nothing is lost"])])


def main() -> int:
    """Start, kill, check."""
    args = parse_arguments()
    if args.worker:
        work(args)
        return 0
    planted = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="soak_") as temporary:
        args.directory = args.directory or Path(temporary)
        problems = train_through(args, planted)
        restarts = sum(planted[fault] for fault in ENDING)
        counts, more = check(read_notes(args.directory / "notes.jsonl"), restarts)
        whole = complete_checkpoints(args.directory / "saved")
        problems += more + [problem for found in whole for problem in Reader(found.path).verify_all()]
        if not whole:
            problems.append("no complete checkpoint is left")
        print(summary(planted, counts, problems))
        if args.out:
            args.out.write_text(json.dumps({"rounds": planted, **counts, "problems": problems}, indent=1) + "\n")
        if problems:
            print((args.directory / "output.txt").read_text()[-4000:], file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
