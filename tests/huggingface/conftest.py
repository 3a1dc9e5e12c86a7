from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what needs the extra "huggingface", which `make test-all` installs."""
    return True if collection_path.name == "test_trl.py" and not config.getoption("full") else None
