"""Rules of the package's structure that import-linter can't express."""

import ast
from collections import Counter
from pathlib import Path

import parallel3d

PACKAGE = Path(parallel3d.__file__).parent
# comm/ owns communication; the launcher uses torch's elastic agent.
MAY_USE_TORCH_DISTRIBUTED = ("comm", "launcher")


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
    """They are imported by them, from whatever folder they are in."""
    times = Counter(path.name for path in Path(__file__).parents[1].rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in times.items() if count > 1] == []
