"""The report of a comparison: complete, self-contained, and with the very values that the JSON holds."""

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from batchwright.report.html import render
from batchwright.studies.compare_report import METRICS, report, table
from batchwright.studies.comparison import STRATEGIES, Comparison, Recorded
from tests.studies.tiny import compared, write_checkpoint

Compared = tuple[Comparison, list[Recorded]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    model = write_checkpoint(tmp_path_factory.mktemp("models") / "<i>tiny")
    return compared(model, num_requests=6, mean_prompt=16, mean_output=8, batch_size=4, max_queue_delay=0.01)


@pytest.fixture(scope="module")
def source(whole: Compared) -> str:
    return render(report(*whole))


class Tables(HTMLParser):
    """The texts of a page's tables: one list per table, of one list per line."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data


def test_the_report_has_every_strategy_in_both_scenes(whole: Compared, source: str) -> None:
    """A heading per scene with the rate it offers, a plate per strategy with its note."""
    comparison, _ = whole
    rate = comparison.scenes[1].rate
    headings = re.findall(r'<h2><span class="number">\d</span>(.*?)</h2>', source)
    assert headings == ["All at once", f"Arriving over time: {rate:.2f} requests/s"]
    plates = re.findall(
        r'<figure class="plate .*?<h3>.*?</svg>([\w-]+)</h3><p class="note">(.*?)</p>', source, re.DOTALL
    )
    assert plates == [(run.strategy, run.note) for scene in comparison.scenes for run in scene.runs]


def test_the_reports_tables_hold_the_jsons_values(whole: Compared, source: str) -> None:
    """Read back from JSON and printed by each metric's format, value by value."""
    comparison = msgspec.json.decode(msgspec.json.encode(whole[0]), type=Comparison)
    tables = Tables(source).tables
    assert len(tables) == 2
    for lines, scene in zip(tables, comparison.scenes, strict=True):
        assert lines[0] == ["", *STRATEGIES]
        for line, (metric, value_of) in zip(lines[1:], METRICS, strict=True):
            values = [value_of(run) for run in scene.runs]
            assert line == [metric.label, *("–" if value is None else format(value, metric.format) for value in values)]


def test_the_report_shows_what_the_records_say(whole: Compared, source: str) -> None:
    """As many steps per plate as were recorded."""
    steps = [int(number) for number in re.findall(r'data-steps="(\d+)"', source)]
    assert steps == [len(one.steps) for one in whole[1]]


def test_records_are_found_by_their_name(whole: Compared, source: str) -> None:
    """Whatever their order: each run is drawn from its own."""
    comparison, recorded = whole
    assert render(report(comparison, recorded[::-1])) == source


def test_the_report_says_what_is_needed_to_repeat_it(whole: Compared, source: str) -> None:
    """Requests, model, dtype, machine, measured peaks, page size, versions and seed."""
    facts = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", source.split("</header>", maxsplit=1)[0]))
    comparison, _ = whole
    assert facts["requests"].startswith(f"6, {comparison.num_prompt_tokens:,} prompt + ")
    assert facts["model"] == "&lt;i&gt;tiny, float32"
    assert facts["machine"] == "a test machine"
    assert "100 GFLOP/s" in facts["matrix products"]
    assert "10 GB/s" in facts["memory"]
    assert facts["pages"] == "of 16 tokens"
    assert facts["versions"].startswith("batchwright ")
    assert facts["seed"] == "0"


def test_the_report_needs_nothing_from_outside(source: str) -> None:
    """No address, no attribute that loads a file."""
    assert "http" not in source
    assert not re.search(r"<[^>]+\s(src|href|srcset)=", source)
    assert "@import" not in source


def test_every_metric_is_defined_and_has_a_direction_or_none() -> None:
    """A full sentence each, and no two of one name."""
    metrics = [metric for metric, _ in METRICS]
    assert len({metric.label for metric in metrics}) == len(metrics)
    assert all(metric.definition.endswith(".") for metric in metrics)
    assert {metric.better for metric in metrics} == {"higher", "lower", None}


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    """Requests of one token have no time per output token and no decode step."""
    comparison, recorded = compared(
        write_checkpoint(tmp_path / "tiny"), num_requests=2, mean_prompt=4, mean_output=1, strategies=("continuous",)
    )
    lines = {metric.label: metric.printed(values) for metric, values in table(comparison.scenes[0]).lines}
    assert lines["TPOT p50 (ms)"] == [("–", False)]
    assert ["TPOT p50 (ms)", "–"] in Tables(render(report(comparison, recorded))).tables[0]
