"""`batchwright compare`: the same requests under every batching strategy."""

from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from batchwright.cli.files import check_writable
from batchwright.cli.progress import Watch
from batchwright.records import write_records
from batchwright.report.html import render
from batchwright.studies.compare_page import page, table
from batchwright.studies.comparison import CompareSettings, SceneResult

_DEFAULTS = CompareSettings()


def compare(
    settings: Annotated[CompareSettings, Parameter(name="*")] = _DEFAULTS,
    *,
    json: Path | None = None,
    html: Path | None = None,
    records: Path | None = None,
) -> None:
    """Run the same requests one by one, in static and dynamic batches and under continuous batching.

    Two scenes, one engine: all requests at once (throughput), then arriving over time (latency).

    Example: batchwright compare --html compare.html --json compare.json

    Parameters
    ----------
    json
        Write all numbers here.
    html
        Write the report here: one file that opens without a network.
    records
        Write a JSON line per request and step here. Default: beside the report or the numbers.
    """
    from batchwright.studies.compare import compare as run

    records = records or _beside(html or json)
    check_writable(json, html, records)
    with Watch() as watch:
        comparison, recorded = run(settings, watch)
    console = Console()
    for scene in comparison.scenes:
        console.print(_printed(scene))
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(comparison)) + b"\n")
    if html:
        html.write_text(render(page(comparison, recorded)), encoding="utf-8")
    if records:
        write_records(records, chain.from_iterable((*one.requests, *one.steps) for one in recorded))
    for file in (html, json, records):
        if file:
            console.print(f"wrote {file}", highlight=False)


def _beside(file: Path | None) -> Path | None:
    return file.with_suffix(".records.jsonl") if file else None


def _printed(scene: SceneResult) -> Table:
    """The scene's table, a line per metric; the best value of each is bold."""
    rate = "" if scene.rate is None else f", {scene.rate:.2f} requests/s"
    numbers = table(scene)
    printed = Table(title=f"{scene.title}{rate}", title_justify="left", title_style="bold")
    printed.add_column("")
    for row in numbers.rows:
        printed.add_column(row.name, justify="right")
    for column, values in numbers.lines():
        marked = (f"[bold green]{text}[/]" if is_best else text for text, is_best in column.printed(values))
        printed.add_row(column.label, *marked)
    return printed
