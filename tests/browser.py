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


# Of each visible text: its contrast with its ground by WCAG 2, and what it is.
_CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const out = [];
for (const e of document.querySelectorAll("body *:not(script, noscript, #tip)")) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.getClientRects().length) continue;
  const style = getComputedStyle(e), ink = parse(e.ownerSVGElement ? style.fill : style.color).slice(0, 3);
  const [a, b] = [light(ink), light(ground(e))];
  out.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + ": " + e.textContent.slice(0, 40)]);
}
return out;
"""


def too_faint(driver: Any) -> list[str]:
    """The texts of a page whose contrast is below WCAG's 4.5; all details are opened for it."""
    driver.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    measured = driver.execute_script(_CONTRAST)
    assert len(measured) > 30
    return [what for ratio, what in measured if ratio < 4.5]


@contextmanager
def width(driver: Any, pixels: int) -> Iterator[None]:
    """A window this wide."""
    metrics = {"width": pixels, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
