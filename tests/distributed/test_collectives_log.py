"""comms_logger counts the collectives that are really made, and log_summary prints them."""

from __future__ import annotations

from collective_counts import log_of


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
