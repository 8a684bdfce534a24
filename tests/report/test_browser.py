"""Pages as a browser shows them: wide and on a phone, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape

import numpy as np
import pytest
from PIL import Image

from tests.report.examples import EXPERIMENT, report, statements
from tests.report.test_analysis_page import report as analysis
from trainer.report.analysis_page import write_analysis
from trainer.report.pages import write_renderings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in the path")

WIDTHS = (1280, 390)
HEIGHT = 2600
MEASURE = """
<script>onload = () => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    const table = page.querySelector(".scroll table");
    const box = table.closest(".scroll");
    box.scrollLeft = 1e6;
    const head = table.querySelector("tbody th").getBoundingClientRect();
    found[frame.title] = {
      overflow: page.documentElement.scrollWidth - frame.clientWidth,
      cut: box.scrollWidth - box.clientWidth,
      moved: head.left - box.getBoundingClientRect().left,
      images: [...page.images].map(
        i => [i.complete && i.naturalWidth > 0, ...["x", "y", "width"].map(
          k => i.getBoundingClientRect()[k])]),
    };
    box.scrollLeft = 0;
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}</script>
<pre id="found" hidden></pre>
"""
"""Of every page: what lies beyond the window's width; what of the first table does, before it is
scrolled to its end; where its first column is then; and its images."""


def browser(page, *words, place):
    """What Chromium says and prints."""
    options = (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *("--hide-scrollbars", "--virtual-time-budget=5000", f"--user-data-dir={place}/profile"),
    )
    return subprocess.run(
        [CHROMIUM, *options, *words, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page that shows all others beside each other, in frames of both widths."""
    place = tmp_path_factory.mktemp("pages")
    run = [*statements("RoPE", (100, 90, 50, 10)), *statements("DroPE", (90, 80, 70, 60))]
    made = {"Made": "2026-01-02 03:04 UTC", "Command": f"python -m trainer checkpoint={'a/' * 60}"}
    write_renderings(report(*run, **EXPERIMENT, made=made, training_length=64), place / "run")
    write_analysis(analysis("one"), place / "analysis")
    frames = "".join(
        f'<iframe title="{name} {width}" width={width} height={HEIGHT} frameborder=0 '
        f'srcdoc="{escape((place / name / "report.html").read_text())}"></iframe>'
        for width in WIDTHS
        for name in ("run", "analysis")
    )
    page = place / "all.html"
    style = "<style>body{margin:0;display:flex}iframe{flex:none}</style>"
    page.write_text(f'<meta name="color-scheme" content="light dark">{style}{frames}{MEASURE}')
    return page


@pytest.fixture(scope="module")
def measured(pages):
    """By page and width, what the browser finds; it says nothing on its console."""
    result = browser(pages, "--dump-dom", place=pages.parent)
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
    return json.loads(re.search(r'<pre id="found"[^>]*>(.*?)</pre>', result.stdout)[1])


@pytest.fixture(scope="module", params=["light", "dark"])
def shot(request, pages):
    """A screenshot of all pages in a colour scheme, ``[y, x, RGB]``, and which it is."""
    path = pages.parent / f"{request.param}.png"
    words = [f"--window-size={2 * sum(WIDTHS)},{HEIGHT}", f"--screenshot={path}"]
    words += ["--blink-settings=preferredColorScheme=0"] if request.param == "dark" else []
    browser(pages, *words, place=pages.parent)
    return np.asarray(Image.open(path).convert("RGB")).astype(int), request.param


def test_only_tables_and_figures_are_wider_than_a_window(measured):
    assert {name: page["overflow"] for name, page in measured.items() if page["overflow"]} == {}


def test_the_main_table_is_whole_at_1280_pixels(measured):
    assert [page["cut"] for name, page in measured.items() if name.endswith("1280")] == [0] * 2


def test_the_names_of_rows_stay_in_sight_on_a_phone(measured):
    assert measured["run 390"]["cut"] > 0
    assert measured["run 390"]["moved"] == pytest.approx(0, abs=1)


def test_every_figure_is_shown(measured):
    for page in measured.values():
        assert page["images"]
        assert all(shown for shown, *_ in page["images"])


def test_figures_have_the_ground_of_their_page(measured, shot):
    pixels, scheme = shot
    ground = {"light": (255,) * 3, "dark": (24,) * 3}[scheme]
    offset, seen = 0, 0
    for name, page in measured.items():
        for _, x, y, width in page["images"]:
            if y + 40 < HEIGHT and x + width <= int(name.split()[-1]):
                # Within the border, left of the axes, from top to bottom of the first centimetre.
                corner = pixels[int(y) + 3 : int(y) + 20, offset + int(x) + 3 : offset + int(x) + 9]
                assert (corner == ground).all(), (name, y)
                seen += 1
        offset += int(name.split()[-1])
    assert seen >= 3


def test_text_is_light_on_dark_and_dark_on_light(shot):
    pixels, scheme = shot
    brightness = pixels.mean(axis=-1)
    assert np.median(brightness) in {"light": [255], "dark": [24]}[scheme]
    ink = (brightness > 200) if scheme == "dark" else (brightness < 60)
    assert 0.005 < ink.mean() < 0.15
