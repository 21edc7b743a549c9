"""Any scheduler in virtual time: a heap of events, and a cost instead of a machine.

The driver pops {arrival, step end, wakeup}, lets all that happens at one moment happen, and then asks for plans, as
the live engine does; it decides nothing. One machine executes one step at a time; with `max_in_flight` above 1
further plans queue behind it. What no policy may know, the true output lengths, stays here. Costs O(log events) per
event beside the scheduler's own work, and one record per request and step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from batchwright.errors import ConfigError
from batchwright.policy.types import Dropped, ItemOutcome, Refused, Request, Scheduler, StepOutcome, StepPlan
from batchwright.records import FinishReason, Recorder, RequestRecord, StepRecord
from batchwright.traffic import TrafficRequest


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as its policy sees it, when it arrives (s), and how many tokens it will really produce."""

    time: float
    request: Request
    num_output: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened. Requests are in order of their ends, steps in order of theirs; `makespan` ends with the last."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    makespan: float


def arrivals(traffic: Iterable[TrafficRequest], page_size: int, max_tokens: int | None = None) -> Iterator[Arrival]:
    """`traffic` as a server would receive it. `max_tokens` None: every client asks for just what it will get.

    Prompt pages that the traffic has no key for are shared with nobody, and get keys that say so.
    """
    for each in traffic:
        shared = each.page_keys(page_size)
        own = tuple((each.id, page) for page in range(len(shared), each.num_prompt // page_size))
        request = Request(each.id, each.num_prompt, max_tokens or each.num_output, keys=shared + own)
        yield Arrival(each.arrival, request, each.num_output)


def simulate(
    scheduler: Scheduler,
    requests: Iterable[Arrival],
    cost: Callable[[StepPlan], float],
    *,
    max_in_flight: int = 1,
    run: str = "simulated",
) -> Simulation:
    """Run `requests`, in order of arrival, through a fresh `scheduler`; a step takes `cost(plan)` seconds.

    Ends when every request has ended; each has exactly one record. Raises ConfigError at the first arrival or cost
    that cannot be simulated, and for an id that comes twice: records and cached pages are told apart by it.
    """
    if max_in_flight < 1:
        raise ConfigError(f"keep {max_in_flight} plans in flight", "nothing would run", "use at least 1")
    recorder = Recorder(run, scheduler.memory.page_size)
    _Driver(scheduler, iter(requests), cost, max_in_flight, recorder).drive()
    ends = [record.finished for record in recorder.requests]
    start = min((record.arrival for record in recorder.requests), default=0.0)
    return Simulation(tuple(recorder.requests), tuple(recorder.steps), max(ends, default=start) - start)


class _Sequence:
    """One live request, and the oracle's knowledge of its end."""

    def __init__(self, arrival: Arrival, max_tokens: int) -> None:
        self.request = arrival.request
        self.num_output = min(arrival.num_output, max_tokens)
        self.reason: FinishReason = "stop" if arrival.num_output < max_tokens else "length"
        self.num_outputs = 0

    def run(self, *, samples: bool, page_size: int) -> ItemOutcome:
        """One row of it was executed."""
        if not samples:
            return ItemOutcome(self.request.id)
        self.num_outputs += 1
        pages, rest = divmod(self.request.num_prompt + self.num_outputs, page_size)
        has_keys = len(self.request.keys) == self.request.num_prompt // page_size
        keys = () if rest or not has_keys else ((self.request.id, "output", pages),)
        return ItemOutcome(self.request.id, 1, finished=self.num_outputs == self.num_output, keys=keys)


class _Driver:
    """One run: the heap, the machine and the requests under way."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Iterator[Arrival],
        cost: Callable[[StepPlan], float],
        max_in_flight: int,
        recorder: Recorder,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._cost = cost
        self._max_in_flight = max_in_flight
        self._recorder = recorder
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_events = 0
        self._next: Arrival | None = None
        self._live: dict[str, _Sequence] = {}
        self._ids: set[str] = set()  # of all that were announced
        self._in_flight: deque[StepPlan] = deque()
        self._idle_from = 0.0  # when the machine has done all that is planned
        self._wakeup: float | None = None  # the earliest one in the heap

    def drive(self) -> None:
        self._expect_arrival(0.0)
        while self._next or self._live or self._in_flight:
            assert self._events, f"the scheduler sleeps on {len(self._live)} requests"
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                heappop(self._events)[2](now)
            self._drop(self._scheduler.advance(now), now)
            self._plan(now)
            self._expect_wakeup(now)

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heappush(self._events, (time, self._num_events, action))
        self._num_events += 1

    # ---- arrivals

    def _expect_arrival(self, now: float) -> None:
        self._next = next(self._requests, None)
        if self._next is None:
            self._scheduler.flush(now)
            return
        self._check_arrival(self._next, now)
        self._ids.add(self._next.request.id)
        self._at(self._next.time, self._arrive)

    def _check_arrival(self, arrival: Arrival, now: float) -> None:
        asked = f"simulate request {arrival.request.id!r:.60}, which arrives at {arrival.time} s"
        if not 0 <= arrival.time < inf:
            raise ConfigError(asked, "time starts at 0 and is finite", "give a finite time of at least 0")
        if arrival.time < now:
            raise ConfigError(asked, f"the one before it was at {now} s", "sort the requests")
        if not arrival.num_output >= 1:
            fact = f"it would produce {arrival.num_output} tokens"
            raise ConfigError(asked, fact, "give a num_output of at least 1")
        if arrival.request.id in self._ids:
            raise ConfigError(asked, "an earlier request has the same id", "give every request an id of its own")

    def _arrive(self, now: float) -> None:
        assert self._next
        arrival, request = self._next, self._next.request
        answer = self._scheduler.add(request, now)
        max_tokens = request.max_tokens if isinstance(answer, Refused) else answer.max_tokens
        self._recorder.arrived(request.id, now, request.num_prompt, max_tokens)
        if isinstance(answer, Refused):
            self._recorder.ended(request.id, now, "refused", answer.message)
        else:
            self._live[request.id] = _Sequence(arrival, max_tokens)
        self._expect_arrival(now)

    # ---- steps

    def _plan(self, now: float) -> None:
        while len(self._in_flight) < self._max_in_flight and (plan := self._scheduler.plan(now)):
            self._recorder.planned(plan, self._scheduler.load)
            start = max(now, self._idle_from)
            self._recorder.began(plan.id, start)
            self._idle_from = _end_of(plan, start, self._cost(plan))
            self._in_flight.append(plan)
            self._at(self._idle_from, self._end_step)

    def _end_step(self, now: float) -> None:
        plan = self._in_flight.popleft()
        items = self._execute(plan)
        self._scheduler.commit(plan.id, now, StepOutcome(items))
        self._recorder.committed(plan.id, now)
        for item in items:
            if item.num_accepted:
                self._recorder.token(item.request_id, now)
            if item.finished:
                self._recorder.ended(item.request_id, now, self._live.pop(item.request_id).reason)

    def _execute(self, plan: StepPlan) -> tuple[ItemOutcome, ...]:
        """What the live rows of `plan` gained; a late row, whose request ended meanwhile, gains nothing."""
        page_size = self._scheduler.memory.page_size
        return tuple(
            self._live[chunk.request_id].run(samples=chunk.samples, page_size=page_size)
            for chunk in plan.chunks
            if chunk.num_tokens and chunk.request_id in self._live
        )

    # ---- time

    def _drop(self, dropped: Iterable[Dropped], now: float) -> None:
        for drop in dropped:
            del self._live[drop.request_id]
            reason: FinishReason = "deadline" if drop.reason == "deadline" else "queue_timeout"  # no step fails here
            self._recorder.ended(drop.request_id, now, reason)

    def _expect_wakeup(self, now: float) -> None:
        if self._wakeup is not None and self._wakeup <= now:
            self._wakeup = None
        wakeup = self._scheduler.wakeup(now)
        if wakeup is not None and wakeup > now and (self._wakeup is None or wakeup < self._wakeup):
            self._wakeup = wakeup
            self._at(wakeup, lambda now: None)


def _end_of(plan: StepPlan, start: float, seconds: float) -> float:
    """When a step ends. NaN fails every comparison, so what is refused is whatever is not known to be good."""
    if not (seconds >= 0 and start + seconds < inf):
        raise ConfigError(
            f"simulate step {plan.id} from {start} s",
            f"its cost is {seconds} s",
            "give a cost function that returns finite seconds of at least 0",
        )
    return start + seconds
