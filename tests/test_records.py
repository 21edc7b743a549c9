"""What a record says of itself, and of what its rows did."""

from typing import Any

import pytest

from batchwright.errors import ConfigError
from batchwright.policy.types import Chunk, Load, StepPlan
from batchwright.records import Recorder, RequestRecord, RowRecord, StepRecord, row_kinds


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


# ---- the recorder


LOAD = Load(num_waiting=0, num_running=1, pages_held=2, pages_total=8, tokens_stored=3, num_in_flight=1)


def chunk(request_id: str | None, start: int, num_tokens: int, padding: int = 0) -> Chunk:
    return Chunk(request_id, start, num_tokens, padding, num_tokens > 0, 0, (0, 1))


def run_step(recorder: Recorder, plan: StepPlan, **ended: Any) -> None:
    """Plan n, from n to n + 1 s."""
    recorder.planned(plan, LOAD)
    recorder.began(plan.id, float(plan.id))
    recorder.committed(plan.id, plan.id + 1.0, **ended)


def run_request(recorder: Recorder, number: int) -> None:
    """One step, one token."""
    recorder.arrived(f"{number}", number, 4, 1)
    run_step(recorder, StepPlan(number, "idle", (chunk(f"{number}", 0, 4),)))
    recorder.token(f"{number}", number + 1.0)
    recorder.ended(f"{number}", number + 1.0, "length")


def test_a_recorder_keeps_all_records_or_the_newest() -> None:
    """Of requests and of steps, in order; None is all."""
    for keep, first in ((None, 0), (3, 7), (20, 0), (0, 10)):
        recorder = Recorder("r", 4, keep=keep)
        for number in range(10):
            run_request(recorder, number)
        assert [record.id for record in recorder.requests] == [f"{number}" for number in range(first, 10)]
        assert [record.id for record in recorder.steps] == list(range(first, 10))


def test_what_needs_all_records_is_told_when_some_are_gone() -> None:
    """Numbers of a part would pass for those of the whole; the message says how to keep all."""
    recorder = Recorder("r", 4, keep=3)
    for number in range(3):
        run_request(recorder, number)
    assert recorder.complete() == (recorder.requests, recorder.steps)
    run_request(recorder, 3)
    with pytest.raises(ConfigError, match=r"run 'r': it keeps the newest 3, and has forgotten 2; measure with partial"):
        recorder.complete()


def test_a_number_to_keep_that_is_none_is_refused() -> None:
    """In three parts."""
    with pytest.raises(ConfigError, match="keep -1 records: it is less than none; give 0 or more"):
        Recorder("r", 4, keep=-1)


def test_a_request_starts_when_its_first_step_begins() -> None:
    """Not when that was planned; and what it did not compute there was cached."""
    recorder = Recorder("r", 4, origin=10.0)
    recorder.arrived("a", 10.5, 12, 1)
    recorder.planned(StepPlan(0, "idle", (chunk("a", 8, 4),)), LOAD)
    recorder.began(0, 12.0)
    recorder.committed(0, 13.0)
    run_step(recorder, StepPlan(20, "idle", (chunk("a", 12, 1),)))
    record = recorder.ended("a", 21.0, "length")
    assert (record.started, record.num_cached) == (2.0, 8)
    assert [(one.started, one.finished) for one in recorder.steps] == [(2.0, 3.0), (10.0, 11.0)]


def test_a_late_row_is_recorded_as_dead() -> None:
    """Its request had ended: it is as wide as what it computed, and stores nothing."""
    recorder = Recorder("r", 4)
    plan = StepPlan(0, "idle", (chunk("late", 4, 1), chunk("a", 0, 4, 2)))
    run_step(recorder, plan, late={"late"})
    (record,) = recorder.steps
    assert record.rows == (RowRecord("late", 4, 0, 1, False), RowRecord("a", 0, 4, 2, True))
    assert (record.num_live, record.tokens_stored) == (1, 7)


def test_a_step_that_never_began_leaves_whom_it_preempted() -> None:
    """No record, nobody has started; but the next step that runs tells of the preemption."""
    recorder = Recorder("r", 4)
    for request_id in "ab":
        recorder.arrived(request_id, 0.0, 4, 1)
    recorder.planned(StepPlan(0, "idle", (chunk("a", 0, 4),), ("b",)), LOAD)
    recorder.committed(0, 1.0, "void")
    assert recorder.steps == []
    run_step(recorder, StepPlan(1, "idle", (chunk("a", 0, 4),), ("c",)))
    run_step(recorder, StepPlan(2, "idle", (chunk("a", 4, 1),)))
    assert [record.preempted for record in recorder.steps] == [("b", "c"), ()]
    assert [recorder.ended(request_id, 3.0, "length").started for request_id in "ab"] == [1.0, None]
