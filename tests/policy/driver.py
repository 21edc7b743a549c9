"""One loop for all tests of schedulers: it feeds events, executes plans in order, and checks the laws after each.

`Drive` is what a live engine does, without a clock: `launch` asks for a plan, `land` executes the oldest one and
commits it, `void` only commits it. It knows each request's one ending, and looks into the ledger for what no public
number shows.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.grouped import Grouped
from batchwright.policy.order import Queueing, by_aged_priority
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import Admitted, Dropped, Refused, Request, Scheduler, StepOutcome, StepPlan
from batchwright.testing import FakeExecutor, VirtualClock

AGED = Queueing(order=by_aged_priority(2.0), max_requests=12)
TINY = Memory(num_pages=12, page_size=4, context=40)
MEMORIES = {"tiny": TINY, "small": Memory(num_pages=36, page_size=4, context=60)}


def make_continuous(memory: Memory, **settings) -> Continuous:
    return Continuous(memory, ContinuousSettings(**{"max_rows": 5, "token_budget": 24, "chunk_cap": 10} | settings))


SCHEDULERS: dict[str, Callable[[Memory, Queueing], Scheduler]] = {
    "one by one": one_by_one,
    "static": lambda memory, queueing: static(memory, 4, queueing),
    "dynamic": lambda memory, queueing: dynamic(
        memory, DynamicSettings(6, 0.7, preferred_sizes=(2, 4), allowed_sizes=(1, 2, 4, 6), queueing=queueing)
    ),
    **{
        f"continuous, {capacity}, prefix caching {'on' if caching else 'off'}": (
            lambda memory, queueing, capacity=capacity, caching=caching: make_continuous(
                memory, capacity=capacity, prefix_caching=caching, queueing=queueing
            )
        )
        for capacity in ("utilization", "guaranteed")
        for caching in (True, False)
    },
    **{
        f"continuous, {capacity}, speculating": (
            lambda memory, queueing, capacity=capacity: make_continuous(
                memory, capacity=capacity, speculation=Speculation(max_drafts=5), queueing=queueing
            )
        )
        for capacity in ("utilization", "guaranteed")
    },
}
"""Every scheduler that the same laws hold for, small enough that its limits are met."""


def some_guesses(request_id: str, num_outputs: int) -> tuple[bool, ...]:
    """Up to seven, of some requests nearly always right, of others hardly ever."""
    rng = random.Random(f"{request_id} at {num_outputs}")
    quality = random.Random(request_id).choice((0.1, 0.6, 0.95))
    return tuple(rng.random() < quality for _ in range(rng.randrange(8)))


class Tape:
    """A scheduler that remembers what it was told and what it answered, so that both can be compared with a second."""

    EVENTS = frozenset({"add", "abort", "flush", "advance", "plan", "commit", "wakeup"})

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.calls: list[tuple[str, tuple, object]] = []

    def __getattr__(self, name: str):
        method = getattr(self.scheduler, name)
        return partial(self._call, name, method) if name in self.EVENTS else method

    def _call(self, name: str, method: Callable, *arguments):
        answer = method(*arguments)
        self.calls.append((name, arguments, answer))
        return answer

    def assert_replays_on(self, other: Scheduler) -> None:
        for name, arguments, answer in self.calls:
            assert getattr(other, name)(*arguments) == answer


class Drive:
    """A scheduler, the executor that runs its plans, and what became of every request."""

    def __init__(self, scheduler: Scheduler, memory: Memory, **executor) -> None:
        self.scheduler = scheduler
        self.tape = Tape(scheduler)
        self.memory = memory
        self.clock = VirtualClock()
        self.lengths: dict[str, int] = {}
        self.executor = FakeExecutor(memory, self.lengths, **{"guesses": some_guesses} | executor)
        self.in_flight: deque[StepPlan] = deque()
        self.plans: list[StepPlan] = []
        self.failed: list[StepPlan] = []
        self.live: dict[str, int] = {}  # id -> tokens that it is to get
        self.tokens: dict[str, int] = {}  # of those that finished
        self.offered: dict[str, int] = {}  # guesses, by the outcome that was committed last
        self.ended: dict[str, str] = {}
        self.refusals: list[Refused] = []

    # ---- events

    def add(self, request: Request, num_output: int | None = None) -> Admitted | Refused:
        """`num_output`: its true length, by default all that it asks for."""
        self.lengths[request.id] = request.max_tokens if num_output is None else num_output
        answer = self.tape.add(request, self.clock.now())
        if isinstance(answer, Refused):
            self.refusals.append(answer)
            self._end_one(request.id, "refused")
        else:
            self.live[request.id] = min(self.lengths[request.id], answer.max_tokens)
            self.executor.receive(request, answer.max_tokens)
        self.check()
        return answer

    def abort(self, request_id: str) -> None:
        self.tape.abort(request_id, self.clock.now())
        if request_id in self.live:
            self._give_up(request_id, "aborted")
        self.check()

    def wait(self, seconds: float) -> None:
        self.clock.advance_by(seconds)
        self._drop(self.tape.advance(self.clock.now()))
        self.check()

    def flush(self) -> None:
        self.tape.flush(self.clock.now())

    def launch(self) -> StepPlan | None:
        """Let time pass and ask for a plan; it is now in flight."""
        self._drop(self.tape.advance(self.clock.now()))
        plan = self.tape.plan(self.clock.now())
        if plan is not None:
            self._check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append(plan)
        elif not self.in_flight:
            self._check_nothing_to_do()
        self.check()
        return plan

    def land(self) -> StepOutcome:
        """Execute and commit the oldest plan in flight."""
        plan = self.in_flight.popleft()
        outcome = self.executor.execute(plan)
        dropped = self.tape.commit(plan.id, self.clock.now(), outcome)
        if outcome.failed:
            self.failed.append(plan)
        for item in outcome.items:
            self.offered[item.request_id] = item.num_drafts
            if item.error:
                self._give_up(item.request_id, "error")
            elif item.finished:
                self.tokens[item.request_id] = self.live.pop(item.request_id)
                self._end_one(item.request_id, "finished")
        self._drop(dropped)
        self.check()
        return outcome

    def void(self) -> None:
        """Commit the oldest plan in flight without executing it: nobody is to blame, so nobody is given up."""
        plan = self.in_flight.popleft()
        assert self.tape.commit(plan.id, self.clock.now(), self.executor.skip(plan)) == ()
        self.check()

    # ---- loops

    def step(self) -> StepPlan | None:
        """One plan, run at once."""
        plan = self.launch()
        if plan is not None:
            self.land()
        return plan

    def run(self, max_in_flight: int = 1, max_steps: int = 5000) -> list[StepPlan]:
        """Run until nothing is left to do, passing the time that the scheduler asks for; returns the new plans."""
        first = len(self.plans)
        for _ in range(max_steps):
            while len(self.in_flight) < max_in_flight and self.launch():
                pass
            if self.in_flight:
                self.land()
            elif self.live:
                self._wait_for_wakeup()
            else:
                self.check_idle()
                return self.plans[first:]
        raise AssertionError(f"{sorted(self.live)} are not done after {max_steps} steps")

    def _wait_for_wakeup(self) -> None:
        wakeup = self.tape.wakeup(self.clock.now())
        assert wakeup is not None, f"{sorted(self.live)} wait for nothing"
        self.wait(max(0.0, wakeup - self.clock.now()))

    # ---- laws that hold after every event

    def check(self) -> None:
        ledger, load = self.scheduler._ledger, self.scheduler.load
        assert set(ledger.live) == set(self.live), "scheduler and driver disagree on who is live"
        for request_id, progress in ledger.live.items():
            assert progress.accepted == self.executor.num_outputs(request_id), f"{request_id} lost or gained a token"
        assert load.pages_total == self.memory.num_pages
        assert load.pages_held + ledger.pool.num_free == load.pages_total
        assert 0 <= load.tokens_stored <= load.pages_held * self.memory.page_size
        assert load.num_in_flight == len(self.in_flight)
        assert load.num_waiting + load.num_running == len(self.live)
        self._check_holders()
        self._check_held_back()
        if isinstance(self.scheduler, Continuous):
            self._check_reservations(self.scheduler)

    def check_idle(self) -> None:
        """Nobody is live and nothing in flight: all is given back."""
        load = self.scheduler.load
        assert (load.num_waiting, load.num_running, load.num_in_flight) == (0, 0, 0)
        assert (load.pages_held, load.tokens_stored) == (0, 0)
        assert self.scheduler._ledger.pool.num_free == self.memory.num_pages
        assert self.tape.plan(self.clock.now()) is None

    def _check_holders(self) -> None:
        """Every page is held by exactly those who will give it back."""
        ledger = self.scheduler._ledger
        holders: Counter[int] = Counter()
        for progress in ledger.live.values():
            holders.update(progress.pages)
        for owed in ledger._owed.values():
            for pages, _ in owed:
                holders.update(pages)
        if isinstance(self.scheduler, Grouped) and self.scheduler._batch:
            for table in self.scheduler._batch.tables.values():
                holders.update(table)
        assert holders == Counter({page: held for page, held in enumerate(ledger.pool._holders) if held})
        assert ledger.pool.num_shares == sum(holders.values()) - len(holders)

    def _check_held_back(self) -> None:
        """Who is held back waits for what somebody computes who runs, and is ahead; and computes nothing meanwhile."""
        ledger = self.scheduler._ledger
        running = {id(row): row for row in ledger.live.values() if row.running}
        assert {id(row) for row in ledger.upcoming._computed_by.values()} <= set(running)
        held = {request_id: key for key, rows in ledger.upcoming._held.items() for request_id in rows}
        assert held == ledger.upcoming._awaited
        for request_id, key in held.items():
            row = ledger.live[request_id]
            assert not row.running
            assert row.rank not in ledger.waiting
            assert any(key in other.keys[other.num_published :] and other.rank < row.rank for other in running.values())

    def _check_reservations(self, scheduler: Continuous) -> None:
        reserved = [progress.reserved for progress in scheduler._ledger.live.values()]
        assert min(reserved, default=0) >= 0
        assert scheduler._reserved == sum(reserved)
        assert scheduler._available >= 0, "more pages are set aside than there are"

    def _check_nothing_to_do(self) -> None:
        """Work conservation: the machine stands still only for want of work, or of company for a batch."""
        load, now = self.scheduler.load, self.clock.now()
        assert not load.num_running, "requests are running, but not run"
        if isinstance(self.scheduler, Continuous):
            assert not load.num_waiting, "requests wait beside an idle machine"
            return
        assert not any(progress.flushed for progress in self.scheduler._ledger.waiting), "the flushed wait for company"
        wakeup = self.tape.wakeup(now)
        assert wakeup is None or wakeup > now or not load.num_waiting, "the delay is over"

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.chunks
        assert plan.num_tokens or plan.dead_rows
        if isinstance(self.scheduler, Continuous):
            assert 0 < plan.num_tokens <= self.scheduler.settings.token_budget
            assert len(plan.chunks) <= self.scheduler.settings.max_rows
            assert not plan.padding
            assert not plan.dead_rows
            assert self.scheduler.load.num_running <= self.scheduler.settings.max_rows
            self._check_guesses(plan)
        else:
            longest = self.scheduler._batch.num_tokens_per_row
            assert all(chunk.start + chunk.num_tokens + chunk.padding <= longest for chunk in plan.chunks)

    def _check_guesses(self, plan: StepPlan) -> None:
        """Nobody carries more than was offered; who does is in no other plan until it is known how many count."""
        unknown = {chunk.request_id for flying in self.in_flight for chunk in flying.chunks if chunk.num_drafts}
        for chunk in plan.chunks:
            assert chunk.request_id not in unknown
            assert chunk.num_drafts <= min(self.scheduler.max_drafts, self.offered.get(chunk.request_id, 0))

    # ---- bookkeeping

    def _give_up(self, request_id: str, why: str) -> None:
        del self.live[request_id]
        self.executor.forget(request_id)
        self._end_one(request_id, why)

    def _drop(self, dropped: Iterable[Dropped]) -> None:
        for drop in dropped:
            self._give_up(drop.request_id, drop.reason)

    def _end_one(self, request_id: str, why: str) -> None:
        assert request_id not in self.ended, f"{request_id} ended twice: {self.ended[request_id]}, then {why}"
        self.ended[request_id] = why
