"""A headless Chromium that reaches nothing but this host, for tests of pages."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why no browser can be started here; None where one can."""
    if find_spec("selenium") is None:
        return "selenium is not installed: pip install 'parallel3d[test]'"
    if shutil.which("chromedriver") is None or not any(map(shutil.which, _BROWSERS)):
        return "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
    return None


@contextmanager
def headless(*logs: str) -> Iterator[Any]:
    """A driver, which keeps these logs too. Without a browser the test is skipped, or fails with P3D_REQUIRE_BROWSER (CI)."""
    why = missing()
    if why is not None:
        (pytest.fail if os.environ.get("P3D_REQUIRE_BROWSER") else pytest.skip)(why)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
    # Root and containers have no sandbox, and /dev/shm may be small there.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,1000",
    ):
        options.add_argument(argument)
    options.add_argument("--disable-background-networking")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", dict.fromkeys(("browser", *logs), "ALL"))
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def open_page(driver: Any, html: str, path: Path) -> None:
    """Write and open it, and wait until its script says that it is ready."""
    path.write_text(html, encoding="utf-8")
    driver.get(path.as_uri())
    deadline = time.monotonic() + 60
    while driver.execute_script("return document.body.dataset.ready") != "yes":
        assert time.monotonic() < deadline, driver.get_log("browser")
        time.sleep(0.02)


def emulate(driver: Any, media: str = "", scheme: str = "light") -> None:
    """media: "print" or "" for the screen; scheme: "light" or "dark"."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
