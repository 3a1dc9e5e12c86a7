"""Rules of the package's structure that import-linter can't express."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
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


@cache
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
        # Files of torch.distributed.checkpoint are read and written by one process.
        and any(re.match(r"torch\.distributed(?!\.checkpoint)", name) for name in _imports(path))
    ]
    assert offenders == []


def test_modules_of_tests_have_names_of_their_own():
    """Tests import each other by these names, from any folder."""
    times = Counter(path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in times.items() if count > 1] == []


DOCS = Path(__file__).parents[2] / "docs"


ClassKey = tuple[Path, str]  # bare names of classes occur more than once


def _classes() -> dict[ClassKey, ast.ClassDef]:
    return {(path, node.name): node for path, node in _nodes() if isinstance(node, ast.ClassDef)}


@cache
def _imported_from(path: Path) -> dict[str, ClassKey]:
    """Names that a file imports from other modules of the package -> (path, name there)."""
    found = {}
    for node in _nodes_of(PACKAGE / path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("parallel3d"):
            module = Path(*(node.module or "").split(".")[1:])
            file = module / "__init__.py" if (PACKAGE / module).is_dir() else module.with_suffix(".py")
            found |= {alias.asname or alias.name: (file, alias.name) for alias in node.names}
    return found


def _definition(path: Path, name: str, classes: dict[ClassKey, ast.ClassDef]) -> ClassKey | None:
    """Return the class that a name means in a file; None for another package's."""
    while (path, name) not in classes:
        imported = _imported_from(path).get(name)
        if imported is None:
            return None
        path, name = imported
    return path, name


def _public_methods(key: ClassKey, classes: dict[ClassKey, ast.ClassDef]) -> set[str]:
    """Public methods and properties of a class, those inherited from the package included."""
    methods = {m.name for m in classes[key].body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")}
    for base in classes[key].bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        # A dotted base is another package's.
        inherited = _definition(key[0], base.id, classes) if isinstance(base, ast.Name) else None
        if inherited is not None:
            methods |= _public_methods(inherited, classes)
    return methods


def test_public_methods_include_those_of_a_base_in_another_file():
    classes = _classes()
    engine = Path("engine/engine.py"), "Engine"
    assert _public_methods((Path("deepspeed/accessors.py"), "DeepSpeedEngine"), classes) > _public_methods(
        engine, classes
    )


def test_no_class_has_more_than_15_public_methods():
    classes = _classes()
    counted = {key: len(_public_methods(key, classes)) for key in classes if key[0].parts[0] != "deepspeed"}
    assert {key: count for key, count in counted.items() if count > 15} == {}


def test_only_the_instructions_name_rules_of_dependence():
    """Elsewhere `depends_on` and `matches` are called, not written."""
    named = ("depends_on", "matches")
    for path in PACKAGE.rglob("*.py"):
        if path.name != "instructions.py":
            for node in _nodes_of(path):
                assert not (isinstance(node, ast.FunctionDef) and node.name in named), path


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        for node in _nodes_of(path):
            yield relative, node


def test_docstrings_are_sentences_of_their_own():
    """A summary is understood without the code: it doesn't begin as the rest of a sentence."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = [(path, ast.get_docstring(node) or "") for path, node in _nodes() if isinstance(node, kinds)]
    assert [(path, doc) for path, doc in docs if re.match(r"(Of|See|What)\b", doc)] == []


# DeepSpeed's `checkpointing.configure` sets what `checkpointing.checkpoint` does in the whole process.
PROCESS_WIDE = {(Path("deepspeed/checkpointing.py"), "_process")}


def _changed_globals(tree: ast.Module) -> set[str]:
    """Names bound by a module that its functions rebind, or whose attributes or items they assign or delete.

    Attributes of other modules that it assigns itself count too.
    """
    targets = [target for statement in tree.body for target in _targets(statement)]
    bound = {node.id for node in targets if isinstance(node, ast.Name)}
    attributes = (node for node in targets if isinstance(node, ast.Attribute))
    changed = {ast.unparse(node) for node in attributes if ast.unparse(node).partition(".")[0] not in bound}
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        inside = list(ast.walk(function))
        local = {node.arg for node in inside if isinstance(node, ast.arg)}
        local |= {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in inside:
            if isinstance(node, ast.Global):
                changed |= set(node.names)
            elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
                while isinstance(node, ast.Attribute | ast.Subscript):
                    node = node.value
                if isinstance(node, ast.Name) and node.id in bound - local:
                    changed.add(node.id)
    return changed


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def test_changed_globals_are_found():
    names = "state = State()\nitems = {}\nnested: State = State()\nread = State()\nnumber = 0\nhidden = State()\n"
    body = "global number\n    state.x = 1\n    items[read.x] = 1\n    del nested.a.b\n    hidden = State()\n    hidden.x = 1"
    found = {"state", "items", "nested", "number", "package.x"}
    assert _changed_globals(ast.parse(f"{names}package.x = str\ndef f():\n    {body}")) == found


def test_the_package_has_no_mocks_and_no_globals_that_change():
    modules = [(path, node) for path, node in _nodes() if isinstance(node, ast.Module)]
    assert {(path, name) for path, module in modules for name in _changed_globals(module)} == PROCESS_WIDE
    assert [path for path in PACKAGE.rglob("*.py") if any("unittest" in name for name in _imports(path))] == []
    targets = [(path, target) for path, node in _nodes() if isinstance(node, ast.Assign) for target in node.targets]
    assert [path for path, target in targets if isinstance(target, ast.Attribute) and target.attr == "__class__"] == []


# Attributes of torch's modules and tensors, and of exceptions, whose names classes of the package have too.
OF_OTHERS = {"_modules", "args", "data", "forward", "grad", "padding_idx", "training", "weight"}


def _attributes_set(nodes: Iterable[ast.AST], on_self: bool) -> set[str]:
    """Names of attributes that are assigned, on `self` or on another object."""
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load))
    return {n.attr for n in stored if (isinstance(n.value, ast.Name) and n.value.id in ("self", "ctx")) is on_self}


def test_no_attribute_is_set_from_another_file():
    files = {path.relative_to(PACKAGE): _nodes_of(path) for path in PACKAGE.rglob("*.py")}
    fields = {
        path: _attributes_set(nodes, on_self=True)
        | {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for path, nodes in files.items()
    }
    of_package = set().union(*fields.values()) - OF_OTHERS
    foreign = {path: _attributes_set(nodes, on_self=False) & of_package - fields[path] for path, nodes in files.items()}
    assert {path: names for path, names in foreign.items() if names} == {}


# Of torch's modules, named tuples and `os`, and DeepSpeed's engine, which the package has by the same names.
PRIVATE_OF_OTHERS = {"_buffers", "_modules", "_parameters", "_replace", "_exit"}
PRIVATE_OF_DEEPSPEED = {"_consolidated_16bit_state_dict", "_register_deepspeed_module"}


def _private_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Names with one underscore that a file defines: functions, classes, variables, fields and attributes."""
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in found | _attributes_set(nodes, on_self=True) if re.match("_[a-z0-9]", name)}


def test_no_private_name_of_another_file_is_used():
    files = {path.relative_to(PACKAGE): _nodes_of(path) for path in PACKAGE.rglob("*.py")}
    own = {path: _private_names(nodes) for path, nodes in files.items()}
    of_package = set().union(*own.values()) - PRIVATE_OF_OTHERS - PRIVATE_OF_DEEPSPEED
    reached = {
        (path, ast.unparse(node))
        for path, nodes in files.items()
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr in of_package - own[path]
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert reached == set()
    imported = {(path, name) for path in files for name, (_, there) in _imported_from(path).items() if there[0] == "_"}
    assert {(path, name) for path, name in imported if not name.startswith("__")} == set()


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
            scope = _nodes_of(path)[0]
            for part in symbol.split("."):
                inside = [n for n in ast.iter_child_nodes(scope) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
                scope = next((n for n in inside if n.name == part), None) or pytest.fail(f"{link}: no {part}")


def test_readme_and_the_architecture_page_give_the_same_reading_order():
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert "(docs/architecture.md)" in readme
    listed = page.partition("## Reading order")[2].partition("\n## ")[0]
    order = ("instructions", "builders", "specs", "executor", "sink", "buckets", "reducer", "engine", "timing", "costs")
    for text in (readme.partition("The reading order is")[2], listed):
        assert re.search(".*?".join(order), text, re.DOTALL), text


def test_the_architecture_page_has_the_layers_that_import_linter_checks():
    table = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Packages")[2].partition("\n## ")[0]
    rows = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines() if line.startswith("| `")]
    settings = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.findall(r'"(parallel3d\.[^"]+)"', settings.partition("\nlayers = [")[2].partition("\n]")[0])
    assert rows == [set(re.findall(r"parallel3d\.(\w+)", layer)) for layer in layers]


def test_functions_and_files_are_short():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in _nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 50, f"{path}: {node.name}"
