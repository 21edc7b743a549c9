"""Progress on standard error: a bar per part on a terminal, one plain line per part elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Watch:
    """What a study is told to report to (`studies.compare.Watcher`)."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:42}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=4,  # drawing takes time from what is being measured
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task("", visible=False)
        self._what = ""
        self._began = time.monotonic()

    def begin(self, what: str, total: int) -> None:
        self._end()
        self._what, self._began = what, time.monotonic()
        self._task = self._bars.add_task(what, total=total or None)

    def advance(self, num_done: int) -> None:
        self._bars.update(self._task, completed=num_done)

    def _end(self) -> None:
        if not self._what:
            return
        task = self._bars.tasks[-1]
        self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)
        self._bars.stop_task(self._task)
        if not self._console.is_terminal:
            line = f"{self._what}: {time.monotonic() - self._began:.1f} s"
            self._console.print(line, markup=False, soft_wrap=True)
        self._what = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        self._bars.stop()
