"""The built site in a real browser. `make docs` runs this file; `make test`, which finds test_*.py, does not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import headless

SITE = Path(__file__).parents[1] / "build" / "docs"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_pages_load_nothing_from_elsewhere_and_the_search_finds_a_word(address: str):
    pages = [path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html")]
    shown = [page for page in pages if not page.startswith("source/")]
    assert len(shown) > 30
    with headless("performance") as driver:
        for page in shown:
            driver.get(f"{address}{page}/")
            assert driver.find_element("tag name", "h1").text, page
        driver.get(f"{address}?q=Belady")  # a word of docs/zero.md
        deadline, found = time.monotonic() + 60, '.md-search-result__link[href*="/zero/"]'
        while not driver.find_elements("css selector", found):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert driver.get_log("browser") == []
        events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    requests = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert len(requests) > len(shown)
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
