"""Rules of the package's structure that import-linter can't express."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import parallel3d

PACKAGE = Path(parallel3d.__file__).parent
# comm/ owns communication; the launcher uses torch's elastic agent.
MAY_USE_TORCH_DISTRIBUTED = ("comm", "launcher")


@cache
def _nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def _forget_syntax_trees() -> Iterator[None]:
    """So many objects slow down every later garbage collection."""
    yield
    _nodes_of.cache_clear()


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names.add(f"torch.{node.attr}")
    return names


def test_collectives_and_point_to_point_go_through_comm_alone():
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in MAY_USE_TORCH_DISTRIBUTED
        and any(name.startswith("torch.distributed") for name in _imports(path))
    ]
    assert offenders == []


def test_modules_of_tests_have_names_of_their_own():
    """Tests import each other by these names, from any folder."""
    times = Counter(path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in times.items() if count > 1] == []


DOCS = Path(__file__).parents[2] / "docs"


def _classes() -> dict[str, tuple[Path, ast.ClassDef]]:
    """Every class of the package, by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in _nodes_of(path):
            if isinstance(node, ast.ClassDef):
                found[node.name] = (path.relative_to(PACKAGE), node)
    return found


def _public_methods(name: str, classes: dict[str, tuple[Path, ast.ClassDef]]) -> set[str]:
    """Public methods and properties of a class, those inherited from the package included."""
    if name not in classes:
        return set()
    _, node = classes[name]
    own = {m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")}
    # A dotted base is another package's.
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return own.union(*(_public_methods(base, classes) for base in bases))


def test_no_class_has_more_than_15_public_methods():
    classes = _classes()
    counted = {
        name: len(_public_methods(name, classes)) for name, (path, _) in classes.items() if path.parts[0] != "deepspeed"
    }
    assert {name: count for name, count in counted.items() if count > 15} == {}


def test_only_the_instructions_name_rules_of_dependence():
    """Elsewhere `depends_on` and `matches` are called, not written."""
    named = ("depends_on", "matches")
    for path in PACKAGE.rglob("*.py"):
        if path.name != "instructions.py":
            for node in _nodes_of(path):
                assert not (isinstance(node, ast.FunctionDef) and node.name in named), path


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in PACKAGE.rglob("*.py"):
        for node in _nodes_of(path):
            yield path.relative_to(PACKAGE), node


def test_docstrings_are_sentences_of_their_own():
    """A summary is understood without the code: it doesn't begin as the rest of a sentence."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [(path, ast.get_docstring(node) or "") for path, node in _nodes() if isinstance(node, kinds)]
    assert [(path, doc) for path, doc in docs if re.match(r"(Of|See|What)\b", doc)] == []


def test_the_package_has_no_mocks_and_no_globals_that_change():
    changed = [(path, node.names) for path, node in _nodes() if isinstance(node, ast.Global)]
    assert changed == []
    assert [path for path in PACKAGE.rglob("*.py") if any("unittest" in name for name in _imports(path))] == []
    targets = [(path, target) for path, node in _nodes() if isinstance(node, ast.Assign) for target in node.targets]
    assert [path for path, target in targets if isinstance(target, ast.Attribute) and target.attr == "__class__"] == []


def test_only_models_name_their_loss():
    name = "CausalLMLoss"
    named = {path for path, node in _nodes() if isinstance(node, ast.Name) and node.id == name}
    named |= {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if name in str(_imports(path))}
    assert {path.parts[0] for path in named} == {"models"}


def test_parity_uses_public_names_alone():
    own = ("self", "cls", "torch")
    reached = [
        (path, ast.unparse(node))
        for path, node in _nodes()
        if path.parts[0] == "parity" and isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in own)
    ]
    assert reached == []


def test_links_of_the_architecture_page_lead_to_what_they_name():
    """[text](path#Class.method): the file defines it."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 40
    for link in links:
        name, _, symbol = link.partition("#")
        path = (DOCS / name).resolve()
        assert path.exists(), link
        if symbol:
            scope: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
            for part in symbol.split("."):
                inside = [n for n in ast.iter_child_nodes(scope) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
                scope = next((n for n in inside if n.name == part), None) or pytest.fail(f"{link}: no {part}")


def test_readme_gives_the_reading_order():
    assert "docs/architecture.md" in (DOCS.parent / "README.md").read_text(encoding="utf-8")


def test_functions_and_files_are_short():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in _nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, f"{path}: {node.name}"
