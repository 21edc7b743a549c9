"""`batchwright compare`: the same requests under every batching strategy."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from batchwright.cli.files import check_writable, is_special, whole
from batchwright.cli.progress import Watch
from batchwright.errors import MissingDependency
from batchwright.records import write_records
from batchwright.report.html import render
from batchwright.studies.compare_report import report, table
from batchwright.studies.comparison import CompareSettings, Comparison, Recorded, SceneResult

_DEFAULTS = CompareSettings()


def compare(
    settings: Annotated[CompareSettings, Parameter(name="*")] = _DEFAULTS,
    *,
    json: Path | None = None,
    html: Path | None = None,
    records: Path | None = None,
) -> None:
    """The same requests under every strategy; the tables are printed, the rest is written where asked.

    Parameters
    ----------
    json
        Write all numbers here.
    html
        Write the report here: one file that opens without a network.
    records
        Write a JSON line per request and step here. Default: beside the report or the numbers.
    """
    records = records or _beside(html or json)
    check_writable(json, html, records)
    with Watch() as watch:
        comparison, recorded = _study()(settings, watch)
    console = Console(highlight=False)
    try:  # files first: whoever reads the tables may stop reading; the tables all the same: a disk may be full
        _write(comparison, recorded, json=json, html=html, records=records)
    finally:
        for scene in comparison.scenes:
            console.print(_printed(scene))
    for written in filter(None, (html, json, records)):
        console.print(f"wrote {written}", markup=False, soft_wrap=True)


def _write(
    comparison: Comparison, recorded: Sequence[Recorded], *, json: Path | None, html: Path | None, records: Path | None
) -> None:
    if records:
        with whole(records) as file:
            write_records(file, chain.from_iterable((*one.requests, *one.steps) for one in recorded))
    if json:
        with whole(json) as file:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    if html:
        with whole(html) as file:
            file.write_text(render(report(comparison, recorded)), encoding="utf-8")


def _study() -> Callable[[CompareSettings, Watch], tuple[Comparison, list[Recorded]]]:
    """The study, which needs torch and takes its time to import. Raises MissingDependency."""
    try:
        from batchwright.studies.compare import compare as study
    except ModuleNotFoundError as error:
        fact = f"it needs {error.name}, which is not installed"
        raise MissingDependency("compare strategies", fact, "run: pip install 'batchwright[serve]'") from error
    return study


def _beside(file: Path | None) -> Path | None:
    """Where records go by default."""
    return None if file is None or is_special(file) else file.with_suffix(".records.jsonl")


def _printed(scene: SceneResult) -> Table:
    """The scene's table, a line per metric; the best value of each is bold."""
    numbers = table(scene)
    title = ", ".join(filter(None, (scene.title, scene.offered)))
    printed = Table(title=title, title_justify="left", title_style="bold")
    printed.add_column("")
    for name in numbers.runs:
        printed.add_column(name, justify="right")
    for metric, values in numbers.lines:
        marked = (f"[bold green]{text}[/]" if is_best else text for text, is_best in metric.printed(values))
        printed.add_row(metric.label, *marked)
    return printed
