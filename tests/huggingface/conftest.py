from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs the extra "huggingface", which `make test-all` installs."""
    return True if collection_path.name == "test_trl.py" and not config.getoption("full") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long to start, unless --full asks for it."""
    slow = {"found_on_four", "found_by_accelerate"}
    long = [item for item in items if not slow.isdisjoint(getattr(item, "fixturenames", ()))]
    if long and not config.getoption("full"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
