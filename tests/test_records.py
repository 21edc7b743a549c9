"""What a record says of itself, and of what its rows did."""

import pytest

from batchwright.records import RequestRecord, RowRecord, StepRecord, row_kinds


def request(**changed: object) -> RequestRecord:
    """A request with a prompt of four that arrived at 1 s and got tokens at 3 s and 4 s."""
    facts = {"arrival": 1.0, "num_prompt": 4, "num_output": 2, "max_tokens": 2, "finished": 4.0}
    return RequestRecord(
        **(facts | {"run": "r", "id": "a", "finish_reason": "length", "token_times": (3.0, 4.0)} | changed)
    )


def step(id: int, *rows: RowRecord, preempted: tuple[str, ...] = (), failed: str | None = None) -> StepRecord:
    return StepRecord(
        run="r",
        id=id,
        reason="next",
        started=float(id),
        finished=id + 1.0,
        rows=rows,
        preempted=preempted,
        pages_held=1,
        pages_total=8,
        page_size=4,
        tokens_stored=4,
        num_waiting=0,
        failed=failed,
    )


PROMPT = RowRecord("a", 0, 4, 0, True)
ANSWER = RowRecord("a", 4, 1, 0, True)
DEAD = RowRecord("a", 0, 0, 1, False)
FILLER = RowRecord(None, 0, 0, 1, False)


def test_latencies_count_from_the_arrival() -> None:
    """To the first token, and to the end."""
    assert (request().ttft, request().latency) == (2.0, 3.0)


@pytest.mark.parametrize("reason", ["abort", "deadline", "queue_timeout", "refused", "error"])
def test_a_lost_request_has_no_latency(reason: str) -> None:
    """Ending early is not being fast; the first token that it got was still that soon."""
    lost = request(finish_reason=reason)
    assert (lost.is_completed, lost.latency, lost.ttft) == (False, None, 2.0)


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_request_that_ended_as_wanted_is_completed(reason: str) -> None:
    """By its end token, or by its limit."""
    assert request(finish_reason=reason).is_completed


def test_without_a_token_there_is_no_ttft() -> None:
    """Zero would be the best one."""
    assert request(token_times=(), num_output=0).ttft is None


def test_live_rows_are_those_that_compute() -> None:
    """Neither ended requests nor fillers."""
    assert step(0, PROMPT, DEAD, FILLER).num_live == 1


def test_rows_are_prefill_up_to_the_last_token_of_the_prompt() -> None:
    """Also in chunks, and also if the chunk is one token long."""
    chunks = [RowRecord("a", 0, 3, 0, False), RowRecord("a", 3, 1, 0, True), ANSWER]
    kinds = row_kinds([request()], [step(i, chunk) for i, chunk in enumerate(chunks)])
    assert list(kinds) == [("prefill",), ("prefill",), ("decode",)]


def test_computing_again_what_a_preemption_took_is_prefill() -> None:
    """Until a token is sampled again, and also if the attempt before has failed."""
    again = RowRecord("a", 0, 5, 0, True)
    steps = [step(0, FILLER, preempted=("a",)), step(1, again, failed="oom"), step(2, again), step(3, ANSWER)]
    assert list(row_kinds([request()], steps)) == [("dead",), ("failed",), ("prefill",), ("decode",)]


def test_a_request_without_a_record_decodes_one_token_at_a_time() -> None:
    """It is still running, so its prompt's length is unknown."""
    assert list(row_kinds([], [step(0, PROMPT, ANSWER)])) == [("prefill", "decode")]
