"""The page of a training: in a real browser, from files made up, live, and of files that are broken."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import emulate, open_page, too_faint, width
from plans import plan
from records import make_record

from parallel3d.cli import main
from parallel3d.errors import ConfigError
from parallel3d.failures.verdict import Kind, Place, Raised, Report, State, Verdict
from parallel3d.failures.watchdog import write_report
from parallel3d.monitor.run_record import RankRecord, StepTimeline
from parallel3d.planner.report.run import read_run, run_page

HOSTILE = "</script><script>document.body.dataset.broken = 1</script><b id=injected>&amp;\"'"
GIB = 2**30
# Two stages, a forward of 1 s and a backward of 2 s each.
SPANS = ((0, "F0@0", 5.0, 6.0), (1, "F0@1", 6.5, 7.5), (1, "B0@1", 7.5, 9.5), (0, "B0@0", 10.0, 12.0))
MEDIANS = {"F@0": 1.0, "F@1": 1.0, "B@0": 2.0, "B@1": 2.0, "SA@0": 0.25, "SG@1": 0.25}


def step(samples: int, loss: float, **more: float) -> str:
    return json.dumps({"time": 0.0, "samples": samples, "train_loss": loss, **more}) + "\n"


def write_run(folder: Path, note: str = "", steps: int = 2000) -> None:
    """Write a training of two starts, with a peak in the loss, a measured step, a failure, and one of an earlier training."""
    config = (
        json.dumps({"time": 1.0, "config": {"layout": f"pp2{note}", "failures": {"directory": str(folder)}}}) + "\n"
    )
    lines = [step(4 * k, 9.0 if k == 100 else 3.0 - k / steps, mfu=0.4, tokens_per_second=1e4) for k in range(1, steps)]
    again = [step(4 * k, 2.0) for k in range(steps - 10, steps)] + [step(4 * steps, math.nan)]
    text = config + "".join(lines) + config + "".join(again) + '{"samples": 99'  # being written
    (folder / "metrics.jsonl").write_text(text)
    parts = {"weights": GIB, "gradients": GIB, "activations": 2 * GIB, "backward": 4 * GIB, "step": 3 * GIB}
    memory: dict[str, Any] = {"allocated": 5 * GIB, "reserved": 6 * GIB, "outside": GIB, "capacity": 80 * GIB}
    ranks = [RankRecord(rank=r, stage=r, device="H200", parts=parts, **memory) for r in range(2)]
    make_record(instructions=MEDIANS, ranks=ranks).write(folder)
    (folder / "step_timeline.json").write_text(StepTimeline(spans=SPANS).model_dump_json())
    error = Raised(f"ValueError{note}", "odd", "Traceback: ...", follows=False)
    own = Report(1, 1, "h", State.FAILED, place=Place("the schedule", 7, instruction="B0@1"), error=error)
    verdict = Verdict(Kind.FAILED, 1, 1, "h", f"rank 1 failed{note}", own.place, error, 0.0, (0,))
    for rank in range(2):
        write_report(folder, replace(own, rank=rank), verdict, {1: own}, "stage 0 | F0@0")
    write_report(folder, replace(own, rank=2), replace(verdict, line="earlier"), {}, "")
    os.utime(folder / "failure-2.json", (0.0, 0.0))


@pytest.fixture
def page(driver: Any, tmp_path: Path) -> Iterator[Any]:
    write_run(tmp_path)
    emulate(driver)
    open_page(driver, run_page(read_run(tmp_path), "night"), tmp_path / "report.html")
    yield driver
    assert driver.get_log("browser") == []


def texts(driver: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    return driver.execute_script(script, selector)


def test_it_tells_loss_speed_memory_and_failures(page: Any):
    assert page.title == "Training night"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    cards = dict(zip(texts(page, ".cards dt"), texts(page, ".cards dd"), strict=True))
    assert (cards["Loss"], cards["MFU"], cards["Tokens a second"]) == ("nan", "40.0%", "10,000")
    assert cards["Peak memory"].startswith("7.00 GiB")
    assert "8,000 samples so far, 1 restart." in " ".join(texts(page, "header p")[0].split())
    assert texts(page, "#failures ~ h3") == ["rank 1 failed"]
    assert texts(page, "#failures ~ details summary") == ["ValueError: odd", "What each rank did"]
    tips = page.execute_script("return [...document.querySelectorAll('[data-tip]')].map(e => e.dataset.tip)")
    assert "rank 1 · stage 1\nactivations: 2.00 GiB (28.6% of what is reserved)" in tips
    assert "rank 0 · stage 0\nworkspace: 1.00 GiB (14.3% of what is reserved)" in tips
    assert "7,996 samples\n2" in tips, "the last finite loss"


def test_curves_are_lines_of_each_start_that_keep_peaks(page: Any):
    script = "return [...document.querySelectorAll('[aria-labelledby=curves] svg')[0].querySelectorAll('path')]"
    paths = page.execute_script(script + ".filter(e => !e.classList.contains('grid')).map(e => e.getAttribute('d'))")
    points = [[tuple(map(float, at.split())) for at in re.split("[ML]", path)[1:]] for path in paths]
    assert [len(line) for line in points] == [2 * 500, 10]
    (top,) = [at for at, y in points[0] if y == min(y for _, y in points[0])]
    first, last = points[0][0][0], points[1][-1][0]
    assert (top - first) / (last - first) == pytest.approx((100 - 1) / (1999 - 1), abs=2e-3)


def test_the_measured_timeline_is_beside_the_planned_one(page: Any):
    """Planned, messages take 0.25 s, so that the step ends at 6.5 s; measured it takes 7 s, on the same scale."""
    said = {}
    for which in ("measured", "planned"):
        canvas = page.find_element("css selector", f"#{which}")
        page.execute_script("arguments[0].focus()", canvas)
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        ActionChains(page, 0).send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT).perform()
        said[which] = page.find_element("css selector", f"#{which}-says").text
    assert said == {
        "measured": "B0@0 backward; stage 0, chunk 0, micro-batch 0; 5 s to 7 s (2 s)",
        "planned": "B0@0 backward; stage 0, chunk 0, micro-batch 0; 4.5 s to 6.5 s (2 s)",
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_windows_of_any_width(page: Any, scheme: str):
    emulate(page, scheme=scheme)
    assert too_faint(page) == []
    for pixels in (500, 1280):
        with width(page, pixels):
            assert page.execute_script("return document.documentElement.scrollWidth") <= pixels
            ends = "return [...document.querySelectorAll('.curve svg')].map(e => e.getBoundingClientRect().right)"
            assert 0 < max(page.execute_script(ends)) <= pixels  # where a curve is newest


def test_names_are_only_ever_text(driver: Any, tmp_path: Path):
    write_run(tmp_path, HOSTILE)
    open_page(driver, run_page(read_run(tmp_path), HOSTILE), tmp_path / "report.html")
    assert texts(driver, "#failures ~ h3") == [f"rank 1 failed{HOSTILE}"]
    assert driver.execute_script("return document.body.dataset.broken ?? document.getElementById('injected')") is None
    assert driver.get_log("browser") == []


def test_a_plan_of_the_run_is_the_planned_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path, steps=20)
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "plan.json").write_text(plan().model_dump_json())
    assert main(["report", str(tmp_path), "--plan", str(tmp_path / "plan")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path}/report.html\n"
    assert f"predicted by p3d plan for {plan().best[0].layout}" in (tmp_path / "report.html").read_text()


def test_live_it_shows_what_is_there_to_this_host_alone(driver: Any, tmp_path: Path):
    write_run(tmp_path, steps=20)
    command = [sys.executable, "-u", "-m", "parallel3d.cli", "report", str(tmp_path), "--serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline()
            url, port = re.match(r"(http://127\.0\.0\.1:(\d+)) shows ", line).groups()
            driver.get(url)
            assert driver.title == f"Training {tmp_path.name}"
            assert driver.find_element("css selector", "meta[http-equiv=refresh]").get_attribute("content") == "5"
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write("}\n" + step(200, 1.25))
            driver.get(url)
            assert "1.25" in texts(driver, ".cards dd")
            connection = http.client.HTTPConnection("127.0.0.1", int(port))
            connection.request("GET", "/", headers={"Host": f"rebound.example:{port}"})
            assert connection.getresponse().status == 404
            with socket.socket() as elsewhere, pytest.raises(OSError, match="refused"):
                elsewhere.connect(("127.0.0.2", int(port)))
            (tmp_path / "metrics.jsonl").write_text("no JSON\n")
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert (answer.status, b"remove it" in answer.read()) == (503, True)
        finally:
            server.terminate()
    driver.get("about:blank")


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("metrics.jsonl", '{"samples": 4}\n', "is not a file of a training's steps"),
        ("metrics.jsonl", '{"time": 0, "config": {}}\n{"train_loss": "low"}\n', "is not a file of a training's steps"),
        ("step_timeline.json", '{"spans": [[0, "X0@0", 0, 1]]}', "'X0@0' is not an instruction"),
        ("failure-0.json", '{"verdict": 3}', "is not a report of a failure"),
        ("run_record.json", "{", "is not a run record"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, text: str, told: str, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path, steps=20)
    (tmp_path / file).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_a_folder_without_a_training_says_how_to_get_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r'neither metrics\.jsonl nor run_record\.json; train with "run_record"'):
        read_run(tmp_path)
