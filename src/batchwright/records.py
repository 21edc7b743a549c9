"""What happened, as JSON lines: one `RequestRecord` per request, one `StepRecord` per step.

Engine and simulator write the same records, so whoever reads them (report, summary, calibration) cannot tell
which made them. Times are seconds on the run's clock, zero at the run's start; lengths are tokens.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from batchwright.errors import InputError

FinishReason = Literal["stop", "length", "abort", "deadline", "queue_timeout", "refused", "error"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request", tag_field="type"):
    """One request from arrival to its end. `token_times[i]`: when output token i was available."""

    run: str
    id: str
    arrival: float
    num_prompt: int
    num_output: int
    max_tokens: int
    num_cached: int = 0
    num_preempted: int = 0
    started: float | None = None
    finished: float
    finish_reason: FinishReason
    error: str | None = None
    token_times: tuple[float, ...] = ()


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """One row of a step. `request_id` None or `num_tokens` 0: a dead row. `start` is the first position computed."""

    request_id: str | None
    start: int
    num_tokens: int
    padding: int
    samples: bool


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="type"):
    """One step as planned and as it went. Page and token counts are taken after its plan was made."""

    run: str
    id: int
    reason: str
    started: float
    finished: float
    rows: tuple[RowRecord, ...]
    preempted: tuple[str, ...] = ()
    pages_held: int
    pages_total: int
    page_size: int
    tokens_stored: int
    num_waiting: int
    failed: str | None = None


Record = RequestRecord | StepRecord

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write `records` to `path`, one JSON object per line."""
    with path.open("wb") as file:
        for record in records:
            file.write(_encoder.encode(record) + b"\n")


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file that `write_records` made. Raises InputError with the line number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise InputError(
                    f"read records from {path}", f"line {number} is not a record ({error})", "remove or repair the line"
                ) from error
