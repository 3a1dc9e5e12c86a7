from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs the extra "huggingface", which `make test-all` installs."""
    return True if collection_path.name == "test_trl.py" and not config.getoption("full") else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out trainings on four ranks, which are long, unless --full asks for them."""
    long = [item for item in items if "found_on_four" in getattr(item, "fixturenames", ())]
    if long and not config.getoption("full"):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
