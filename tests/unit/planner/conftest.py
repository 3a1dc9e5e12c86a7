"""One browser for the tests of all pages."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import headless


@pytest.fixture(scope="session")
def driver() -> Iterator[Any]:
    with headless() as driver:
        yield driver
