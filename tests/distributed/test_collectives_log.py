"""comms_logger counts the collectives that are really made, and log_summary prints them."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any, ClassVar

import torch
from collective_counts import Collectives
from torch import nn

import parallel3d
from parallel3d.comm import log_summary
from parallel3d.comm.log import LOG


class Made(Collectives):
    NAMES: ClassVar[dict[str, int]] = {
        **Collectives.NAMES,
        "allgather_": 1,
    }  # a few words on which ranks agree, not logged


def log_of(settings: dict[str, Any]) -> tuple[dict[Any, int], dict[Any, int], str]:
    """Return the calls of two steps as logged, as counted below everything, and what is printed."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "comms_logger": {"enabled": True, **settings},
        "steps_per_print": None,
    }
    engine, *_ = parallel3d.initialize(model=nn.Linear(8, 8), config=config)
    LOG.seconds.clear()
    try:
        with Made() as made, redirect_stdout(StringIO()) as printed:
            for _ in range(2):
                engine.backward(engine(torch.ones(4, 8)).square().mean())
                engine.step()
            counts = {(name, nbytes): count for (name, nbytes), count in made.counts.items() if name != "allgather_"}
            logged = {(kind, nbytes): len(seconds) for (kind, nbytes, _), seconds in LOG.seconds.items()}
        with redirect_stdout(printed):
            log_summary(show_straggler=True)
    finally:
        LOG.settings = None
        LOG.seconds.clear()
    return logged, counts, printed.getvalue()


def test_the_log_has_the_collectives_that_are_made(run_ranks):
    (logged, made, printed), (other, _, nothing) = run_ranks(2, log_of, {})
    # A gather is given this rank's half.
    names = {
        "allreduce_": ("all_reduce", 1),
        "_allgather_base_": ("all_gather", 2),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
    }
    assert logged == {(names[n][0], nbytes * names[n][1]): count for (n, nbytes), count in made.items()} == other
    assert {kind for kind, _ in logged} == {"all_reduce", "all_gather", "reduce_scatter"}
    rows = [line.split() for line in printed.splitlines()[1:]]
    assert {(row[0], int(row[1])): int(row[2]) for row in rows} == logged
    for kind, nbytes, count, total, average, rate, bus, straggler in rows:
        assert float(total) >= float(straggler) >= 0
        assert abs(float(average) * int(count) - float(total)) <= 0.002
        assert abs(float(rate) * float(total) - int(nbytes) * int(count) * 8e-6) <= 0.01 * float(total) + 1e-3
        assert abs(float(bus) - float(rate) * (1 if kind == "all_reduce" else 0.5)) <= 0.002
    assert nothing == ""


def test_kinds_that_are_not_asked_for_are_not_logged(run_ranks):
    logged, made, _ = run_ranks(2, log_of, {"prof_all": False, "prof_ops": ["reduce_scatter_tensor"]})[0]
    assert {kind for kind, _ in logged} == {"reduce_scatter"}
    assert len(made) > 1
