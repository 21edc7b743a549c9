"""A table of metrics by runs, as data: printed on a terminal and in the report alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from batchwright.errors import ConfigError

Value = float | int | str | None
"""A table's value; None is printed as a dash and is never the best."""


@dataclass(frozen=True, slots=True)
class Column:
    """One metric. `definition` says exactly what it is; `format` is a Python format spec for numbers (`".1%"`).

    `better` says which value is marked as the best, None marks none.
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
class Row:
    """The values of one run, as many as there are columns. `name` is the run's."""

    name: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Table:
    """Metrics by runs, to be printed with one line per metric, so that it fits a phone. Raises ConfigError."""

    columns: Sequence[Column]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row.values) != len(self.columns):
                raise ConfigError(
                    f"make a table with the row {row.name!r}",
                    f"it has {len(row.values)} values for {len(self.columns)} columns",
                    "give one value per column, None where there is none",
                )

    def lines(self) -> list[tuple[Column, list[Value]]]:
        """Each metric with its values, in the order of the rows."""
        return [(column, [row.values[index] for row in self.rows]) for index, column in enumerate(self.columns)]
