"""The leaderboard page in a real browser: it sorts, filters, and fits a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lm_eval_moecache.report.metrics import metric_column
from tests.conftest import Moecache
from tests.report.runs import leaderboard_of_four, record, write


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_page_load_timeout(120)
    yield started
    started.quit()


@pytest.fixture
def page(browser: Any, tmp_path: Path, moecache: Moecache) -> Any:
    (tmp_path / "sweep.yaml").write_text("title: Four runs\ntasks: quiz\n")
    moecache("table", leaderboard_of_four(tmp_path), "--write", "--format=html")
    browser.set_window_size(1280, 900)
    browser.get((tmp_path / "table.html").as_uri())
    return browser


def shown(page: Any) -> list[str]:
    """Return the visible rows as `policy capacity`, in order."""
    return page.execute_script(
        "return [...document.querySelectorAll('#leaderboard tbody tr')].filter(r => !r.hidden)"
        ".map(r => r.querySelector('.label').textContent)"
    )


def head(page: Any, text: str) -> Any:
    return page.find_element("xpath", f"//th[normalize-space()='{text}']/button")


def test_a_click_on_a_heading_sorts_best_first_and_then_the_other_way(page: Any) -> None:
    head(page, "tok/s").click()
    fast = ["specmd 50%", "on_demand 50%", "specmd 5%", "on_demand 5%"]
    assert shown(page) == fast
    head(page, "tok/s").click()
    assert shown(page) == fast[::-1]
    head(page, "Miss").click()
    assert shown(page) == fast
    assert head(page, "Miss").find_element("xpath", "..").get_attribute("aria-sort") == (
        "ascending"
    )
    page.find_element("xpath", "//select[@id='sort']/option[.='Capacity']").click()
    assert [row.split()[1] for row in shown(page)] == ["5%", "5%", "50%", "50%"]


def test_results_are_in_view_and_the_front_comes_first(page: Any) -> None:
    assert shown(page)[0] == "specmd 50%"
    headings = page.find_elements("css selector", "#leaderboard th")
    names = [heading.text for heading in headings]
    assert names[:6] == ["Run", "Pareto", "quiz acc", "tok/s", "TTFT ms", "Miss"]
    for heading in headings:
        assert heading.rect["x"] + heading.rect["width"] <= 1280
    text = page.find_element("css selector", ".about").text
    assert "Runs 4" in text and "Hardware a100-5GBps" in text and "Date" in text


def test_a_run_opens_to_its_settings(page: Any) -> None:
    first = page.find_element("css selector", "#leaderboard details")
    assert not first.find_element("tag name", "dl").is_displayed()
    first.find_element("tag name", "summary").click()
    assert first.find_element("tag name", "dl").is_displayed()
    assert "Capacity" in first.find_element("tag name", "dl").text


def test_search_choice_and_front_narrow_the_rows_together(page: Any) -> None:
    search = page.find_element("id", "search")
    search.send_keys("specmd")
    assert shown(page) == ["specmd 50%", "specmd 5%"]
    page.find_element("css selector", "#front-only input").click()
    assert shown(page) == ["specmd 50%"]
    assert page.find_element("id", "count").text == "1 of 4 runs"
    search.clear()
    # The driver's `clear` fires `change`, a user's keys `input`; the page listens to both.
    assert shown(page) == ["specmd 50%"]
    page.find_element("css selector", "#front-only input").click()
    page.find_element("xpath", "//label[starts-with(., 'Capacity')]//option[.='5%']").click()
    assert shown(page) == ["on_demand 5%", "specmd 5%"]


def test_the_page_fits_a_phone_and_can_be_sorted_there(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        width = page.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390
        page.find_element("xpath", "//select[@id='sort']/option[.='tok/s']").click()
        assert shown(page)[0] == "specmd 50%"
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_error_is_told_as_0_only_where_it_is_0_or_of_rounding() -> None:
    column = metric_column("tok_per_s")
    assert column is not None
    # 3e-13 is what adding the same numbers in another order leaves.
    errors = (0.0, 3e-13, 0.049, 0.05001, None)
    told = [column.text(4.35, error) for error in errors]
    assert told == ["4.3 ±0.0", "4.3 ±0.0", "4.3 ±0.05", "4.3 ±0.1", "4.3"]


def test_it_opens_on_one_capacity_which_the_address_keeps(
    browser: Any, tmp_path: Path, moecache: Moecache
) -> None:
    (tmp_path / "sweep.yaml").write_text("title: Four runs\ntasks: quiz\n")
    (tmp_path / "table.yaml").write_text("by: [capacity]\n")
    moecache("table", leaderboard_of_four(tmp_path), "--write", "--format=html")
    address = (tmp_path / "table.html").as_uri()
    browser.set_window_size(1280, 900)
    browser.get(address)
    # The capacity is chosen above the table, so rows need not repeat it.
    small = shown(browser)
    assert sorted(small) == ["on_demand", "specmd"]
    assert "`" not in browser.find_element("tag name", "body").text
    points = browser.find_elements("css selector", "#picture g.point")
    names = [point.get_attribute("aria-label").partition(":")[0] for point in points]
    assert sorted(names) == sorted(small)
    browser.find_element("xpath", "//*[@id='place']//option[.='5%']").click()
    assert browser.current_url == f"{address}#at=5%25"
    speeds = (
        "return [...document.querySelectorAll('#picture g.point title')].map(t => t.textContent)"
    )
    fast = browser.execute_script(speeds)
    browser.get("about:blank")
    browser.get(f"{address}#at=5%25")
    assert browser.execute_script(speeds) == fast
    # A click on a point opens its row.
    browser.execute_script(
        "document.querySelector('#picture g.point').dispatchEvent(new Event('click'))"
    )
    assert len(browser.find_elements("css selector", "#leaderboard details[open]")) == 1


def test_the_pictures_axes_fit_its_points(page: Any) -> None:
    """Every point, and every bar, lies within the axes, and they use most of the height."""
    within = page.execute_script(
        "const svg = document.querySelector('#picture svg');"
        "const ys = [...svg.querySelectorAll('g.point circle')].map(c => +c.getAttribute('cy'));"
        "return [Math.min(...ys), Math.max(...ys), svg.viewBox.baseVal.height];"
    )
    top, bottom, height = within
    assert 20 <= top <= bottom <= height - 40


def test_texts_are_escaped(tmp_path: Path, moecache: Moecache) -> None:
    write(tmp_path, record("a", policy="<script>alert(1)</script>"), record("b"))
    moecache("table", tmp_path, "--write", "--format=html")
    text = (tmp_path / "table.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
