"""The report of a comparison: complete, self-contained, and with the very values that the JSON holds."""

import re
import shlex
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from batchwright.report.html import render
from batchwright.studies.compare_report import metrics, report, table
from batchwright.studies.comparison import STRATEGIES, Comparison, Recorded
from batchwright.studies.findings import keeping_up, same_steps, verdict
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
    offered = comparison.scenes[1].offered
    headings = re.findall(r'<h2><span class="number">\d</span>(.*?)</h2>', source)
    assert headings == ["All at once", f"Arriving over time: {offered}"]
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
        for line, (metric, value_of) in zip(lines[1:], metrics(6), strict=True):
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
    """Requests and their lengths, model, dtype, machine, measured peaks, versions, seed, date and command."""
    facts = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", source.split("</header>", maxsplit=1)[0]))
    comparison, _ = whole
    prompt, output = comparison.num_prompt_tokens, comparison.num_output_tokens
    assert facts["requests"] == f"6; {prompt:,} prompt tokens, {output:,} output tokens"
    longest = f"longest prompt {comparison.longest_prompt}, longest output {comparison.longest_output}"
    assert facts["lengths"] == (
        f"made of Python&#x27;s help texts, lognormal lengths, coefficient of variation 0.9; {longest}"
    )
    assert facts["runs"] == "one of each strategy in each scene"
    assert facts["date"] == comparison.date
    model = shlex.quote(str(comparison.settings["model"]))
    assert unescape(facts["command"]) == (
        f"batchwright compare --model {model} --dtype float32 --num-requests 6 --mean-prompt 16 --mean-output 8 "
        "--batch-size 4 --max-queue-delay 0.01 --num-pages 256"
    )
    assert facts["model"] == "&lt;i&gt;tiny, float32"
    assert facts["machine"] == "a test machine"
    assert "100 GFLOP/s" in facts["matrix products"]
    assert "10 GB/s" in facts["memory"]
    assert facts["pages"] == "of 16 tokens"
    assert facts["versions"].startswith("batchwright ")
    assert facts["seed"] == "0"


def test_the_report_begins_with_its_verdict(whole: Compared, source: str) -> None:
    """Right under the title; what else was found is said in its scene."""
    comparison, recorded = whole
    records = {its.run: its for its in recorded}
    header = unescape(source.split("</h1>")[1])
    assert header.lstrip().startswith(f'<p class="verdict">{verdict(comparison, records)}</p>')
    first, second = re.findall(r'<p class="what">(.*?)</p>', header)
    at_once, over_time = comparison.scenes
    assert first == f"{at_once.what} {same_steps(at_once, records)}"
    assert "Static and dynamic executed the same steps" in first
    assert second == f"{over_time.what} {keeping_up(at_once, over_time.rate)}"


def test_flags_and_lists_are_in_the_command_as_typed(tmp_path: Path) -> None:
    """A flag has no value, and strategies follow one another; the JSON's lists are the settings' tuples."""
    trace = tmp_path / "a trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}\n')
    comparison, recorded = compared(
        write_checkpoint(tmp_path / "tiny"), trace=trace, scale_lengths=True, strategies=("continuous", "static")
    )
    again = msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison)
    for one in (comparison, again):
        facts = dict(report(one, recorded).facts)
        assert facts["lengths"].startswith("from the trace a trace.jsonl, lengths scaled down to fit; longest prompt ")
        words = shlex.split(facts["command"])
        assert words[4:10] == ["--dtype", "float32", "--strategies", "continuous", "static", "--trace"]
        assert words[11] == "--scale-lengths"


def test_outputs_that_may_end_early_are_at_most(tmp_path: Path) -> None:
    """A requests file forces no length unless it says so."""
    file = tmp_path / "r.jsonl"
    file.write_text('{"ids": [1, 2], "max_tokens": 3}\n')
    facts = dict(report(*compared(write_checkpoint(tmp_path / "tiny"), requests=file, strategies=("static",))).facts)
    assert facts["requests"] == "1; 2 prompt tokens, at most 3 output tokens"
    assert facts["lengths"] == "from r.jsonl; longest prompt 2, longest output at most 3"


@pytest.mark.parametrize(("num_requests", "tail"), [(1, "max"), (99, "max"), (100, "p99")])
def test_a_tail_of_few_requests_is_their_maximum(num_requests: int, tail: str) -> None:
    """Below a hundred the 99th percentile would be made up between the last two."""
    labels = [metric.label for metric, _ in metrics(num_requests)]
    assert [label for label in labels if "max (s)" in label or "p99" in label] == [
        f"TTFT {tail} (s)",
        f"latency {tail} (s)",
    ]


def test_a_tails_value_is_the_one_that_its_label_names(whole: Compared) -> None:
    """The largest of the run, or its percentile, both of which the JSON holds."""
    run = whole[0].scenes[0].runs[0]
    values = {metric.label: value_of(run) for number in (6, 100) for metric, value_of in metrics(number)}
    ttft, latency = run.summary.ttft, run.summary.latency
    assert (values["TTFT max (s)"], values["latency max (s)"]) == (ttft.max, latency.max)
    assert (values["TTFT p99 (s)"], values["latency p99 (s)"]) == (ttft.p99, latency.p99)


def test_the_report_needs_nothing_from_outside(source: str) -> None:
    """No address, no attribute that loads a file."""
    assert "http" not in source
    assert not re.search(r"<[^>]+\s(src|href|srcset)=", source)
    assert "@import" not in source


def test_every_metric_is_defined_and_has_a_direction_or_none() -> None:
    """A full sentence each, and no two of one name."""
    shown = [metric for metric, _ in metrics(24)]
    assert len({metric.label for metric in shown}) == len(shown)
    assert all(metric.definition.endswith(".") for metric in shown)
    assert {metric.better for metric in shown} == {"higher", "lower", None}


def test_what_was_not_measured_is_a_dash(tmp_path: Path) -> None:
    """Requests of one token have no time per output token and no decode step."""
    comparison, recorded = compared(
        write_checkpoint(tmp_path / "tiny"), num_requests=2, mean_prompt=4, mean_output=1, strategies=("continuous",)
    )
    lines = {metric.label: metric.printed(values) for metric, values in table(comparison.scenes[0]).lines}
    assert lines["TPOT p50 (ms)"] == [("–", False)]
    assert ["TPOT p50 (ms)", "–"] in Tables(render(report(comparison, recorded))).tables[0]
