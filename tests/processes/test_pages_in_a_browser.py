"""Pages in a real browser: plots are drawn, a decision's reason can be read, in light and dark, without an error."""

import shutil

import pytest

import paceline
import paceline.tasks
from paceline.records import page

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLOTS = {"lanes", "waits", "course", "staleness", "shares", "work", "traffic"}


@pytest.fixture
def browser(nothing_left):
    """A headless Chromium of the system's."""
    if CHROMIUM is None:
        pytest.skip("needs chromium: apt-get install chromium")
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with driver.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def place(tmp_path):
    """The page of a run of eight workers."""
    run = paceline.launch(
        paceline.tasks.get("digits"), engine="sim", strategy="dasp", scenario="uneven8", epochs=1,
        runs_dir=tmp_path / "runs",
    )  # fmt: skip
    page.written(run.journal, tmp_path / "report.html")
    return tmp_path / "report.html"


def test_a_run_is_drawn_and_a_reason_can_be_read(browser, place):
    for scheme in ("light", "dark"):
        require_drawn(browser, place, scheme)


def require_drawn(browser, place, scheme):
    tab = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
    errors = []
    tab.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on(
        "request",
        lambda request: errors.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None,
    )
    tab.goto(place.as_uri())
    tab.wait_for_selector("body[data-drawn=yes]")
    drawn = {each.get_attribute("id") for each in tab.query_selector_all(".js-plotly-plot")}
    assert drawn >= PLOTS
    assert all(tab.query_selector(f"#{name} .main-svg") for name in drawn)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 28)")
    tab.evaluate("document.getElementById('lanes').scrollIntoView()")
    spot = tab.evaluate("""() => {
        const bars = [...document.querySelectorAll('#lanes .trace:last-child .point path')];
        const widest = bars.map(bar => bar.getBoundingClientRect()).sort((a, b) => b.width - a.width)[0];
        return [widest.x + widest.width / 2, widest.y + widest.height / 2];
    }""")
    tab.mouse.click(*spot)
    tab.wait_for_function("document.getElementById('said').textContent.startsWith('worker')")
    said = tab.inner_text("#said")
    assert "waiting" in said
    assert len(said.splitlines()[1]) > 5  # the reason of the decision
    before = tab.evaluate("document.getElementById('lanes').layout.xaxis.range.slice()")
    box = tab.locator("#lanes .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 0.3 * box["width"], middle)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=4)
    tab.mouse.up()
    tab.wait_for_function(f"document.getElementById('lanes').layout.xaxis.range[0] > {before[0]}")
    after = tab.evaluate("document.getElementById('lanes').layout.xaxis.range.slice()")
    assert after[1] - after[0] < 0.5 * (before[1] - before[0])
    assert errors == []
    tab.close()
