"""Writes a run's results as a section of a markdown page, between `<!-- begin NAME -->` and `<!-- end NAME -->`.

python tools/bench/table.py results.json                                        # prints it
python tools/bench/table.py results.json --into docs/benchmarks.md --name zero  # replaces the section
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accuracy import accuracy_table, unmeasured, verdicts
from deviations import deviation_table, verdict
from policies import policy_table
from policies import verdicts as policy_verdicts
from results import agreement, as_markdown, block_table, describe_agreement, make_table, rooflines
from zero_rows import TITLES, table

# What runs of earlier versions measured and this version lacks: options of cases, and ways to communicate.
_REMOVED_OPTIONS = {"allreducenorm", "waitkernel"}
_REMOVED_WAYS = {"torch, copies", "kernel, copies", "copies, awaited by a kernel"}


def selected(run: Mapping[str, Any], cases: Sequence[str] = ()) -> dict[str, Any]:
    """Return the run without what this version lacks, and without other cases than these if some are given."""
    if "measured" in run:
        return {**run, "measured": [m for m in run["measured"] if m["by"] not in _REMOVED_WAYS]}
    if "cases" not in run:
        return dict(run)
    names = [record if isinstance(record, str) else record["case"] for record in run["cases"]]
    out = {name for name in names if _REMOVED_OPTIONS & set(name.split("-")) or (cases and name not in cases)}
    kept = [record for name, record in zip(names, run["cases"], strict=True) if name not in out]
    words = (",".join(part for part in word.split(",") if part not in out) for word in run["command"].split(" "))
    result = {**run, "cases": kept, "command": " ".join(words)}
    if "curves" in run:
        return result | {"curves": {name: curve for name, curve in run["curves"].items() if name not in out}}
    return result | {"agreement": agreement(kept)}


def section(run: Mapping[str, Any], baselines: Sequence[str] = ()) -> str:
    """Heading lines that say what was run where, the table, whether losses agreed, what failed, where time went."""
    work = run["workload"]
    lines = [
        _where(run),
        f'Model "{work["size"]}", {work["micro_batches"]} micro-batches of {work["micro_batch"]} a step and replica; medians '
        f"of {work['steps']} steps after {work['warmup']}.",
        "",
        as_markdown(make_table([r for r in run["cases"] if r["status"] != "skipped"], baselines)),
        "",
        *describe_agreement(run["agreement"]),
        *(f"`{record['case']}` {record['status']}: {_reason(record)}" for record in run["cases"] if "error" in record),
        *(line for heading, table in rooflines(run["cases"]) for line in ("", heading, "", as_markdown(table))),
        "",
        f"`{run['command']}`",
    ]
    return "\n".join(lines)


def curves_section(run: Mapping[str, Any]) -> str:
    """Return the section of loss curves: what was run where, the differences, the verdict."""
    work = run["workload"]
    lines = [
        _where(run),
        f'Model "{work["size"]}", {work["steps"]} steps of {work["micro_batches"]} micro-batches of {work["micro_batch"]}, '
        "of all replicas together.",
        "",
        as_markdown(deviation_table(run)),
        "",
        verdict(run),
        "",
        f"`{run['command']}`",
    ]
    return "\n".join(lines)


def plan_section(run: Mapping[str, Any]) -> str:
    """Return the section of predicted layouts: what was run where, predictions with measurements, and the errors' limits."""
    work = run["workload"]
    lines = [
        _where(run),
        f"Medians of {work['steps']} steps after {work['warmup']}, and the most bytes in tensors on each rank in them; "
        f"predicted for {run['cluster']}, and calibrated by the other layouts' runs. Last column: of all ranks.",
        "",
        as_markdown(accuracy_table(run)),
        "",
        *(f"- {line}" for line in [*verdicts(run), *unmeasured(run)]),
        "",
        f"`{run['command']}`",
    ]
    return "\n".join(lines)


def communication_section(run: Mapping[str, Any]) -> str:
    """Return the section of communication on one host: a row for each message, by the backend and by other ways."""
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for m in run["measured"]:
        rows.setdefault((m["what"], m["world"], m["dtype"], f"{m['bytes']:,}"), {})[m["by"]] = m["seconds"]
    lines = [["what", "ranks", "dtype", "bytes", "by", "us", "by", "us (of the first)"]]
    for subject, times in rows.items():
        (first, base), *others = times.items()
        for k, (name, seconds) in enumerate(others):
            begin = [*map(str, subject), first, f"{base * 1e6:,.1f}"] if k == 0 else [""] * 6
            lines.append([*begin, name, f"{seconds * 1e6:,.1f} ({seconds / base:.2f})"])
    how = f"Medians of {run['workload']['repeats']} repeats on the slowest rank."
    return "\n".join([_where(run), how, "", as_markdown(lines), "", f"`{run['command']}`"])


def fp8_section(run: Mapping[str, Any]) -> str:
    """Return the section of blocks with and without fp8: what was run where, the table."""
    work = run["workload"]
    how = f'{work["blocks"]} blocks of "{work["size"]}"; medians over the second half of {work["seconds"]:.0f} s each.'
    return "\n".join([_where(run), how, "", as_markdown(block_table(run["blocks"])), "", f"`{run['command']}`"])


def policies_section(run: Mapping[str, Any]) -> str:
    """Return the section of policies of recomputation: what was run where, the table, the verdicts."""
    work, rows = run["workload"], run["policies"]
    how = f"{work['blocks']} blocks of {work['model']}, {work['micro_batch']} x {work['seq']} tokens; medians of "
    how += f"{work['repeats']} turns."
    lines = [_where(run), how, "", as_markdown(policy_table(rows)), "", *policy_verdicts(rows)]
    return "\n".join([*lines, "", f"`{run['command']}`"])


def zero_section(run: Mapping[str, Any]) -> str:
    """Return the section of the comparisons of ZeRO: what was run where, the tables."""
    work = run["workload"]
    lines = [
        _where(run),
        f'Model "{work["model"]}", sequences of {work["seq"]}; {work["processes"]} processes with {work["micro_batches"]} '
        f"micro-batches of {work['micro_batch']} a step; medians.",
        *(f"{name}: {reason}." for name, reason in run["missing"].items()),
    ]
    for number, title in TITLES.items():
        if len(found := table(run["zero_tables"], number)) > 1:
            lines += ["", f"{title}:", "", as_markdown(found)]
    return "\n".join([*lines, "", f"`{run['command']}`"])


def make_section(run: Mapping[str, Any], baselines: Sequence[str] = ()) -> str:
    """Return the section of any run. baselines: cases to compare with, first choice first."""
    kinds = {"curves": curves_section, "layouts": plan_section, "measured": communication_section}
    kinds |= {"zero_tables": zero_section, "blocks": fp8_section, "policies": policies_section}
    make = next((make for key, make in kinds.items() if key in run), partial(section, baselines=baselines))
    return make(run)


def _where(run: Mapping[str, Any]) -> str:
    machine = f"{run['hardware']['count']} x {run['hardware']['name']}"
    packages = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{run['date'][:10]}, {machine}, commit {run['commit']}; {packages}."


def _reason(record: Mapping[str, Any]) -> str:
    return next(iter(record["error"]), "without a message")


def insert(page: str, name: str, text: str) -> str:
    """The page with `text` between the markers of `name`. Raises ValueError without exactly one pair of them."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs the lines {begin} and {end}, once and in this order; add them to it")
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Print the section, or put it in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file that run.py or another script of this directory wrote")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="a markdown page with the markers")
    parser.add_argument("--name", help="of the section; default: the results file's name without .json")
    parser.add_argument("--baseline", default="", help="cases to compare with, first choice first; default: the peers")
    parser.add_argument("--cases", default="", help="cases to show; default: all but those of removed features")
    args = parser.parse_args()
    cases, baselines = ([name for name in text.split(",") if name] for text in (args.cases, args.baseline))
    text = make_section(selected(json.loads(args.results.read_text(encoding="utf-8")), cases), baselines)
    if args.into is None:
        print(text)
        return
    page = args.into.read_text(encoding="utf-8")
    args.into.write_text(insert(page, args.name or args.results.stem, text), encoding="utf-8")


if __name__ == "__main__":
    main()
