"""A table as data: which texts it prints, and which of them it marks as the best."""

import pytest

from batchwright.errors import ConfigError
from batchwright.report.table import Metric, Table


def printed(values: list[object], format: str = ".1f", better: str | None = "higher") -> list[tuple[str, bool]]:
    return Metric("metric", "what it is", format, better).printed(values)


def test_values_are_printed_by_the_metrics_format() -> None:
    """Numbers by the format, text as it is, nothing as a dash."""
    assert [text for text, _ in printed([1234.56, "text", None], ",.0f")] == ["1,235", "text", "–"]


@pytest.mark.parametrize(("better", "best"), [("higher", [False, True]), ("lower", [True, False]), (None, [False] * 2)])
def test_the_best_is_what_the_metric_says_is_better(better: str | None, best: list[bool]) -> None:
    """Higher, lower, or nothing at all."""
    assert [is_best for _, is_best in printed([1.0, 2.0], better=better)] == best


def test_values_that_print_alike_are_equally_good() -> None:
    """A reader can't see the difference, so the mark must not claim one."""
    assert printed([2.04, 1.0, 1.96]) == [("2.0", True), ("1.0", False), ("2.0", True)]


@pytest.mark.parametrize("values", [[], [3.0], [3.0, 3.0], [3.04, 2.96, None], [None, None], [3.0, None], ["a", "b"]])
def test_without_a_difference_nothing_is_best(values: list[object]) -> None:
    """One value, equal values, none at all, or text."""
    assert not any(is_best for _, is_best in printed(values))


def test_text_is_never_best_even_if_it_reads_like_the_best_number() -> None:
    """It may come from elsewhere and mean something else."""
    assert printed(["2.0", 2.0, 1.0]) == [("2.0", False), ("2.0", True), ("1.0", False)]


def test_zero_is_a_value() -> None:
    """The least padding there can be is the best, and no dash."""
    assert printed([0.0, 0.25], ".1%", "lower") == [("0.0%", True), ("25.0%", False)]


def test_a_line_of_another_length_is_refused() -> None:
    """By its label, with both numbers."""
    with pytest.raises(ConfigError, match="line 'second': it has 1 values for 2 runs; give one value per run"):
        Table(["a", "b"], [(Metric("first", ""), [1, 2]), (Metric("second", ""), [3])])


def test_a_table_may_be_empty() -> None:
    """Of runs, of metrics, or of both."""
    assert Table([], []).lines == []
    assert Table([], [(Metric("first", ""), [])]).runs == []
