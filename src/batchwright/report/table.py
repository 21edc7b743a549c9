"""A table of metrics by runs, as data: printed on a terminal and in the report alike.

One line per metric and one value per run, so that it fits a phone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchwright.errors import ConfigError

Value = float | int | str | None
"""A table's value; None is printed as a dash and is never the best."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a line of a table shows. `definition` says exactly what that is.

    `format` is a Python format spec for numbers (`".1%"`). `better` says which value is marked as the best, None
    marks none.
    """

    label: str
    definition: str
    format: str = ""
    better: Literal["higher", "lower"] | None = None

    def printed(self, values: Sequence[Value]) -> list[tuple[str, bool]]:
        """Each value as text, and whether it is the best.

        Values that print alike are equally good, and if all print alike, none is best.
        """
        texts = [self._text(value) for value in values]
        numbers = [value for value in values if isinstance(value, int | float)]
        if self.better is None or not numbers or len({text for text in texts if text != _NOTHING}) < 2:
            return [(text, False) for text in texts]
        best = self._text(max(numbers) if self.better == "higher" else min(numbers))
        return [(text, text == best and not isinstance(value, str)) for text, value in zip(texts, values, strict=True)]

    def _text(self, value: Value) -> str:
        if value is None:
            return _NOTHING
        return value if isinstance(value, str) else format(value, self.format)


_NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """Metrics by runs. `runs`: their names; `lines`: each metric with its value for each run. Raises ConfigError."""

    runs: Sequence[str]
    lines: Sequence[tuple[Metric, Sequence[Value]]]

    def __post_init__(self) -> None:
        for metric, values in self.lines:
            if len(values) != len(self.runs):
                raise ConfigError(
                    f"make a table with the line {metric.label!r}",
                    f"it has {len(values)} values for {len(self.runs)} runs",
                    "give one value per run, None where there is none",
                )
