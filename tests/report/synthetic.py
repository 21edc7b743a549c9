"""Records as an engine would have written them, from toy schedulers over a toy machine: realistic in size and shape.

A step costs a fixed part and a part per position executed. Pages hold 16 tokens. Everything is seeded.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from batchwright.records import RequestRecord, RowRecord, StepRecord
from batchwright.report.html import Report, Run, Scene
from batchwright.report.table import Metric, Table

PAGE = 16
POOL = 1024
STEP_SECONDS, POSITION_SECONDS = 0.035, 0.0011


@dataclass(eq=False)
class Work:
    """A request under way: `done` positions are computed, the rest of the prompt and of the output remain."""

    id: str
    arrival: float
    num_prompt: int
    num_output: int
    done: int = 0
    times: list[float] = field(default_factory=list)
    started: float | None = None

    @property
    def ended(self) -> bool:
        return len(self.times) == self.num_output

    @property
    def pages(self) -> int:
        return -(-max(self.done, 1) // PAGE)

    def record(self, run: str) -> RequestRecord:
        return RequestRecord(
            run=run,
            id=self.id,
            arrival=self.arrival,
            num_prompt=self.num_prompt,
            num_output=self.num_output,
            max_tokens=self.num_output,
            started=self.started,
            finished=self.times[-1],
            finish_reason="length",
            token_times=tuple(self.times),
        )


def workload(num: int, *, rate: float | None = None, seed: int = 0) -> list[Work]:
    """`num` requests of mixed lengths, all at once or at `rate` per second."""
    rng = random.Random(seed)
    now, made = 0.0, []
    for index in range(num):
        now += rng.expovariate(rate) if rate else 0.0
        num_prompt = min(600, 12 + int(rng.lognormvariate(4.3, 0.8)))
        made.append(Work(f"r{index:02}", now, num_prompt, min(256, 4 + int(rng.lognormvariate(3.7, 0.9)))))
    return made


class Machine:
    """Executes rows, keeps the clock and writes the records."""

    def __init__(self, run: str, works: Sequence[Work]) -> None:
        self.run, self.works, self.now = run, works, 0.0
        self.steps: list[StepRecord] = []
        self.ids = count()

    def waiting(self) -> list[Work]:
        return [work for work in self.works if work.started is None and work.arrival <= self.now]

    def sleep_until_next_arrival(self) -> bool:
        """Whether anything is still to come."""
        later = [work.arrival for work in self.works if work.started is None]
        self.now = max(self.now, min(later, default=self.now))
        return bool(later)

    def step(self, rows: Sequence[tuple[Work | None, int, int]], holding: Sequence[Work], reason: str = "next") -> None:
        """Run rows of (request or None, tokens, padding) while `holding` keep their pages."""
        for work, _, _ in rows:
            if work and work.started is None:
                work.started = self.now
        seconds = STEP_SECONDS + POSITION_SECONDS * sum(tokens + padding for _, tokens, padding in rows) ** 0.92
        start, self.now = self.now, self.now + seconds
        records = []
        for work, tokens, padding in rows:
            samples = bool(work and tokens and work.done + tokens >= work.num_prompt)
            records.append(RowRecord(work.id if work else None, work.done if work else 0, tokens, padding, samples))
            if work and tokens:
                work.done += tokens
                if samples:
                    work.times.append(self.now)
        self.steps.append(
            StepRecord(
                run=self.run,
                id=next(self.ids),
                reason=reason,
                started=start,
                finished=self.now,
                rows=tuple(records),
                pages_held=sum(work.pages for work in holding),
                pages_total=POOL,
                page_size=PAGE,
                tokens_stored=sum(work.done for work in holding),
                num_waiting=len(self.waiting()),
            )
        )
        self.now += 0.0004

    def records(self) -> tuple[list[RequestRecord], list[StepRecord]]:
        return [work.record(self.run) for work in self.works], self.steps


def one_by_one(machine: Machine) -> None:
    while machine.sleep_until_next_arrival():
        work = machine.waiting()[0]
        machine.step([(work, work.num_prompt, 0)], [work], "full")
        while not work.ended:
            machine.step([(work, 1, 0)], [work])


def grouped(machine: Machine, choose: Callable[[Machine], list[Work]]) -> None:
    """A batch runs to its end, its padding and its dead rows included."""
    while machine.sleep_until_next_arrival():
        batch = choose(machine)
        longest = max(work.num_prompt for work in batch)
        machine.step([(work, work.num_prompt, longest - work.num_prompt) for work in batch], batch, "full")
        while not all(work.ended for work in batch):
            machine.step([(work, 0, 1) if work.ended else (work, 1, 0) for work in batch], batch)


def static(machine: Machine, size: int = 8) -> None:
    """Waits for whole groups, also when requests trickle in."""

    def choose(machine: Machine) -> list[Work]:
        group = [work for work in machine.works if work.started is None][:size]
        machine.now = max(machine.now, group[-1].arrival)
        return group

    grouped(machine, choose)


def dynamic(machine: Machine, size: int = 8, delay: float = 0.5) -> None:
    """Leaves when full, or when the oldest has waited long enough."""

    def choose(machine: Machine) -> list[Work]:
        if len(machine.waiting()) < size:
            machine.now = max(machine.now, machine.waiting()[0].arrival + delay)
        return machine.waiting()[:size]

    grouped(machine, choose)


def continuous(machine: Machine, size: int = 64, budget: int = 512) -> None:
    """Decodes first, then prompts, in chunks, under one token budget."""
    running: list[Work] = []
    while running or machine.sleep_until_next_arrival():
        queued = [work for work in machine.waiting() if work not in running]
        running += queued[: size - len(running)]
        left, rows = budget, []
        for work in sorted(running, key=lambda work: work.done < work.num_prompt):
            tokens = min(left, 1 if work.times else work.num_prompt - work.done)
            left -= tokens
            if tokens:
                rows.append((work, tokens, 0))
        machine.step(rows, [work for work in running if work.done or work in [row[0] for row in rows]])
        running = [work for work in running if not work.ended]


STRATEGIES: dict[str, tuple[Callable[[Machine], None], str]] = {
    "one-by-one": (one_by_one, "one request at a time"),
    "static": (static, "groups of 8, each padded to its longest prompt and run to its longest answer"),
    "dynamic": (dynamic, "groups of up to 8, formed when full or after 500 ms"),
    "continuous": (continuous, "joins and leaves at every step; budget of 512 tokens per step"),
}


def runs(num: int, *, rate: float | None = None, seed: int = 0) -> Iterator[Run]:
    """The same requests under every strategy."""
    for name, (strategy, note) in STRATEGIES.items():
        machine = Machine(name, workload(num, rate=rate, seed=seed))
        strategy(machine)
        requests, steps = machine.records()
        yield Run(name=name, note=note, requests=requests, steps=steps)


METRICS = (
    Metric("Output tokens/s", "Output tokens of completed requests, over first arrival to last end.", ",.0f", "higher"),
    Metric("TTFT p50, s", "First token minus arrival; the median over requests.", ".2f", "lower"),
    Metric("TTFT p99, s", "First token minus arrival; 99 of 100 requests were at most so slow.", ".2f", "lower"),
    Metric("TPOT p50, ms", "(Last token - first token) / (tokens - 1), per request; the median.", ".0f", "lower"),
    Metric("Latency p50, s", "End minus arrival; the median over completed requests.", ".2f", "lower"),
    Metric("Latency p99, s", "End minus arrival; 99 of 100 requests were at most so slow.", ".2f", "lower"),
    Metric("Padding waste", "Dummy positions in rows that also compute something, of all positions.", ".1%", "lower"),
    Metric("Dead-row waste", "Rows executed for no request, of all rows in decode steps.", ".1%", "lower"),
    Metric("Batch size mean", "Live rows per step.", ".1f", "higher"),
    Metric("KV unused", "1 - tokens stored / tokens that fit into the pages held, over steps.", ".1%", "lower"),
    Metric("Share of roofline", "Achieved over attainable operations per second on this machine.", ".0%", "higher"),
)


def table(compared: Sequence[Run]) -> Table:
    """Roughly right numbers: the report doesn't compute any, so a test needs no better."""
    by_run = []
    for run in compared:
        seconds = run.steps[-1].finished
        ttft = sorted(request.token_times[0] - request.arrival for request in run.requests)
        latency = sorted(request.finished - request.arrival for request in run.requests)
        tpot = sorted(
            1e3 * (request.token_times[-1] - request.token_times[0]) / (request.num_output - 1)
            for request in run.requests
        )
        cells = [row for step in run.steps for row in step.rows]
        positions = sum(row.num_tokens + row.padding for row in cells)
        by_run.append(
            [
                sum(request.num_output for request in run.requests) / seconds,
                ttft[len(ttft) // 2],
                ttft[-1],
                tpot[len(tpot) // 2],
                latency[len(latency) // 2],
                latency[-1],
                sum(row.padding for row in cells if row.num_tokens) / positions,
                sum(1 for row in cells if not row.num_tokens) / len(cells),
                sum(1 for row in cells if row.num_tokens) / len(run.steps),
                1 - sum(s.tokens_stored for s in run.steps) / sum(s.pages_held * PAGE for s in run.steps),
                None,
            ]
        )
    return Table([run.name for run in compared], list(zip(METRICS, zip(*by_run, strict=True), strict=True)))


def report(num: int = 64) -> Report:
    """A whole report: all requests at once, then the same requests as a Poisson process."""
    at_once, trickling = list(runs(num)), list(runs(num, rate=1.9, seed=1))
    return Report(
        title="Four ways to batch the same 64 requests",
        subtitle="SmolLM2-135M-Instruct on two CPU cores. Every strategy ran on the same engine, with the same "
        "weights, over the same prompts and answers.",
        facts=[
            ("Model", "SmolLM2-135M-Instruct, bf16"),
            ("Machine", "2 cores, AVX-512, 8 GiB"),
            ("Requests", f"{num}, mean prompt 98, mean output 59 tokens"),
            ("KV cache", "1,024 pages of 16 tokens"),
            ("Versions", "batchwright 0.1.0, torch 2.13.0, Python 3.11.7"),
            ("Seed", "0"),
            ("Command", "batchwright compare --html report.html"),
        ],
        scenes=[
            Scene(
                "All requests at once",
                "All 64 requests are there when the clock starts; what counts is how soon the last is done. The longer "
                "the grid, the longer the same work took.",
                table(at_once),
                at_once,
            ),
            Scene(
                "Requests arrive one after another",
                "Arrivals are a Poisson process at 70% of what continuous batching can sustain. What counts is how "
                "long each request waits for its first token, and for its last.",
                table(trickling),
                trickling,
            ),
        ],
    )
