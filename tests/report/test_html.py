"""The page as a browser would take it: well-formed, self-contained, escaped, and true to its records."""

import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest

from batchwright.records import RequestRecord, RowRecord, StepRecord
from batchwright.report.figures import KIND_CLASS
from batchwright.report.html import Report, Run, Scene, render
from batchwright.report.table import Metric, Table
from tests.report.synthetic import report, runs

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = """<script>alert("x")</script>&'"""


class Tree(HTMLParser):
    """Reads a page strictly: every tag is closed, in order. Collects elements, and texts by their tag."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]].append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def whole() -> str:
    return render(report())


def lone(*, requests: list[RequestRecord], steps: list[StepRecord], table: Table | None = None) -> Report:
    scene = Scene("Scene", "What it shows.", table or Table([], []), [Run("alone", "note", requests, steps)])
    return Report("Title", "Subtitle", [("Fact", "value")], [scene])


def only_request(id: str = "r0", **changed: object) -> RequestRecord:
    facts = {"arrival": 0.0, "num_prompt": 4, "num_output": 1, "max_tokens": 1, "started": 0.0, "finished": 1.0}
    ends = {"run": "r", "id": id, "finish_reason": "length", "token_times": (1.0,)}
    return RequestRecord(**(facts | ends | changed))


def only_step(id: str = "r0", padding: int = 0) -> StepRecord:
    return StepRecord(
        run="r",
        id=0,
        reason="idle",
        started=0.0,
        finished=1.0,
        rows=(RowRecord(id, 0, 4, padding, True),),
        pages_held=1,
        pages_total=8,
        page_size=4,
        tokens_stored=4,
        num_waiting=0,
    )


def test_the_page_is_well_formed(whole: str) -> None:
    """Every tag is closed in order, and there is one title, one style sheet and one script."""
    tree = Tree(whole)
    assert [len(tree.named(tag)) for tag in ("style", "script", "h1", "main")] == [1, 1, 1, 1]


def test_the_page_asks_nothing_of_a_network(whole: str) -> None:
    """No address anywhere, and no attribute or rule that loads something."""
    assert "http" not in whole
    assert "@import" not in whole
    assert set(re.findall(r"url\(([^)]*)\)", whole)) == {"#padding", "#dead", "#failed"}
    assert not [attributes for _, attributes in Tree(whole).elements if attributes.keys() & {"src", "href", "srcset"}]


def test_the_page_stays_small(whole: str) -> None:
    """64 requests, four strategies and two scenes, some 13,000 steps in all, in well under 1.5 MB."""
    assert len(whole.encode()) < 700_000


def test_the_same_records_give_the_same_page(whole: str) -> None:
    """Nothing on it depends on what was rendered before."""
    assert render(report()) == whole


def test_areas_on_the_page_are_row_steps() -> None:
    """What a reader sees of each kind is what the records hold."""
    for run in runs(24):
        area: dict[str | None, float] = defaultdict(float)
        for rect in plate_rects(run):
            area[rect["class"]] += float(str(rect["data-s"]).split()[1])
        rows = [row for step in run.steps for row in step.rows]
        padding = sum(row.padding / (row.num_tokens + row.padding) for row in rows if row.num_tokens)
        assert area[KIND_CLASS["padding"]] == pytest.approx(padding, abs=0.01)
        assert area[KIND_CLASS["dead"]] == sum(1 for row in rows if not row.num_tokens)
        useful = area["p"] + area["d"] + area["e"]
        assert useful == pytest.approx(sum(1 for row in rows if row.num_tokens) - padding, abs=0.01)


def test_rectangles_of_a_row_do_not_overlap_on_the_page() -> None:
    """Neither on the clock nor in steps, to the precision that is written."""
    for run in runs(24):
        for spans in rects_by_row(run).values():
            for (x, width, step, num_steps), (next_x, _, next_step, _) in pairwise(sorted(spans)):
                assert x + width <= next_x + 0.0021
                assert step + num_steps <= next_step + 0.0003


def plate_rects(run: Run) -> list[dict[str, str | None]]:
    tree = Tree(render(Report("", "", [], [Scene("", "", Table([], []), [run])])))
    return [rect for rect in tree.named("rect") if "data-s" in rect and rect["class"] != "n"]


def rects_by_row(run: Run) -> dict[str, list[tuple[float, ...]]]:
    source = render(Report("", "", [], [Scene("", "", Table([], []), [run])]))
    found = defaultdict(list)
    for y, group in re.findall(r'<g transform="translate\(0,([\d.]+)\)">(.*?)</g>', source):
        for rect in re.findall(r'x="([\d.]+)%" width="([\d.]+)%" height="[\d.]+" data-s="([\d.]+) ([\d.]+)"', group):
            found[y].append(tuple(map(float, rect)))
    return found


def test_all_runs_of_a_scene_share_one_clock(whole: str) -> None:
    """The slowest run reaches the right edge, the others end where their share of its time ends."""
    compared = list(runs(64))
    longest = max(run.steps[-1].finished for run in compared)
    own = [float(plate["data-own"]) for plate in Tree(whole).named("figure") if "data-own" in plate]
    assert own[:4] == pytest.approx([run.steps[-1].finished / longest for run in compared], abs=1e-4)


def test_a_run_keeps_its_style_through_the_page(whole: str) -> None:
    """The same four, in the same order, in both scenes."""
    plates = [str(figure["class"]) for figure in Tree(whole).named("figure") if "plate" in str(figure["class"])]
    assert plates == [f"plate s{index}" for index in range(4)] * 2


def test_every_figure_says_what_it_shows(whole: str) -> None:
    """Each SVG is hidden from a screen reader, or has a title and a description."""
    svgs = Tree(whole).named("svg")
    figures = [svg for svg in svgs if svg.get("role") == "img"]
    assert len(figures) == 2 * (4 * 3 + 2)
    assert len(re.findall(r'role="img"><title>[^<]+</title><desc>[^<]+</desc>', whole)) == len(figures)
    assert all("aria-hidden" in svg or "viewbox" in svg for svg in svgs if svg not in figures)


def test_whatever_comes_from_outside_is_escaped() -> None:
    """Ids, names, notes, facts, table cells and definitions are text, never markup."""
    scene = Scene(
        HOSTILE,
        HOSTILE,
        Table([HOSTILE], [(Metric(HOSTILE, HOSTILE), [HOSTILE])]),
        [Run(HOSTILE, HOSTILE, [only_request(HOSTILE)], [only_step(HOSTILE)])],
    )
    tree = Tree(render(Report(HOSTILE, HOSTILE, [(HOSTILE, HOSTILE)], [scene])))
    assert len(tree.named("script")) == 1
    assert not any("alert" in text for text in tree.texts["script"])
    for tag in ("h1", "h2", "h3", "p", "dt", "dd", "th", "td", "title"):
        assert any(HOSTILE in text for text in tree.texts[tag]), tag


def test_failed_steps_are_drawn_and_explained_only_where_there_are_any(whole: str) -> None:
    """Neither in the grid nor in the legend of a report without failed steps."""
    failed = changed_step(failed="oom")
    source = render(lone(requests=[only_request()], steps=[failed]))
    assert '<rect class="f" x=' in source
    assert "<b>failed</b>" in source
    assert "<b>failed</b>" not in whole


def test_a_run_without_records_says_so() -> None:
    """No figure is drawn of nothing."""
    source = render(lone(requests=[], steps=[]))
    assert "No step was recorded." in source
    assert not [svg for svg in Tree(source).named("svg") if svg.get("role") == "img"]


def test_a_run_in_which_every_request_was_refused_is_a_page() -> None:
    """There are requests, but no step and no latency."""
    refused = only_request(finish_reason="refused", finished=0.0, started=None, token_times=(), num_output=0)
    assert "No request got that far." in render(lone(requests=[refused], steps=[]))


@pytest.mark.parametrize("padding", [0, 4])
def test_a_single_request_of_a_single_step_is_a_page(padding: int) -> None:
    """With all scales collapsed to one value, nothing divides by zero or prints NaN."""
    source = render(lone(requests=[only_request()], steps=[only_step(padding=padding)]))
    Tree(source)
    assert "nan" not in source.replace("tabular-nums", "").lower().split("</style>")[1]


def test_a_run_without_duration_is_a_page() -> None:
    """A step that took no time has no width, and that is all."""
    instant = only_request(finished=0.0, token_times=(0.0,))
    Tree(render(lone(requests=[instant], steps=[changed_step(finished=0.0)])))


def changed_step(**changed: object) -> StepRecord:
    return msgspec.structs.replace(only_step(), **changed)


def test_a_run_without_a_cache_has_no_cache_figure() -> None:
    """Batches of anything but tokens hold no pages."""
    step = changed_step(pages_held=0)
    assert "<b>KV cache" not in render(lone(requests=[only_request()], steps=[step]))


def test_the_best_values_are_bold_also_where_several_are_equal() -> None:
    """Best as printed: two values that look alike are equally good, and text or nothing never wins."""
    lines = [
        (Metric("High", "d", ".1f", "higher"), [1.04, 1.01, 0.5, "?"]),
        (Metric("Low", "d", ".0%", "lower"), [0.2, 0.1, None, 0.3]),
        (Metric("Any", "d", ".0f"), [1.0, 2.0, 3.0, 4]),
    ]
    tree = Tree(render(lone(requests=[], steps=[], table=Table(["a", "b", "c", "d"], lines))))
    bold = [text for text in tree.texts["b"] if re.match(r"[\d?–]", text)]
    assert bold == ["1.0", "1.0", "10%"]


def test_where_all_values_are_alike_none_is_best() -> None:
    """Bold would claim a difference."""
    alike = Table(["a", "b"], [(Metric("High", "d", ".0f", "higher"), [1, 1])])
    assert "1" not in Tree(render(lone(requests=[], steps=[], table=alike))).texts["b"]


def test_every_metric_is_defined_once(whole: str) -> None:
    """Both scenes have the same lines; the list at the end names each of them one time."""
    defined = Tree(whole).texts["dt"]
    assert all(defined.count(metric.label) == 1 for metric, _ in report().scenes[0].table.lines)


def test_more_runs_than_styles_still_render() -> None:
    """The seventh run looks like the first."""
    run = Run("x", "", [only_request()], [only_step()])
    scene = Scene("", "", Table([], []), [replace(run, name=f"run {index}") for index in range(7)])
    plates = [figure["class"] for figure in Tree(render(Report("", "", [], [scene]))).named("figure")]
    assert plates[0] == plates[6] == "plate s0"
