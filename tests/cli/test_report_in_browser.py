"""The report in a real browser, on a wide screen and on two phones: no errors, nothing cut off, its buttons work."""

import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from batchwright.report.html import render
from batchwright.studies.compare_report import report
from batchwright.studies.comparison import STRATEGIES
from tests.studies.tiny import compared, write_checkpoint

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=8000", "--dump-dom"),
)
WIDTHS = (1200, 390, 375)
PROBE = """
const errors = [];
addEventListener("error", (event) => errors.push(event.message));
for (const kind of ["error", "warn"]) console[kind] = (...words) => errors.push(words.join(" "));
const seen = (selector) => [...document.querySelectorAll(selector)].filter((one) => one.getClientRects().length);
const wider = (one) => Math.max(0, one.scrollWidth - one.clientWidth);
const bars = () => seen(".grid rect[data-s]").map((rect) => Math.round(rect.getBoundingClientRect().width)).join();
addEventListener("load", () => {
  const found = {
    width: innerWidth,
    overflow: wider(document.documentElement),
    plates: seen(".plate h3").map((heading) => heading.textContent.trim()),
    rows: seen(".grid rect[data-s]").filter((rect) => rect.getBoundingClientRect().width > 0).length,
    lowest: Math.max(...seen("body *").map((one) => one.getBoundingClientRect().bottom)),
    cut: seen(".table").map(wider),
    overflows: {},
    bars: {},
  };
  for (const button of seen(".axis-choice")[0].querySelectorAll("button")) {
    button.click();
    found.overflows[button.value] = wider(document.documentElement);
    found.bars[button.value] = bars();
  }
  seen(".grid > g")[0].dispatchEvent(new MouseEvent("click", { bubbles: true }));
  found.words = seen("output.words").map((one) => one.textContent);
  parent.document.getElementById("found").append(JSON.stringify({ ...found, errors }) + "\\n");
});
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, which .ci/run installs")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, Any]], str]:
    """What a probe found in the page at each width, and what the browser logged.

    The page stands in frames, whose widths its style goes by; a headless window cannot be as narrow as a phone.
    """
    folder = tmp_path_factory.mktemp("browser")
    model = write_checkpoint(folder / "tiny")
    source = render(report(*compared(model, num_requests=12, mean_prompt=24, mean_output=12, batch_size=4)))
    probed = escape(source.replace("<head>", f"<head><script>{PROBE}</script>", 1))
    frames = "".join(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{probed}"></iframe>' for width in WIDTHS
    )
    (folder / "frames.html").write_text(f'<!doctype html><meta charset="utf-8"><pre id="found"></pre>{frames}')
    dom, log = browse(folder, folder / "frames.html")
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found, log
    results = [json.loads(line) for line in unescape(found[1]).splitlines()]
    return {result["width"]: result for result in results}, log


def browse(folder: Path, file: Path) -> tuple[str, str]:
    """The document as it is once its scripts have run, and the browser's log."""
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", file.as_uri()]
    done = subprocess.run(
        command,
        env=os.environ | {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(params=WIDTHS)
def found(request: pytest.FixtureRequest, rendered: tuple[dict[int, dict[str, Any]], str]) -> dict[str, Any]:
    return rendered[0][request.param]


def test_the_page_runs_without_errors(rendered: tuple[dict[int, dict[str, Any]], str]) -> None:
    """Neither its script nor the browser complains."""
    results, log = rendered
    assert results.keys() == set(WIDTHS)
    assert [result["errors"] for result in results.values()] == [[]] * len(WIDTHS)
    assert "CONSOLE" not in log


def test_nothing_is_wider_than_the_screen(found: dict[str, Any]) -> None:
    """The page never scrolls sideways, whichever axis is chosen."""
    assert found["overflow"] == 0
    assert found["overflows"] == {"common": 0, "own": 0, "steps": 0}


def test_no_column_of_a_table_is_cut_off(found: dict[str, Any]) -> None:
    """The tables may scroll by themselves, but need not on any of these screens."""
    assert found["cut"] == [0, 0]


def test_every_strategy_is_drawn(found: dict[str, Any]) -> None:
    """Its heading and its rows have a place on the page, in both scenes."""
    assert found["plates"] == list(STRATEGIES) * 2
    assert found["rows"] > 8 * 12
    assert found["lowest"] > 2000


def test_the_axis_can_be_chosen(found: dict[str, Any]) -> None:
    """Each button moves the rows to another scale."""
    assert found["bars"].keys() == {"common", "own", "steps"}
    assert len(set(found["bars"].values())) == 3


def test_a_tapped_row_says_whose_it_is(found: dict[str, Any]) -> None:
    """At the foot of the screen, where a finger can't hover."""
    (words,) = found["words"]
    assert words
