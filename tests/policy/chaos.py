"""Random workloads, drawn from a seed or by hypothesis: what a request may look like, and what may go wrong."""

import random

from batchwright.policy.types import Request
from tests.policy.driver import Drive

FAILURES = ("oom", "exception")


def random_request(rng: random.Random, request_id: str, page_size: int, now: float) -> Request:
    """Short and long, impatient and patient; a third of the pages of most prompts are shared with others."""
    num_prompt = rng.choice((1, 3, 4, 9, 16, 26, 60))
    family = rng.randrange(3)
    num_keys = num_prompt // page_size
    num_shared = rng.randint(0, num_keys)
    keys = [("shared", family, index) for index in range(num_shared)]
    keys += [("own", request_id, index) for index in range(num_shared, num_keys)]
    return Request(
        id=request_id,
        num_prompt=num_prompt,
        max_tokens=rng.choice((1, 2, 7, 12, 20, 90)),
        priority=rng.randrange(3),
        deadline=now + rng.choice((0.5, 2.0, 8.0)) if rng.random() < 0.15 else None,
        queue_timeout=rng.choice((0.0, 0.5, 2.0)) if rng.random() < 0.15 else None,
        keys=tuple(keys),
    )


class Chaos:
    """A seeded stream of events into one `Drive`."""

    def __init__(self, drive: Drive, seed: int, max_in_flight: int = 2) -> None:
        self.drive = drive
        self.random = random.Random(seed)
        self.max_in_flight = max_in_flight
        self.num_added = 0

    def event(self) -> None:
        """Something happens; mostly steps begin and end."""
        draw = self.random.random()
        if draw < 0.12:
            self.add()
        elif draw < 0.14 and self.drive.live:
            self.drive.abort(self.random.choice(sorted(self.drive.live)))
        elif draw < 0.20:
            self.drive.wait(self.random.choice((0.0, 0.25, 0.5, 1.0)))
        elif draw < 0.22:
            self.drive.flush()
        elif draw < 0.60 and self.drive.in_flight:
            self.land()
        elif draw < 0.61 and self.drive.in_flight:
            self.drive.void()
        elif len(self.drive.in_flight) < self.max_in_flight:
            self.drive.launch()

    def land(self) -> None:
        """The oldest step ends. If it fails, the others are in half of all cases not run."""
        outcome = self.drive.land()
        if outcome.failed and self.random.random() < 0.5:
            while self.drive.in_flight:
                self.drive.void()

    def add(self) -> None:
        """A request arrives, and may be one that breaks things."""
        self.num_added += 1
        request_id = str(self.num_added)
        request = random_request(self.random, request_id, self.drive.memory.page_size, self.drive.clock.now())
        self._upset(request_id)
        self.drive.add(request, self.random.randint(1, 30))

    def _upset(self, request_id: str) -> None:
        rng, executor = self.random, self.drive.executor
        draw = rng.random()
        if draw < 0.05:
            executor.poison = {request_id}
        elif draw < 0.10:
            executor.errors = {request_id}
        elif draw < 0.20:
            executor.failures = {executor.num_steps + rng.randint(0, 3): rng.choice(FAILURES)}
        elif draw < 0.25:
            executor.max_positions = rng.choice((None, 20, 6))
