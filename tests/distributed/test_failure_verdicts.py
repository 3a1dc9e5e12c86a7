"""Whatever goes wrong on one rank: all ranks say the same, who it was and where, and end soon."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_ranks import Ended, FaultRanks
from torch import Tensor, nn
from warm import WarmProcess

import parallel3d
from parallel3d.checkpoint import save
from parallel3d.errors import ExecutionError, PeerError
from parallel3d.models import DecoderConfig, decoder
from parallel3d.models.generation import Request
from parallel3d.models.layers import DecoderLayer
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from parallel3d.schedule.instructions import Op

TIMEOUT_S = 1.5
MICRO_BATCHES = 4
LAYOUTS = {
    "1f1b": 1,
    "zb-h1": 2,
    "gpipe": 3,
}  # schedule -> ZeRO stage; of pp2 x dp2, whose pipelines are ranks 0, 2 and 1, 3
FAULTY_STEP = 2  # counted from 0: the first step is exempt from timeouts, and the second fills caches


class Widening(nn.Linear):
    """Returns more features than it should, from a forward on."""

    forwards, fails_at = 0, 10**9

    def forward(self, x: Tensor) -> Tensor:
        Widening.forwards += 1
        y = super().forward(x)
        return torch.cat([y, y], -1) if Widening.forwards > Widening.fails_at else y


def make_engine(schedule: str, **config: Any) -> parallel3d.DeepSpeedEngine:
    ends = TiedLayerSpec("ends", nn.Linear, 8, 8)  # for REDUCE_REPLICAS
    more = [LayerSpec(nn.Linear, 8, 8)] * (2 if LAYOUTS[schedule] == 3 else 0)  # weights to gather in every instruction
    module = PipelineModule(
        [ends, *more, LayerSpec(Widening, 8, 8), LayerSpec(nn.Linear, 8, 8), *more, ends],
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda y, labels: lossy(y, labels),
    )
    engine, *_ = parallel3d.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "pipeline": {"schedule": schedule},
            "zero_optimization": {
                "stage": LAYOUTS[schedule],
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 256,
            },
            "failures": {"timeout_s": TIMEOUT_S},
            "steps_per_print": None,
            **config,
        },
    )
    return engine


lossy: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss


def strike(fault: str) -> None:
    Path("struck").write_text(repr(time.time()))
    if fault == "raise":
        raise KeyError("the rank is tired")
    if fault == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL, "end": signal.SIGTERM}[fault])
    time.sleep(60 if fault == "end" else 0)  # handled from beside


def arm(engine: parallel3d.DeepSpeedEngine, fault: str, where: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Have the fault happen at the instruction `where`.

    Or at a reduction behind it ("RED"), at a gather of weights ("GATHER"), in the loss or in the loader.
    """
    executor, reducer = engine._runner._executor, engine.update.reducer

    def armed(function: Callable[..., Any], happens: Callable[..., bool]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if engine.global_steps == FAULTY_STEP and happens(*args):
                strike(fault)
            return function(*args, **kwargs)

        return run

    methods: dict[Op, Any] = executor._run
    for op, function in list(methods.items()):
        methods[op] = armed(function, lambda i, *_: str(i) == where)
    if where == "RED":
        reducer._launch = armed(reducer._launch, lambda *_: True)
    if where == "GATHER":
        units = engine.update.units
        units.gather = armed(units.gather, lambda *_: True)
    if where == "loss":
        global lossy
        lossy = armed(lossy, lambda *_: True)
    for k in range(10**9):
        if where == "loader" and engine.global_steps == FAULTY_STEP and k % MICRO_BATCHES == 2:
            strike(fault)
        yield torch.full((2, 8), k % 7 / 7), torch.zeros(2, 8)


def train(schedule: str, fault: str, where: str, rank: int) -> None:
    engine = make_engine(schedule)
    mine = rank == int(os.environ["RANK"])
    if where == "widening":  # an evaluation has put the first forward of this shape into the caches
        Widening.fails_at = 10 if mine else Widening.fails_at
    data = arm(engine, fault, where if mine else "")
    while True:
        engine.train_batch(data)
        if mine and where == "script" and engine.global_steps == FAULTY_STEP:
            strike(fault)


@pytest.fixture(scope="module")
def fault_ranks() -> FaultRanks:
    return FaultRanks()


def check(ended: Ended, folder: Path, rank: int, kinds: set[str], place: str | None, expected_ranks: set[int]) -> None:
    """All ranks of expected_ranks say the same, and all have ended, with an error and in time."""
    output = "\n".join(ended.outputs)
    assert all(ended.codes), output
    assert set(ended.accounts) == expected_ranks, output
    [verdict] = {str(account["verdict"]): account["verdict"] for account in ended.accounts.values()}.values()
    assert (verdict["rank"], verdict["stage"]) == (rank, rank // 2), output
    assert verdict["kind"] in kinds, output
    assert place is None or (verdict["place"]["instruction"] or verdict["place"]["phase"]) == place, output
    if place is not None and "@" in place:
        assert verdict["place"]["micro_batch"] == int(place.split("@")[0].lstrip("".join(map(chr, range(65, 91)))))
        [marked] = [word for word in "\n".join(ended.accounts[min(expected_ranks)]["grid"]).split() if ">" in word]
        assert marked == f">{place}<"
    # Said once, in one line that names the rank and the place.
    said = [line for line in output.splitlines() if line == verdict["line"]]
    assert len(said) == 1, output
    assert said[0].startswith("ranks " if verdict["kind"] == "deadlock" else f"rank {rank} (stage {rank // 2}, host ")
    waited = TIMEOUT_S if verdict["kind"] in ("late", "silent", "deadlock") else 0.0
    assert ended.at - float((folder / "struck").read_text()) - waited < 30


KINDS = {
    "raise": {"failed"},
    "sleep": {"late"},
    "stop": {"silent"},
    "kill": {"silent", "exited"},
    "end": {"ended"},
}


def survivors(fault: str, rank: int) -> set[int]:
    return set(range(4)) - ({rank} if fault in ("stop", "kill") else set())


# schedule, fault, where, rank, the place that the verdict names where it isn't `where`
Case = tuple[str, str, str, int, str | None]
CASES: list[Case] = [
    ("zb-h1", "raise", "W2@1", 3, None),
    ("1f1b", "raise", "script", 3, "user code between steps"),
    ("zb-h1", "sleep", "RED", 2, None),
    ("1f1b", "kill", "RG1@0", 0, None),
    ("zb-h1", "end", "I2@0", 1, None),
    ("gpipe", "raise", "B2@1", 3, None),
    ("gpipe", "raise", "GATHER", 1, "F0@0"),
    ("gpipe", "sleep", "GATHER", 2, "F0@1"),
    ("gpipe", "kill", "B1@0", 0, None),
]


def test_one_verdict(
    fault_ranks: FaultRanks, tmp_path: Path, schedule: str, fault: str, where: str, rank: int, place: str | None
):
    ended = fault_ranks.run(4, tmp_path, train, schedule, fault, where, rank, notes=rank != 0)
    place = place or (where if "@" in where else None)
    check(ended, tmp_path, rank, KINDS[fault], place, survivors(fault, rank))


def test_without_an_agent_the_end_of_rank_0_is_seen_from_the_end_of_its_store(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, train, "1f1b", "kill", "F2@0", 0, agent=False)
    assert all(ended.codes), ended.outputs
    found = {rank: account["verdict"] for rank, account in ended.accounts.items()}
    assert set(found) == {1, 2, 3}, ended.outputs
    assert {(v["rank"], v["kind"], v["place"]["instruction"]) for v in found.values()} == {(0, "silent", "F2@0")}


def every_place() -> Iterator[tuple[str, str, int]]:
    """(schedule, instruction, rank): one of each type that a stage's list has, in both schedules."""
    from parallel3d.schedule.builders import build
    from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, add_replica_reduction, lower

    for schedule in LAYOUTS:
        program = lower(build(schedule, 2, MICRO_BATCHES, 1, "loop", None))
        program = add_replica_reduction(add_gradient_reduction(program, [1, 1], LAYOUTS[schedule] == 2), [(0, 1)])
        program = add_parameter_gather(program) if LAYOUTS[schedule] < 3 else program
        for stage, instructions in enumerate(program.instructions):
            ops: dict[Op, list[str]] = {}
            for i in instructions:
                ops.setdefault(i.op, []).append(str(i))
            for op, texts in ops.items():
                if op is not Op.REDUCE_GRADS:  # part of a backward: "RED"
                    yield schedule, texts[len(texts) // 2], 2 * stage + len(ops) % 2
        yield schedule, "RED", 1
        yield schedule, "loss", 2
        yield schedule, "loader", 3
        yield schedule, "script", 1


def every_case() -> list[Case]:
    """Each fault at each of these places."""
    named = {"loss": "F0@1", "loader": "loading data", "script": "user code between steps"}
    faults = ("raise", "sleep", "stop", "kill")
    return [(s, fault, where, rank, named.get(where)) for s, where, rank in every_place() for fault in faults]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_one_verdict:
        cases = dict.fromkeys([*CASES, *(every_case() if metafunc.config.getoption("full") else [])])
        metafunc.parametrize(("schedule", "fault", "where", "rank", "place"), list(cases), ids=str)


def test_stages_whose_shapes_differ(fault_ranks: FaultRanks, tmp_path: Path):
    """Rank 1's first stage returns twice as much from its second batch on, which its messages' cache knows better."""
    (tmp_path / "struck").write_text(repr(time.time()))
    ended = fault_ranks.run(4, tmp_path, train, "1f1b", "none", "widening", 1)
    check(ended, tmp_path, 1, {"failed"}, "SA2@0", {0, 1, 2, 3})
    assert "chunk 0 returned" in ended.accounts[2]["verdict"]["error"]["message"]


def train_misfits(schedule: str) -> None:
    Path("struck").write_text(repr(time.time()))
    module = PipelineModule([nn.Linear(8, 8), nn.Linear(6, 8)], num_stages=2, loss_fn=lossy, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": {"schedule": schedule},
    }
    engine, *_ = parallel3d.initialize(model=module, config=config)
    engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 8))]))


def test_layers_that_do_not_fit_each_other(fault_ranks: FaultRanks, tmp_path: Path):
    """Both replicas of the second stage fail, at the same moment: either may be named, but the same one everywhere."""
    ended = fault_ranks.run(4, tmp_path, train_misfits, "1f1b")
    assert len(ended.accounts) == 4, ended.outputs
    check(ended, tmp_path, ended.accounts[0]["verdict"]["rank"], {"failed"}, "F0@1", {0, 1, 2, 3})
    assert ended.accounts[0]["verdict"]["stage"] == 1
    assert "mat1 and mat2 shapes cannot be multiplied" in ended.accounts[0]["verdict"]["error"]["message"]


def train_and_catch(schedule: str) -> None:
    engine = make_engine(schedule)
    data = arm(engine, "raise", "F1@1" if os.environ["RANK"] == "3" else "")
    for _ in range(FAULTY_STEP):
        engine.train_batch(data)
    try:
        engine.train_batch(data)
    except KeyError as error:
        Path("caught").write_text(f"{isinstance(error, ExecutionError)} {error}")
        raise SystemExit(5) from None
    except PeerError as error:
        Path(f"peer{os.environ['RANK']}").write_text(f"{error.rank} {error}")
        raise SystemExit(6) from None


def test_a_script_may_catch_the_exception_as_what_it_was(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, train_and_catch, "1f1b")
    check(ended, tmp_path, 3, {"failed"}, "F1@1", {0, 1, 2, 3})
    assert ended.codes[3] == 5
    caught = "True rank 3, stage 1, micro-batch 1, instruction F1@1: KeyError: 'the rank is tired'"
    assert (tmp_path / "caught").read_text() == caught
    # Its neighbours lose their connections; those further away may have to be ended from beside.
    told = [(tmp_path / f"peer{rank}").read_text() for rank in range(3) if (tmp_path / f"peer{rank}").exists()]
    assert told
    assert all(text.startswith("3 rank 3 (stage 1, host ") for text in told)


def generate_and_catch(where: str) -> None:
    """Rank 3 fails in a generation, and waits for the next one."""
    config = DecoderConfig(vocab_size=9, hidden_size=8, ffn_size=8, num_layers=2, num_heads=2)
    module = PipelineModule(decoder(config), num_stages=2, partition_method="uniform")
    settings = {"train_micro_batch_size_per_gpu": 2, "failures": {"timeout_s": TIMEOUT_S}}
    engine = parallel3d.initialize(model=module, config=settings)[0]
    if os.environ["RANK"] == "3":
        owner, name = {"keys": (DecoderLayer, "keep_past"), "choice": (Request, "choose")}[where]
        setattr(owner, name, lambda *_: strike("raise"))
    while True:
        try:
            engine.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=2)
        except KeyError:
            time.sleep(600)


@pytest.mark.parametrize("where", ["keys", "choice"])
def test_a_generation_that_fails_on_one_rank(fault_ranks: FaultRanks, tmp_path: Path, where: str):
    ended = fault_ranks.run(4, tmp_path, generate_and_catch, where)
    check(ended, tmp_path, 3, {"failed"}, "generation", {0, 1, 2, 3})


def ends_by_sigterm(child: int) -> bool:
    """End a child by SIGTERM, as a loader's worker is ended, without a message. child: what fork returned."""
    if child == 0:
        time.sleep(60)
        os._exit(1)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    return os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def take_time(schedule: str) -> None:
    engine = make_engine(schedule)
    data = arm(engine, "none", "")
    engine.train_batch(data)
    assert ends_by_sigterm(os.fork())
    if os.environ["RANK"] == "1":
        with engine.unwatched():
            time.sleep(1.5 * TIMEOUT_S)
    engine.train_batch(data)
    engine.eval_batch(data)
    # What a script does between an evaluation and the next step is part of it. The others would blame it after twice the time.
    if os.environ["RANK"] == "2":
        time.sleep(1.2 * TIMEOUT_S)
    engine.train_batch(data)


def test_some_things_take_their_time(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, take_time, "1f1b")
    assert (ended.codes, ended.accounts) == ([0, 0, 0, 0], {}), ended.outputs


def end_as_told(schedule: str, with_engine: bool, apart_s: float) -> None:
    engine = make_engine(schedule)
    data = arm(engine, "none", "")
    engine.train_batch(data)
    if not with_engine:
        engine._attribution._watchdog.close()
    threading.Timer(apart_s * int(os.environ["RANK"]), os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:  # blocked in C code most of the time
        engine.train_batch(data)
        if os.environ["RANK"] == "3":  # which ends last
            time.sleep(0.1)


@pytest.mark.parametrize(("with_engine", "apart_s"), [(True, 0.4), (False, 0.0)])
def test_a_job_that_is_told_to_end_blames_nobody(
    fault_ranks: FaultRanks, tmp_path: Path, with_engine: bool, apart_s: float
):
    """apart_s: between a rank and the next one."""
    ended = fault_ranks.run(4, tmp_path, end_as_told, "1f1b", with_engine, apart_s)
    code = 128 + signal.SIGTERM if with_engine else -signal.SIGTERM  # of python itself, which has no watchdog
    assert (ended.codes, ended.accounts) == ([code] * 4, {}), ended.outputs
    assert "rank" not in "".join(line for output in ended.outputs[1:] for line in output.splitlines())


def run_out_of_data(schedule: str) -> None:
    """Rank 1's data end one step before the others'."""
    engine = make_engine(schedule)
    steps = FAULTY_STEP if os.environ["RANK"] == "1" else FAULTY_STEP + 1
    data = islice(arm(engine, "none", ""), steps * MICRO_BATCHES)
    for _ in range(FAULTY_STEP):
        engine.train_batch(data)
    Path("struck").write_text(repr(time.time()))
    try:
        engine.train_batch(data)
    except StopIteration as error:
        Path(f"ended{os.environ['RANK']}").write_text(f"{type(error).__name__}: {error}")
        raise


def test_the_rank_whose_data_run_out_is_named(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, run_out_of_data, "1f1b")
    check(ended, tmp_path, 1, {"failed"}, "loading data", {0, 1, 2, 3})
    told = [(tmp_path / f"ended{rank}").read_text() for rank in range(4)]
    peer = "PeerEndOfData: the data iterators of ranks [1] have no micro-batch left"
    assert told == [peer, "StopIteration: the data iterator of rank 1 has no micro-batch left", peer, peer]


def save_alone(schedule: str) -> None:
    engine = make_engine(schedule)
    data = arm(engine, "none", "")
    for _ in range(FAULTY_STEP):
        engine.train_batch(data)
    Path("struck").write_text(repr(time.time()))
    if os.environ["RANK"] == "0":
        engine.save_checkpoint("saved")
    while True:
        engine.train_batch(data)


def test_a_save_on_one_rank_alone_is_explained(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, save_alone, "1f1b")
    check(ended, tmp_path, 0, {"deadlock"}, "a save", {0, 1, 2, 3})
    line = ended.accounts[1]["verdict"]["line"]
    assert "at a save waits for save_checkpoint with ranks 1, 2, 3" in line
    assert "at loading data waits for an agreement with ranks" in line


def stop_in_a_save(schedule: str) -> None:
    engine = make_engine(schedule)
    engine.train_batch(arm(engine, "none", ""))
    if os.environ["RANK"] == "1":
        save.write_parts = lambda *_: strike("stop")
    engine.save_checkpoint("saved")


def test_a_rank_that_is_stopped_in_a_save_is_named(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, stop_in_a_save, "1f1b")
    assert set(ended.accounts) == {0, 2, 3}, ended.outputs
    verdicts = [account["verdict"] for account in ended.accounts.values()]
    assert {(v["rank"], v["kind"], v["place"]["phase"]) for v in verdicts} == {(1, "silent", "a save")}
    assert all(ended.codes), ended.outputs


SCRIPT = f"""
import os, pathlib, sys
pathlib.Path(os.environ["RANK"] + ".pid").write_text(str(os.getpid()))
sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parent)]}
import test_failure_verdicts
test_failure_verdicts.train("zb-h1", "stop", "I2@0", 1)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_launcher_kills_a_rank_that_is_stopped(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    job = WarmProcess(tmp_path, environment, "forked_ranks", "parallel3d.launcher", "--num_procs", "4", "script.py")
    _, errors = job.communicate(timeout=90)
    at = time.time()
    assert job.returncode == 128 + signal.SIGKILL, errors
    accounts = {rank: json.loads((tmp_path / f"failure-{rank}.json").read_text()) for rank in (0, 2, 3)}
    check(Ended([1] * 4, at, accounts, [errors]), tmp_path, 1, KINDS["stop"], "I2@0", {0, 2, 3})
    assert errors.splitlines()[-2:] == [
        "parallel3d: rank 1 failed (SIGKILL)",
        "parallel3d: ended because of it: ranks 0, 2, 3",
    ]
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    assert not [pid for pid in pids if lives(pid)]


def train_on_a_full_disk(schedule: str) -> None:
    """Fail where nothing can be printed or written."""
    engine = make_engine(schedule)
    for stream in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream)
    shutil.rmtree(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]), ignore_errors=True)
    data = arm(engine, "raise", "F2@1" if os.environ["RANK"] == "1" else "")
    while True:
        engine.train_batch(data)


def test_the_launcher_gives_the_reason_where_no_rank_can_write(tmp_path: Path):
    code, _, errors = launched(tmp_path, "train_on_a_full_disk('1f1b')")
    assert code == 1, errors
    said, failed = errors.splitlines()[:2]
    assert said.startswith("parallel3d: rank 1 (stage 1, host ")
    assert said.endswith(") failed in F2@1: KeyError: 'the rank is tired'")
    assert failed == "parallel3d: rank 1 failed (exit code 1)"


def launched(folder: Path, call: str) -> tuple[int | None, str, str]:
    """Two ranks, from the launcher, that call a function of this file: (exit code, output, errors)."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    script = f"import sys\nsys.path[:0] = {paths}\nimport test_failure_verdicts\ntest_failure_verdicts.{call}"
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    job = WarmProcess(folder, environment, "forked_ranks", "parallel3d.launcher", "--num_procs", "2", "script.py")
    output, errors = job.communicate(timeout=90)
    return job.returncode, output, errors


def fork_a_child_that_exits(schedule: str) -> None:
    engine = make_engine(schedule)
    engine.train_batch(arm(engine, "none", ""))
    child = os.fork()
    if child == 0:
        sys.exit(7)
    end, ended = time.monotonic() + 15, (0, 0)
    while ended == (0, 0) and time.monotonic() < end:
        time.sleep(0.05)
        ended = os.waitpid(child, os.WNOHANG)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
    print("child:", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs")


def test_a_forked_child_that_leaves_by_sys_exit_ends(tmp_path: Path):
    code, output, errors = launched(tmp_path, "fork_a_child_that_exits('1f1b')")
    assert code == 0, errors
    assert output.count("child: 7\n") == 2


def leave(schedule: str, how: str) -> None:
    """Leave on rank 1, whose end takes longer than that of rank 0, which fails because of it."""
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 1)  # the last of its exit handlers
    engine = make_engine(schedule)
    data = arm(engine, "none", "")
    engine.train_batch(data)
    if os.environ["RANK"] == "1":
        raise SystemExit(3) if how == "exit" else KeyboardInterrupt
    while True:
        engine.train_batch(data)


@pytest.mark.parametrize(("how", "ending"), [("exit", "exit code 3"), ("interrupt", "KeyboardInterrupt|SIGINT")])
def test_a_rank_that_leaves_its_script_in_the_middle_has_not_come_to_its_end(tmp_path: Path, how: str, ending: str):
    code, _, errors = launched(tmp_path, f"leave('1f1b', {how!r})")
    assert code == (3 if how == "exit" else 128 + signal.SIGINT), errors
    line = json.loads((tmp_path / "failure-0.json").read_text())["verdict"]["line"]
    assert re.fullmatch(rf"rank 1 \(stage 1, host \S+\) ended \(({ending})\), last in .*; rank 0 waits for it", line)


def survive_a_broken_loader(schedule: str) -> None:
    engine = make_engine(schedule)
    data = arm(engine, "none", "")
    engine.train_batch(data)
    broken = (1 / (os.environ["RANK"] != "1") for _ in range(1))  # raises on rank 1
    with pytest.raises((ZeroDivisionError, PeerError, parallel3d.errors.DataError)):
        engine.train_batch(broken)
    time.sleep(1)  # a watchdog that minded would have come by now
    engine.train_batch(data)


def test_what_all_ranks_agree_on_ends_nothing(fault_ranks: FaultRanks, tmp_path: Path):
    ended = fault_ranks.run(4, tmp_path, survive_a_broken_loader, "1f1b")
    assert (ended.codes, ended.accounts) == ([0, 0, 0, 0], {}), ended.outputs
