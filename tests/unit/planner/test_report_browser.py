"""The report in a real browser, without a network: what a reader clicks, hovers, types and prints."""

import json
import re
from functools import partial

import pytest
from browser import emulate, open_page, too_faint, width
from plans import Shape, plan

from parallel3d.planner.report import drawing as words
from parallel3d.planner.report import html_page
from parallel3d.planner.report import page as page_module
from parallel3d.planner.search.result import PlanResult
from parallel3d.schedule.instructions import COMPUTE_OPS

LARGE = Shape(64, 16, 8, 64, "zb-h1", 1, "loop")  # test_report.py has one of 512 micro-batches
HOSTILE = "</script><script>document.body.dataset.broken = 1</script><b id=injected>&amp;\"'"


@pytest.fixture(scope="module")
def result() -> PlanResult:
    return plan()


@pytest.fixture(scope="module")
def html(result) -> str:
    return html_page(result)


@pytest.fixture
def page(driver, html, tmp_path):
    """The plan's page, opened; at the end its console must be silent."""
    emulate(driver)
    open_page(driver, html, tmp_path / "plan.html")
    yield driver
    assert driver.get_log("browser") == []


def find(driver, selector: str):
    return driver.find_element("css selector", selector)


def texts(driver, selector: str) -> list[str]:
    return driver.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).map(e => e.textContent)",
        selector,
    )


def hover(driver, element, x: float, y: float) -> str:
    """Return the tooltip's text at (x, y) from the element's corner; "" if it is hidden."""
    from selenium.webdriver.common.action_chains import ActionChains

    size = element.size
    wide, high = size["width"], size["height"]
    ActionChains(driver, 0).move_to_element_with_offset(element, round(x - wide / 2), round(y - high / 2)).perform()
    return driver.execute_script("const t = document.getElementById('tip'); return t.hidden ? '' : t.textContent")


def press(driver, *keys: str) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver, 0).send_keys(*keys).perform()


def test_page_opens_from_a_file_alone(page, result):
    assert page.title == f"Plan of {result.model} on {result.cluster}"
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.execute_script("return document.querySelectorAll('h2').length") == 8


KEYS = {
    "Step": lambda p: p.seconds,
    "Peak memory": lambda p: p.peak,
    "Tokens/s": lambda p: p.tokens_per_second,
    "Layout": lambda p: [int(n) for n in re.findall(r"\d+", p.layout)],
}


def test_a_heading_sorts_up_and_down(page, result):
    for heading, key in KEYS.items():
        button = next(b for b in page.find_elements("css selector", "#ranking th button") if b.text.startswith(heading))
        for order, reverse in (("ascending", False), ("descending", True), ("ascending", False)):
            button.click()
            ranked = sorted(result.best, key=key, reverse=reverse)
            assert texts(page, "#ranking tbody .pick") == [p.layout for p in ranked]
            sorted_by = page.find_elements("css selector", "#ranking th[aria-sort]")
            assert [(th.get_attribute("aria-sort"), th.text.split(" ")[0]) for th in sorted_by] == [
                (order, heading.split()[0])
            ]


def test_losers_without_a_number_stay_last(page, result):
    for button in page.find_elements("css selector", "#rejected th button")[2:]:
        for _ in range(2):
            button.click()
            column = texts(page, f"#rejected td:nth-child({3 if button.text.startswith('Step') else 4})")
            assert "–" in column
            assert set(column[column.index("–") :]) == {"–"}


@pytest.mark.parametrize("with_keyboard", [False, True])
def test_a_row_shows_its_memory_and_time(page, result, with_keyboard):
    from selenium.webdriver.common.keys import Keys

    chosen = result.best[4]
    if with_keyboard:
        page.execute_script("arguments[0].focus()", page.find_elements("css selector", ".pick")[4])
        press(page, Keys.ENTER)
    else:
        page.find_elements("css selector", "#ranking tbody tr")[4].click()
    assert find(page, "#layout h3").text == chosen.layout
    assert texts(page, ".pick[aria-pressed=true]") == [chosen.layout]
    assert texts(page, "#ranking tr.selected .pick") == [chosen.layout]
    tips = page.execute_script("return [...document.querySelectorAll('#layout [data-tip]')].map(e => e.dataset.tip)")
    for stage in chosen.memory:
        own = [tip for tip in tips if tip.startswith(f"stage {stage.stage} ·")]
        for part, nbytes in stage.parts.items():
            assert any(f"\n{part}: {words.memory(nbytes)} (" in tip for tip in own)
        assert any(f"capacity: {words.memory(stage.capacity)}" in tip for tip in own)
    for part, seconds in chosen.breakdown.items():
        assert any(tip.startswith(f"{part} {words.duration(seconds)} (") for tip in tips)
    find(page, "#layout details summary").click()
    assert texts(page, "#layout details[open] tbody td")[0] == words.duration(chosen.seconds)
    assert texts(page, "#layout details[open] tbody td")[1] == words.duration(result.best[0].seconds)


def test_hovering_tells_what_a_bar_is(page, result):
    bar = next(
        e
        for e in page.find_elements("css selector", "#layout rect[data-tip]")
        if "activations" in e.get_attribute("data-tip")
    )
    told = hover(page, bar, bar.size["width"] / 2, bar.size["height"] / 2)
    assert told.startswith("stage 0 · ranks 0–7\nactivations: ")
    assert hover(page, find(page, "h1"), 5, 5) == ""


def test_a_point_names_its_layout_and_selects_it(page, result):
    peak, seconds, layout = result.trade_off[1]
    point = find(page, f'#trade-off ~ .chart [data-layout="{layout}"]')
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
    assert hover(page, point, 5, 5) == f"{layout}\n{words.memory(peak)}, {words.duration(seconds)} a step"
    point.click()
    assert find(page, "#layout h3").text == layout


def test_a_link_tells_what_it_carries(page, result):
    tips = page.execute_script("return [...document.querySelectorAll('.link')].map(e => e.dataset.tip)")
    assert len(tips) == len(result.links)
    for link in result.links:
        [told] = [
            tip for tip in tips if tip.startswith(f"{link.a} – {link.b} (") or tip.startswith(f"{link.b} – {link.a} (")
        ]
        for axis, nbytes in link.by_axis.items():
            assert f"{axis} {words.memory(nbytes)}" in told
        assert words.duration(link.seconds) in told


# ------------------------------------------------------------------------------------------------------- timeline

UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def told_span(words_: str) -> tuple[str, int, float, float]:
    """(instruction, stage, start, end) as the tooltip says them."""
    match = re.fullmatch(
        r"(\S+) [a-z ]+\nstage (\d+), chunk \d+, micro-batch \d+\n([\d.]+) (\S+) to ([\d.]+) (\S+) \(.*\)", words_
    )
    name, stage, start, unit0, end, unit1 = match.groups()
    return name, int(stage), float(start) * UNITS[unit0], float(end) * UNITS[unit1]


def sweep(driver, canvas, y: float, steps: int = 30) -> dict[float, tuple[str, int, float, float]]:
    """x -> what is told there, from left to right."""
    found, wide = {}, canvas.size["width"] - 90
    for k in range(steps):
        x = 80 + wide * k / (steps - 1)
        told = hover(driver, canvas, x, y)
        if told:
            found[x] = told_span(told)
    return found


def check_against(found, result: PlanResult, stage: int) -> float:
    """Each told instruction has the plan's times, and lies where a straight scale from time to x says. Seconds a pixel."""
    first = min(s.start for s in result.timeline)
    spans = {str(s.instruction): s for s in result.timeline if s.rank == stage and s.instruction.bucket is None}
    for name, at, start, end in found.values():
        assert at == stage
        s = spans[name]
        assert (start, end) == pytest.approx((s.start - first, s.end - first), rel=1e-3, abs=1e-6)
    (x0, (_, _, a0, b0)), *_, (x1, (_, _, a1, b1)) = found.items()
    rate = ((a1 + b1) - (a0 + b0)) / 2 / (x1 - x0)
    slack = max(b - a for _, _, a, b in found.values())
    for x, (_, _, start, end) in found.items():
        middle = (a0 + b0) / 2 + rate * (x - x0)
        assert start - slack <= middle <= end + slack
    return rate


@pytest.fixture
def canvas(page):
    canvas = find(page, "#time")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    return canvas


def test_hovering_the_timeline_tells_instruction_and_times(page, canvas, result):
    lane = (canvas.size["height"] - 30) / 4
    for stage, below in ((0, 22), (3, 2)):
        found = sweep(page, canvas, 6 + lane * stage + below, 30)
        assert len(found) > 20
        check_against(found, result, stage)


def test_hovering_below_a_lane_tells_communication(page, canvas, result):
    tips = {hover(page, canvas, 80, y) for y in range(8, 48, 2)}
    gathers = [told_span(tip) for tip in tips if "gather" in tip]
    assert {(name, stage) for name, stage, _, _ in gathers} <= {("AG0@0", 0), ("AG0@7", 0)}
    assert gathers


def test_zooming_shows_less_of_the_step_and_all_of_it_again(page, canvas, result):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
    from selenium.webdriver.common.keys import Keys

    whole = check_against(sweep(page, canvas, 12, 12), result, 0)
    for how in ("button", "wheel", "key"):
        if how == "button":
            find(page, "#time-zoom-in").click()
            find(page, "#time-zoom-in").click()
        elif how == "key":
            page.execute_script("arguments[0].focus()", canvas)
            press(page, "++")
        else:
            over = ActionChains(page, 0).key_down(Keys.CONTROL)
            over.scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -700).key_up(Keys.CONTROL).perform()
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        near = check_against(sweep(page, canvas, 12, 16), result, 0)
        assert near == pytest.approx(whole / 4, rel=0.15), how
        if how == "key":
            press(page, "0")
        else:
            find(page, "#time-zoom-all").click()
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        assert check_against(sweep(page, canvas, 12, 6), result, 0) == pytest.approx(whole, rel=0.01), how


def test_dragging_moves_the_timeline(page, canvas):
    from selenium.webdriver.common.action_chains import ActionChains

    find(page, "#time-zoom-in").click()
    find(page, "#time-zoom-in").click()
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    before = told_span(hover(page, canvas, 700, 12))
    ActionChains(page, 0).click_and_hold().move_by_offset(-300, 0).release().perform()
    after = told_span(hover(page, canvas, 400, 12))
    assert after == before, "what was under the mouse moved along with it"


def test_arrow_keys_go_from_instruction_to_instruction(page, canvas, result):
    from selenium.webdriver.common.keys import Keys

    lanes = [
        [
            s
            for s in sorted(result.timeline, key=lambda s: s.start)
            if s.rank == stage and s.instruction.op in COMPUTE_OPS
        ]
        for stage in (0, 1)
    ]
    page.execute_script("arguments[0].focus()", canvas)
    said = []
    for key in (Keys.ARROW_RIGHT, *[Keys.ARROW_RIGHT] * 9, Keys.ARROW_LEFT):
        press(page, key)
        said.append(find(page, "#time-says").text.partition(" ")[0])
    order = [str(s.instruction) for s in lanes[0]]
    assert said == [*order[:10], order[8]]
    press(page, Keys.ARROW_DOWN)
    at = lanes[0][8].start
    below = next(s for s in lanes[1] if s.end > at)
    assert find(page, "#time-says").text.startswith(f"{below.instruction} ")
    assert "stage 1" in find(page, "#time-says").text


# ---------------------------------------------------------------------------------------- why not, configuration


def test_the_filter_keeps_rows_with_all_words(page, result):
    from selenium.webdriver.common.keys import Keys

    for typed in ("zero1", "zero1 fit", "ZERO0, bubble", "no such layout"):
        find(page, "#filter").send_keys(typed)
        wanted = [
            r.layout
            for r in result.rejected
            if all(word in f"{r.layout} {r.why}".lower() for word in re.split(r"[\s,]+", typed.lower()))
        ]
        assert (wanted == []) == (typed == "no such layout")
        assert texts(page, "#rejected tbody code") == wanted
        assert find(page, "#filter-says").text == f"{len(wanted)} of {len(result.rejected)} shown"
        find(page, "#filter").send_keys(Keys.CONTROL + "a", Keys.BACKSPACE)
        assert len(texts(page, "#rejected tbody code")) == len(result.rejected)


@pytest.mark.parametrize("allowed", [True, False])
def test_the_configuration_is_copied(page, result, allowed):
    permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    page.execute_cdp_cmd("Browser.grantPermissions", permissions)
    page.execute_async_script("navigator.clipboard.writeText('what was there before').then(arguments[0])")
    if not allowed:  # as in browsers that keep the clipboard from files
        page.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('denied'))")
    button = find(page, "#copy")
    button.click()
    text = page.execute_async_script(
        "const done = arguments[0], ask = () => document.getElementById('copy-says').textContent"
        " ? navigator.clipboard.readText().then(done, e => done(String(e))) : setTimeout(ask, 10); ask()"
    )
    assert json.loads(text) == result.config
    assert '"partition": [0, 2, 4, 6, 8, 10, 12, 14, 16]' in text
    assert find(page, "#copy-says").text == "Copied."


# ------------------------------------------------------------------------------------------------- for all readers


def lane_colour(driver) -> list[int]:
    """Return the timeline's colour where stage 1 waits for its first micro-batch."""
    return driver.execute_script(
        "const c = document.getElementById('time'); const d = c.width / c.clientWidth;"
        "const lane = (c.clientHeight - 30) / 4;"
        "return [...c.getContext('2d').getImageData(76 * d, (6 + lane + 12) * d, 1, 1).data].slice(0, 3)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_their_ground(page, scheme):
    emulate(page, scheme=scheme)
    assert too_faint(page) == []
    assert (sum(lane_colour(page)) > 3 * 200) == (scheme == "light")


def test_page_fits_its_window(page):
    for pixels in (420, 500, 1280, 2000):
        with width(page, pixels):
            assert page.execute_script("return document.documentElement.scrollWidth") <= pixels, pixels


def test_print_shows_all_rows_and_no_controls(page, result):
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert printed.startswith("JVBERi0")  # %PDF- in base64
    assert page.execute_script("return [...document.querySelectorAll('details')].every(d => d.open)")
    emulate(page, media="print")
    visible = "return [...document.querySelectorAll(arguments[0])].filter(e => e.offsetParent).length"
    assert page.execute_script(visible, "nav, #time-zoom-in, #copy, #filter") == 0
    cut = page.execute_script(
        "return [...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollHeight > e.clientHeight + 2).length"
    )
    assert cut == 0
    assert page.execute_script(visible, "#rejected tbody tr") == len(result.rejected)


@pytest.mark.parametrize("shape", [Shape(1, 1, 1, 4, "1f1b", 1, "loop"), LARGE], ids=lambda s: s.layout)
def test_the_smallest_and_a_large_plan_work(driver, shape, tmp_path):
    given = plan(shape)
    open_page(driver, html_page(given), tmp_path / "plan.html")
    canvas = find(driver, "#time")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    lane = (canvas.size["height"] - 30) / shape.stages
    found = sweep(driver, canvas, 6 + lane * (shape.stages - 1) + min(lane, 24) / 3, 20)
    assert len(found) > 8
    check_against(found, given, shape.stages - 1)
    driver.find_elements("css selector", "#ranking tbody tr")[2].click()
    assert find(driver, "#layout h3").text == given.best[2].layout
    assert driver.get_log("browser") == []


def test_a_timeline_too_long_to_draw_is_told_from_at_both_ends(driver, result, tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "columns", partial(page_module.columns, limit=200))
    open_page(driver, html_page(result), tmp_path / "plan.html")
    canvas = find(driver, "#time")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    found = sweep(driver, canvas, 12)
    check_against(found, result, 0)
    width = canvas.size["width"]
    assert any(x < 0.2 * width for x in found)
    assert any(x > 0.8 * width for x in found)
    assert not any(0.35 * width < x < 0.65 * width for x in found)
    assert driver.get_log("browser") == []


def test_names_are_only_ever_text(driver, result, tmp_path):
    first = result.best[0].model_copy(update={"layout": HOSTILE})
    lost = result.rejected[0].model_copy(update={"why": HOSTILE})
    link = result.links[0].model_copy(update={"a": HOSTILE})
    given = result.model_copy(
        update={"model": HOSTILE, "best": (first, *result.best[1:]), "rejected": (lost,), "links": (link,)}
    )
    open_page(driver, html_page(given), tmp_path / "plan.html")
    for row in (1, 0):
        driver.find_elements("css selector", "#ranking tbody tr")[row].click()
    assert find(driver, "#layout h3").text == HOSTILE
    assert HOSTILE in find(driver, "h1").text
    assert driver.execute_script("return document.body.dataset.broken") is None
    assert driver.execute_script("return document.getElementById('injected')") is None
    assert driver.get_log("browser") == []
