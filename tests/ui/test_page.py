"""A report in a real browser with the network logged: no request, no error, a slider that answers the keyboard."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from moe_lab.report import run
from tests.support.notebooks import small_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
pytestmark = [
    pytest.mark.ui,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
]


@pytest.fixture(scope="module", params=["light", "dark"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return run(small_report(folder / "small.ipynb"), folder / "small.html", theme=request.param).path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(report: Path, browser: Any) -> Iterator[Any]:
    """The report, opened; `page.requests` and `page.complaints` list what it asked for and what went wrong."""
    opened = browser.new_page(viewport={"width": 1100, "height": 900})
    opened.requests, opened.complaints = [], []
    opened.on("request", lambda r: opened.requests.append(r.url))
    opened.on("console", lambda m: opened.complaints.append(m.text))
    opened.on("pageerror", lambda e: opened.complaints.append(str(e)))
    opened.goto(report.as_uri())
    yield opened
    opened.close()


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """A web server on this machine: its address, and the list of what it is asked for."""
    asked: list[str] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def visible_alt(page: Any) -> str:
    frames = [f for f in page.query_selector_all(".moe-explorer img") if f.is_visible()]
    assert len(frames) == 1
    return frames[0].get_attribute("alt")


def test_asks_for_nothing_but_itself(page: Any, report: Path) -> None:
    page.wait_for_load_state("networkidle")
    assert [url for url in page.requests if not url.startswith("data:")] == [report.as_uri()]
    assert page.complaints == []


def test_slider_answers_the_keyboard(page: Any) -> None:
    slider = page.locator(".moe-explorer input")
    slider.focus()
    seen = [visible_alt(page)]
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        seen.append(visible_alt(page))
    assert [alt.split(":")[0].lower() for alt in seen] == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert page.locator(".moe-explorer output").text_content() == "3"
    assert slider.get_attribute("aria-valuetext") == "3"
    page.keyboard.press("Home")
    assert visible_alt(page) == seen[0]
    assert page.complaints == []


def test_pictures_are_drawn_and_described(page: Any) -> None:
    for picture in page.query_selector_all("img"):
        assert len(picture.get_attribute("alt")) > 20
        assert picture.evaluate("p => p.complete && p.naturalWidth > 300")


def test_formulas_are_drawn(page: Any) -> None:
    boxes = [formula.bounding_box() for formula in page.query_selector_all("math")]
    assert len(boxes) == 4
    assert all(box["width"] > 5 and box["height"] > 5 for box in boxes)


def test_page_does_not_scroll_sideways(page: Any) -> None:
    for width in (1100, 480):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_data_link_saves_the_figures_frame(page: Any) -> None:
    link = page.locator(".moe-data a").first
    with page.expect_download() as started:
        link.click()
    assert started.value.suggested_filename == "phases.csv"
    lines = Path(started.value.path()).read_text().splitlines()
    assert lines[0].startswith("layer,arm,")
    assert len(lines) == 1 + 4


def test_a_foreign_notebook_stays_offline(browser: Any, tmp_path: Path) -> None:
    """Their scripts run, but nothing that they or their pictures name is asked for."""
    import nbformat

    from moe_lab.report.run import to_html
    from tests.support.foreign import foreign_notebook

    with listening() as (address, asked):
        book = foreign_notebook(tmp_path / "theirs.ipynb", address)
        made = to_html(nbformat.read(book, as_version=4), book)
        policy = 'http-equiv="Content-Security-Policy"'
        assert policy in made
        for content in (made, made.replace(policy, "")):
            (tmp_path / "theirs.html").write_text(content)
            page = browser.new_page()
            page.goto((tmp_path / "theirs.html").as_uri())
            page.wait_for_load_state("networkidle")
            assert page.evaluate("window.ran") == "yes"
            page.close()
            if content is made:
                assert asked == []
        assert len(asked) > 4, "without the policy the same page asks for everything"


CONTRAST = """() => {
  const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = c => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(c[i]), 0);
  const ground = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const texts = 'h1, h2, p, pre, pre span, td, th, label, output, dt, dd'.split(', ').map(t => 'main ' + t).join(', ');
  const poor = [];
  for (const e of document.querySelectorAll(texts)) {
    const [a, b] = [luminance(rgb(getComputedStyle(e).color)), luminance(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${e.tagName} ${e.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return poor;
}"""


def test_text_stands_out_from_its_ground(page: Any) -> None:
    assert page.evaluate(CONTRAST) == []


def test_two_controls_show_their_combination(browser: Any, tmp_path: Path) -> None:
    from moe_lab import explore
    from tests.support.traces import random_trace

    drawn = explore.routing(random_trace(40), ranges=[(0, 20), (20, 40)], layers=[0, 2])
    (tmp_path / "pair.html").write_text(f"<!doctype html><meta charset=utf-8>{drawn.to_html()}")
    page = browser.new_page()
    page.goto((tmp_path / "pair.html").as_uri())
    seen = []
    for layer, tokens in ((0, 0), (1, 0), (1, 1), (0, 1)):
        page.locator("select").nth(0).select_option(index=layer)
        page.locator("select").nth(1).select_option(index=tokens)
        seen.append(visible_alt(page).split(":")[0])
    page.close()
    assert seen == [
        "layer 0, tokens 0 to 19",
        "layer 2, tokens 0 to 19",
        "layer 2, tokens 20 to 39",
        "layer 0, tokens 20 to 39",
    ]
