"""The records of one run, reduced to the numbers that people compare.

Every number is defined where it is declared, because the field uses the same names for different things. What
cannot be computed is None, never zero and never NaN: a run without a first token has no TTFT. Clocks start at
a request's *arrival*, so time spent queueing before the engine, or before the client could send, is included.
Percentiles are `records.percentile`'s.
Costs a few passes over the rows of all steps, a sort of the steps and one of each distribution's values.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from batchwright.records import RequestRecord, RowRecord, StepRecord, percentile, row_kinds


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of seconds: how many values, their mean, two percentiles and the largest."""

    num: int
    mean: float
    p50: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What one run did. Times are seconds, lengths tokens, wastes and shares fractions of one.

    *Completed* requests ended with `stop` or `length`. Steps that failed count in `num_steps`, `num_failed_steps`
    and `time_in_steps`; nothing that they computed counts anywhere else.

    Requests
        makespan: from the first arrival to the end of the last request.
        output_rate: output tokens of completed requests / makespan.
        total_rate: prompt and output tokens of completed requests / makespan.
        num_completed, num_lost: requests by how they ended; `lost_by_reason` splits the second.
        ttft: first token - arrival, over requests that produced a token, however they ended.
        tpot: per request with n > 1 tokens, (last token - first token) / (n - 1).
        itl: the gaps between neighbouring tokens, pooled over all requests (so long answers weigh more).
        latency: end - arrival, over completed requests.
        queue_time: first step - arrival, over requests that were started.
        num_cached: prompt tokens taken from the prefix cache.  num_preempted: times that a request lost its pages.

    Work executed
        padding_waste: dummy positions in rows that also compute something / all positions executed.
        dead_row_waste: dead rows / rows executed, over decode steps. A dead row is executed for no request
            (`num_tokens` 0): its request ended while others of its batch went on (head-of-line loss), or the
            batch was filled up. A decode step is one without a prefill row (`records.row_kinds`).
        position_waste: dummy positions, in live and dead rows, / all positions executed.
        batch_mean, batch_max: live rows per step.  batch_mean_in_time: the same, weighted by the steps' durations.
        num_steps, num_failed_steps.
        time_in_steps: time within the makespan in which at least one step ran.  time_idle: the rest of it.

    KV cache (over steps)
        kv_reserved_mean, kv_reserved_peak: tokens that fit into the pages held while a step ran.
        kv_stored_mean: tokens stored in them when it ended.
        kv_waste: 1 - sum of tokens stored / sum of tokens that fit into the pages held.
    """

    makespan: float | None
    output_rate: float | None
    total_rate: float | None
    num_requests: int
    num_completed: int
    num_lost: int
    lost_by_reason: dict[str, int]
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None
    queue_time: Spread | None
    num_cached: int
    num_preempted: int
    padding_waste: float | None
    dead_row_waste: float | None
    position_waste: float | None
    batch_mean: float | None
    batch_max: int | None
    batch_mean_in_time: float | None
    num_steps: int
    num_failed_steps: int
    time_in_steps: float
    time_idle: float | None
    kv_reserved_mean: float | None
    kv_reserved_peak: int | None
    kv_stored_mean: float | None
    kv_waste: float | None


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds, in seconds, that a request must all meet; None sets no bound."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that met every bound: how many, per second of makespan, and as a share of all requests."""

    num_good: int
    rate: float | None
    share: float | None


def summarize(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> Summary:
    """The numbers of one run. `requests` and `steps` are that run's alone, in any order."""
    completed = [request for request in requests if request.is_completed]
    lost = Counter(request.finish_reason for request in requests if not request.is_completed)
    num_output = sum(request.num_output for request in completed)
    num_prompt = sum(request.num_prompt for request in completed)
    makespan = _makespan(requests)
    steps = sorted(steps, key=lambda step: (step.started, step.id))
    time_in_steps = _covered(requests, steps)
    done = [step for step in steps if step.failed is None]
    rows = [row for step in done for row in step.rows]
    num_positions = sum(row.num_tokens + row.padding for row in rows)
    decode_rows = list(_decode_rows(requests, steps))
    sizes = [step.num_live for step in done]
    reserved = [step.pages_held * step.page_size for step in done]
    stored = [step.tokens_stored for step in done]
    return Summary(
        makespan=makespan,
        output_rate=_ratio(num_output, makespan),
        total_rate=_ratio(num_output + num_prompt, makespan),
        num_requests=len(requests),
        num_completed=len(completed),
        num_lost=lost.total(),
        lost_by_reason=dict(sorted(lost.items())),
        ttft=_spread(_defined(request.ttft for request in requests)),
        tpot=_spread(_defined(map(_tpot, requests))),
        itl=_spread(_gaps(requests)),
        latency=_spread(_defined(request.latency for request in requests)),
        queue_time=_spread(request.started - request.arrival for request in requests if request.started is not None),
        num_cached=sum(request.num_cached for request in requests),
        num_preempted=sum(request.num_preempted for request in requests),
        padding_waste=_ratio(sum(row.padding for row in rows if row.num_tokens), num_positions),
        dead_row_waste=_ratio(sum(1 for row in decode_rows if not row.num_tokens), len(decode_rows)),
        position_waste=_ratio(sum(row.padding for row in rows), num_positions),
        batch_mean=_ratio(sum(sizes), len(sizes)),
        batch_max=max(sizes, default=None),
        batch_mean_in_time=_ratio(
            sum(size * (step.finished - step.started) for size, step in zip(sizes, done, strict=True)),
            sum(step.finished - step.started for step in done),
        ),
        num_steps=len(steps),
        num_failed_steps=len(steps) - len(done),
        time_in_steps=time_in_steps,
        time_idle=None if makespan is None else max(0.0, makespan - time_in_steps),
        kv_reserved_mean=_ratio(sum(reserved), len(reserved)),
        kv_reserved_peak=max(reserved, default=None),
        kv_stored_mean=_ratio(sum(stored), len(stored)),
        kv_waste=_ratio(sum(reserved) - sum(stored), sum(reserved)),
    )


def goodput(requests: Sequence[RequestRecord], slo: Slo) -> Goodput:
    """How much of the traffic was served within `slo`.

    Only completed requests can be good. A bound on TPOT is met by an answer of one token, which has none; a bound
    on TTFT is not met by an answer without a token.
    """
    num_good = sum(1 for request in requests if _meets(request, slo))
    return Goodput(num_good=num_good, rate=_ratio(num_good, _makespan(requests)), share=_ratio(num_good, len(requests)))


def _makespan(requests: Sequence[RequestRecord]) -> float | None:
    if not requests:
        return None
    return max(request.finished for request in requests) - min(request.arrival for request in requests)


def _covered(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> float:
    """Length of the union of the steps' intervals (steps in flight overlap), cut to the makespan; `steps` by start."""
    first = min((request.arrival for request in requests), default=float("-inf"))
    last = max((request.finished for request in requests), default=float("inf"))
    covered, reached = 0.0, first
    for step in steps:
        end = min(step.finished, last)
        covered += max(0.0, end - max(step.started, reached))
        reached = max(reached, end)
    return covered


def _decode_rows(requests: Sequence[RequestRecord], steps: Sequence[StepRecord]) -> Iterable[RowRecord]:
    """The rows of the steps, by start, that did not fail and in which no row is prefill."""
    for step, kinds in zip(steps, row_kinds(requests, steps), strict=True):
        if step.failed is None and "prefill" not in kinds:
            yield from step.rows


def _tpot(request: RequestRecord) -> float | None:
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def _gaps(requests: Iterable[RequestRecord]) -> Iterable[float]:
    for request in requests:
        for earlier, later in zip(request.token_times, request.token_times[1:], strict=False):
            yield later - earlier


def _meets(request: RequestRecord, slo: Slo) -> bool:
    if request.latency is None:
        return False
    ttft, tpot = request.ttft, _tpot(request)
    return (
        (slo.ttft is None or (ttft is not None and ttft <= slo.ttft))
        and (slo.tpot is None or tpot is None or tpot <= slo.tpot)
        and (slo.latency is None or request.latency <= slo.latency)
    )


def _defined(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def _spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
    if p50 is None or p99 is None:
        return None
    return Spread(
        num=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=p50,
        p99=p99,
        max=ordered[-1],
    )


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None
