"""Mutation testing: how many small faults in the package are found by the tests that run the faulty line.

cosmic-ray (pip install cosmic-ray) makes the mutants; this script samples them, finds the tests that reach each one in any
process, and runs these tests on a copy of the tree. docs/testing.md has the commands and the results.

python tools/mutation.py sample --out sample.json     # needs cosmic-ray
python tools/mutation.py probe --sample sample.json --out reached.json --work runs/probe
python tools/mutation.py run --sample sample.json --reached reached.json --out result.json --work runs/mutants
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Files of each concept, before and after their moves; one that a tree doesn't have is left out.
CONCEPTS = {
    "schedule": ["schedule/*.py"],
    "zero": ["zero/*.py"],
    "pipe": [
        *(f"pipe/{name}.py" for name in "executor messages module programs settings splitting ties numerics".split()),
        *(f"pipe/{name}.py" for name in "entry specs agreement whole batch data single_stage".split()),
        *("specs.py", "structures.py", "comm/structures.py", "data.py", "autograd/entry.py"),
    ],
    "sink": [
        "gradient_sink.py",
        "split_backward.py",
        *(f"autograd/{name}.py" for name in "sink recipes split_backward".split()),
    ],
    "checkpoint": ["checkpoint/*.py"],
}
PLUGIN = Path(__file__).with_name("mutation_plugin.py")


def sample(tree: Path, seed: int, candidates: int) -> list[dict[str, Any]]:
    """Return mutants of function bodies, `candidates` of each concept: a random place, then a random mutation of it."""
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    package, chosen = tree / "parallel3d", []
    for concept, patterns in CONCEPTS.items():
        files = sorted({path for pattern in patterns for path in package.glob(pattern)})
        bodies = {path: _body_lines(ast.parse(path.read_text())) for path in files}
        places: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for item in _all_work_items(files, {}):
            mutation = item.mutations[0]
            if mutation.start_pos[0] in bodies[mutation.module_path]:
                places[str(mutation.module_path), mutation.start_pos, mutation.end_pos].append(mutation)
        generator = random.Random(f"{seed} {concept}")
        for place in generator.sample(sorted(places), min(candidates, len(places))):
            mutation = generator.choice(sorted(places[place], key=lambda m: (m.operator_name, m.occurrence)))
            source = Path(mutation.module_path).read_text()
            mutated = mutate_code(source, get_operator(mutation.operator_name)(), mutation.occurrence)
            path = str(Path(mutation.module_path).relative_to(tree))
            row = {"concept": concept, "path": path, "line": mutation.start_pos[0], "operator": mutation.operator_name}
            chosen.append({**row, "source": mutated})
    return chosen


def _body_lines(tree: ast.Module) -> set[int]:
    """Return the lines of statements in functions, but for docstrings, nested definitions' headers and annotated names."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            for statement in _statements(node.body):
                skipped = isinstance(statement, ast.AnnAssign | ast.FunctionDef | ast.ClassDef)
                if not skipped and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                    lines |= set(range(statement.lineno, _header_end(statement) + 1))
    return lines


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                yield from _statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


def _header_end(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    return max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno


class _Probes(ast.NodeTransformer):
    """Puts a call that notes the running test before the statement of each mutant."""

    def __init__(self, lines: dict[int, list[int]]):
        self._lines = lines

    def visit(self, node: ast.AST) -> ast.AST:
        """Insert the calls into every list of statements of the node."""
        self.generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            if isinstance(body, list) and not isinstance(node, ast.Module | ast.ClassDef):
                setattr(node, field, [new for statement in body for new in self._probed(statement)])
        if isinstance(node, ast.Module):
            last = max(k for k, statement in enumerate(node.body) if getattr(statement, "module", "") == "__future__")
            node.body[last + 1 : last + 1] = ast.parse("import mutation_plugin as _mutation_plugin").body
        return node

    def _probed(self, statement: ast.stmt) -> list[ast.stmt]:
        lines = range(statement.lineno, _header_end(statement) + 1) if hasattr(statement, "lineno") else ()
        ids = sorted(k for line in lines for k in self._lines.get(line, ()))
        if not ids or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return [statement]
        return [*ast.parse(f"_mutation_plugin.hit({ids})").body, statement]


def probe(args: argparse.Namespace) -> None:
    """Run the tests on a copy with probes, and write the tests that reach each mutant and the seconds of those that pass."""
    mutants = json.loads(args.sample.read_text())
    copy, hits = args.work / "probed", args.work / "hits"
    _copy(args.tree, copy)
    hits.mkdir()
    for path in {mutant["path"] for mutant in mutants}:
        lines: dict[int, list[int]] = defaultdict(list)
        for k, mutant in enumerate(mutants):
            if mutant["path"] == path:
                lines[mutant["line"]].append(k)
        probed = _Probes(lines).visit(ast.parse((args.tree / path).read_text()))
        (copy / path).write_text(ast.unparse(ast.fix_missing_locations(probed)))
    options = ["-n", str(args.workers), "--dist", "worksteal", *args.tests]
    _pytest(copy, options, {"MUTATION_HITS": str(hits.resolve())}, args.work / "probed.log")
    args.out.write_text(json.dumps(read_hits(hits, len(mutants))))


def read_hits(hits: Path, count: int) -> dict[str, Any]:
    """Return what the plugin wrote: the seconds of each test that passed, and the tests that reach each mutant."""
    seconds, of_file = {}, defaultdict(set)
    for line in (hits / "main.passed").read_text().splitlines():
        test, spent = line.rsplit("\t", 1)
        seconds[test] = float(spent)
        of_file[test.partition("::")[0]].add(test)
    reached: list[set[str]] = [set() for _ in range(count)]
    for line in {line for file in hits.glob("*.hits") for line in file.read_text().splitlines()}:
        k, phase, test = line.split("\t")
        # Any test of the file may test the result of a fixture that reaches the mutant.
        reached[int(k)] |= of_file[test.partition("::")[0]] if phase == "setup" else {test} & seconds.keys()
    return {"seconds": seconds, "reached": [sorted(tests) for tests in reached]}


def outcome(tree: Path, mutant: dict[str, Any], tests: list[str], limit: float, work: Path) -> dict[str, Any]:
    """Run these tests on a copy of the tree with the mutant. Return how that ended."""
    copy = work / f"mutant{mutant['id']}"
    _copy(tree, copy)
    (copy / mutant["path"]).write_text(mutant["source"])
    (copy / "tests_of_mutant").write_text("\n".join(tests))
    began = time.monotonic()
    log = work / f"mutant{mutant['id']}.log"
    code = _pytest(copy, ["-x", "@tests_of_mutant"], {}, log, limit)
    # 4: a test's module can't be imported, though it can without the mutant.
    ended = {0: "survived", 1: "killed", 4: "killed", None: "timeout"}.get(code, f"not run, exit code {code}")
    shutil.rmtree(copy)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read_text(), re.MULTILINE)
    return {"outcome": ended, "by": failed, "seconds": round(time.monotonic() - began)}


def _collected(tree: Path, work: Path) -> set[str]:
    """Return the tests that pytest finds in the tree without a mutant."""
    _copy(tree, work / "collected")
    log = work / "collected.log"
    _pytest(work / "collected", ["--collect-only", "-v"], {}, log)
    return {line for line in log.read_text().splitlines() if "::" in line}


def _copy(tree: Path, to: Path) -> None:
    ignored = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info")
    shutil.copytree(tree, to, ignore=ignored)


def _pytest(tree: Path, args: list[str], env: dict[str, str], log: Path, limit: float | None = None) -> int | None:
    shutil.copy(PLUGIN, tree / "mutation_plugin.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutation_plugin", *args]
    paths = f"{tree}:{os.environ.get('PYTHONPATH', '')}"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=tree,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, **env},
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return None


def _selected(tests: list[str], seconds: dict[str, float], most: float) -> list[str]:
    """Return the tests in the order in which they run, the quickest first, as many as take `most` seconds together."""
    kept, spent = [], 0.0
    for test in sorted(tests, key=lambda t: (seconds[t], t)):
        spent += seconds[test]
        if spent <= most or not kept:
            kept.append(test)
    return kept


def run(args: argparse.Namespace) -> None:
    """Run the first mutants of each concept that any test reaches, and write and print how they ended."""
    mutants = [{**mutant, "id": k} for k, mutant in enumerate(json.loads(args.sample.read_text()))]
    known = json.loads(args.reached.read_text())
    seconds, tests = known["seconds"], known["reached"]
    here = _collected(args.tree, args.work)
    print(f"{len(seconds.keys() - here)} of {len(seconds)} tests can't be collected on this machine")
    apart = re.compile(args.without or "(?!)")
    tests = [[test for test in own if test in here and not apart.search(test)] for own in tests]
    chosen = []
    for concept in CONCEPTS:
        chosen += [m for m in mutants if m["concept"] == concept and tests[m["id"]]][: args.per_concept]
    chosen = [m for m in chosen if not args.only or m["id"] in args.only]

    def evaluate(mutant: dict[str, Any]) -> dict[str, Any]:
        own = _selected(tests[mutant["id"]], seconds, args.most_seconds)
        limit = 60 + 4 * sum(seconds[test] for test in own)
        row = {key: mutant[key] for key in ("id", "concept", "path", "line", "operator")}
        counts = {"tests": len(own), "reached_by": len(tests[mutant["id"]])}
        result = {**row, **counts, **outcome(args.tree, mutant, own, limit, args.work)}
        with args.out.with_suffix(".jsonl").open("a") as partial:
            partial.write(json.dumps(result) + "\n")
        return result

    longest_first = sorted(chosen, key=lambda m: -sum(seconds[test] for test in tests[m["id"]]))
    with ThreadPoolExecutor(args.workers) as pool:
        rows = sorted(pool.map(evaluate, longest_first), key=lambda row: row["id"])
    args.out.write_text(json.dumps({"passed": len(seconds), "mutants": rows}, indent=1))
    killed = Counter(row["concept"] for row in rows if row["outcome"] in ("killed", "timeout"))
    for concept, count in Counter(row["concept"] for row in rows).items():
        print(f"{concept:12} {killed[concept]} of {count} killed")
    print(f"{'all':12} {killed.total()} of {len(rows)} killed; {len(seconds)} tests passed without mutants")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("sample", "probe", "run"):
        command = commands.add_parser(name)
        command.add_argument("--tree", type=lambda path: Path(path).resolve(), default=".", help="a checkout")
        command.add_argument("--out", type=Path, required=True, help="a JSON file")
        if name == "sample":
            command.add_argument("--seed", type=int, default=24)
            command.add_argument("--candidates", type=int, default=40, help="per concept; some no test reaches")
        else:
            command.add_argument("--sample", type=Path, required=True, help="of `sample`")
            command.add_argument("--work", type=Path, required=True, help="a new directory for copies and logs")
            command.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    commands.choices["probe"].add_argument("--tests", type=shlex.split, default=[], help="arguments of pytest")
    runs = commands.choices["run"]
    runs.add_argument("--reached", type=Path, required=True, help="of `probe`")
    runs.add_argument("--per_concept", type=int, default=12)
    runs.add_argument("--only", type=json.loads, help="a list of mutants by their number")
    runs.add_argument("--without", help="a pattern of tests that fail on this machine without a mutant")
    runs.add_argument("--most_seconds", type=float, default=200, help="of a mutant's tests, the quickest")
    args = parser.parse_args()
    if args.command == "sample":
        args.out.write_text(json.dumps(sample(args.tree, args.seed, args.candidates)))
        return
    args.work.mkdir(parents=True)
    {"probe": probe, "run": run}[args.command](args)


if __name__ == "__main__":
    main()
