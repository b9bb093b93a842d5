"""The Explorer in a real JupyterLab: the live widget shows, not its static page, and its slider redraws the figure."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebooks import small_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
pytestmark = [
    pytest.mark.ui,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
]
PATIENCE_MS = 90_000  # cells import torch on a machine that may be busy


@pytest.fixture(scope="module")
def lab_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A JupyterLab of its own: all of its folders are temporary, no news pop-up, no token, loopback alone."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("lab")
    small_report(home / "small.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {f"JUPYTER_{kind}_DIR": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {f"JUPYTERLAB_{kind}_DIR": str(home / kind.lower()) for kind in ("SETTINGS", "WORKSPACES")}
    environment = {**os.environ, **folders, "HOME": str(home)}
    jupyter = [sys.executable, "-m", "jupyter"]
    news = ["labextension", "disable", "@jupyterlab/apputils-extension:announcements"]
    subprocess.run([*jupyter, *news], env=environment, check=True, capture_output=True)
    options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root", "--IdentityProvider.token="]
    with (home / "lab.log").open("w") as log:
        server = subprocess.Popen(
            [*jupyter, "lab", *options, "--LabApp.extension_manager=readonly"],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status", server, home / "lab.log")
            yield f"http://127.0.0.1:{port}/lab/tree/small.ipynb?reset"
        finally:
            server.terminate()
            server.wait(timeout=20)


def _wait_for(url: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail(f"JupyterLab did not answer within a minute:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def page(lab_url: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        opened = browser.new_page(viewport={"width": 1300, "height": 1400})
        opened.goto(lab_url)
        opened.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=PATIENCE_MS)
        # Run All before the kernel is there runs nothing, without a word.
        opened.wait_for_selector("text=/Python 3.*Idle/", timeout=PATIENCE_MS)
        opened.get_by_role("menuitem", name="Run", exact=True).click()
        opened.get_by_text("Run All Cells", exact=True).click()
        opened.wait_for_selector(".widget-slider", timeout=PATIENCE_MS)
        yield opened
        browser.close()


def test_live_slider_redraws_the_figure(page: Any) -> None:
    picture = page.locator(".widget-html img")
    assert picture.get_attribute("alt").lower().startswith("layer 0")
    page.locator(".widget-slider .noUi-handle").focus()
    for layer in (1, 2):
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(f'.widget-html img[alt^="Layer {layer}"]', timeout=PATIENCE_MS)
        assert page.locator(".widget-readout").text_content() == str(layer)


def test_lab_shows_the_widget_not_the_static_page(page: Any) -> None:
    assert page.locator(".moe-explorer").count() == 0
