"""Fakes for whoever tests a scheduler or a driver: a clock that is moved by hand, an executor that computes nothing.

`FakeExecutor` turns plans into outcomes by counting, and asserts on the way all that a real executor relies on. It
keeps a model of the KV cache in which every page knows whose tokens it holds and how many, so a page that was
reused, shared or read too early is found at the step that would have computed nonsense. No torch.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, ItemOutcome, Request, StepOutcome, StepPlan

Failure = Literal["oom", "exception"]


class VirtualClock:
    """Seconds that pass when told to, and never backwards."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        assert time >= self._now, f"time went back from {self._now} to {time}"
        self._now = time

    def advance_by(self, seconds: float) -> None:
        self.advance_to(self._now + seconds)


class FakeExecutor:
    """Runs plans in the order they were made; `lengths[id]` is a request's true output length.

    Tell it of every admitted request (`receive`), and of every one that ends without it saying so (`forget`).
    `failures`: number of the executed step, from 0, -> how it fails. `poison`: requests whose steps always raise.
    `errors`: requests that end in an error of their own at their next row. `max_positions`: a step that executes
    more, padding included, runs out of memory. All four may be changed at any time.

    `guesses(id, n)`: what it offers for the next step of a request that has `n` outputs: for each guess, is it right?
    """

    def __init__(
        self,
        memory: Memory,
        lengths: Mapping[str, int],
        *,
        failures: Mapping[int, Failure] | None = None,
        poison: Collection[str] = (),
        errors: Collection[str] = (),
        max_positions: int | None = None,
        guesses: Callable[[str, int], Sequence[bool]] = lambda request_id, num_outputs: (),
    ) -> None:
        self.lengths = lengths
        self.failures = failures or {}
        self.poison = poison
        self.errors = errors
        self.max_positions = max_positions
        self.guesses = guesses
        self.num_steps = 0
        self._memory = memory
        self._cache = [_Page() for _ in range(memory.num_pages)]
        self._live: dict[str, _Sequence] = {}
        self._num_received = 0

    def receive(self, request: Request, max_tokens: int) -> None:
        """`request` was admitted, for at most `max_tokens`."""
        num_output = min(self.lengths[request.id], max_tokens)
        self._live[request.id] = _Sequence(self._num_received, request, max_tokens, num_output)
        self._num_received += 1

    def forget(self, request_id: str) -> None:
        """The request was aborted or dropped; rows of it that still come are late."""
        self._live.pop(request_id, None)

    def is_live(self, request_id: str) -> bool:
        """Whether it was received, and has neither finished nor been forgotten."""
        return request_id in self._live

    def num_outputs(self, request_id: str) -> int:
        """Tokens that a live request has so far."""
        return self._live[request_id].num_outputs

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Check `plan`, and say how it went."""
        self._take_pages_of(plan.preempted)
        self._check_rows(plan)
        failure = self._failure(plan)
        self.num_steps += 1
        items = tuple(item for chunk in plan.chunks if (item := self._run(chunk, failed=failure is not None)))
        return StepOutcome(failed=failure) if failure else StepOutcome(items)

    def skip(self, plan: StepPlan) -> StepOutcome:
        """`plan` is not run: its outcome is void. What it granted and whom it preempted stands."""
        self._take_pages_of(plan.preempted)
        for chunk in plan.chunks:
            sequence = self._live.get(chunk.request_id) if chunk.request_id is not None and chunk.num_tokens else None
            if sequence is not None:
                self._check_table(sequence, chunk)
                sequence.must_restart = True
        return StepOutcome(failed="void")

    def _take_pages_of(self, preempted: Collection[str]) -> None:
        for request_id in preempted:
            if request_id in self._live:
                self._live[request_id].lose_pages()

    def _failure(self, plan: StepPlan) -> Failure | None:
        positions = sum(chunk.num_tokens + chunk.padding for chunk in plan.chunks)
        if self.max_positions is not None and positions > self.max_positions:
            return "oom"
        if any(chunk.num_tokens and chunk.request_id in self.poison for chunk in plan.chunks):
            return "exception"
        return self.failures.get(self.num_steps)

    def _run(self, chunk: Chunk, *, failed: bool) -> ItemOutcome | None:
        """Compute one row; nothing of a failed step is kept. A late row, of an ended request, brings tokens too."""
        if chunk.request_id is None or not chunk.num_tokens:
            return None
        sequence = self._live.get(chunk.request_id)
        if sequence is None:
            return ItemOutcome(chunk.request_id, int(chunk.samples) + chunk.num_drafts)
        if sequence.must_restart and chunk.start != sequence.num_kept:
            return self._run_void(sequence, chunk)
        self._check_chunk(sequence, chunk)
        num_right = self._num_right(sequence, chunk)
        end = chunk.start + chunk.num_tokens - chunk.num_drafts + num_right
        self._write(sequence, chunk, end)
        if failed:
            sequence.must_restart = True
            return None
        sequence.must_restart = False
        sequence.num_kept = end
        if chunk.request_id in self.errors:
            del self._live[sequence.request.id]
            return ItemOutcome(sequence.request.id, error=True)
        return self._sample(sequence, 1 + num_right) if chunk.samples else ItemOutcome(sequence.request.id)

    def _run_void(self, sequence: "_Sequence", chunk: Chunk) -> ItemOutcome:
        """A row planned before an earlier step of its request failed: it computes garbage, which nobody may keep."""
        assert chunk.start > sequence.num_kept, f"{chunk} recomputes what was kept"
        self._check_table(sequence, chunk)
        size = self._memory.page_size
        for index in range(chunk.start // size, self._memory.pages_for(chunk.start + chunk.num_tokens)):
            page = self._cache[chunk.pages[index]]
            page.num_tokens = min(page.num_tokens, max(0, chunk.start - index * size))
        return ItemOutcome(sequence.request.id, int(chunk.samples) + chunk.num_drafts)

    def _num_right(self, sequence: "_Sequence", chunk: Chunk) -> int:
        """How many guesses of `chunk` count. Those that it has no more when the step begins are wrong ones."""
        guesses = self.guesses(sequence.request.id, sequence.num_outputs)[: chunk.num_drafts]
        return min(sum(takewhile(bool, guesses)), sequence.num_output - sequence.num_outputs - 1)

    def _sample(self, sequence: "_Sequence", num_accepted: int) -> ItemOutcome:
        request_id = sequence.request.id
        sequence.num_outputs += num_accepted
        finished = sequence.num_outputs == sequence.num_output
        if finished:
            del self._live[request_id]
        keys = sequence.new_keys(self._memory.page_size)
        num_drafts = len(self.guesses(request_id, sequence.num_outputs))
        return ItemOutcome(request_id, num_accepted, finished, keys=keys, num_drafts=num_drafts)

    # ---- what a real executor relies on

    def _check_rows(self, plan: StepPlan) -> None:
        ids = [chunk.request_id for chunk in plan.chunks if chunk.request_id is not None]
        assert len(ids) == len(set(ids)), f"plan {plan.id} has two rows of one request"
        written: set[int] = set()
        for chunk in plan.chunks:
            if chunk.request_id is None:
                assert not chunk.num_tokens, f"plan {plan.id} computes tokens of nobody"
                continue
            pages = self._written_by(chunk)
            assert not pages & written, f"plan {plan.id} writes pages {pages & written} for two requests"
            written |= pages
            for request_id, other in self._live.items():
                mine = request_id == chunk.request_id or pages.isdisjoint(other.pages)
                assert mine, f"{chunk} writes into {pages}, of which {request_id} has {other.pages}"

    def _written_by(self, chunk: Chunk) -> set[int]:
        """The pages that executing `chunk` writes to, dummy positions included."""
        size, end = self._memory.page_size, chunk.start + chunk.num_tokens + chunk.padding
        assert end <= len(chunk.pages) * size, f"{chunk} runs over its {len(chunk.pages) * size} slots"
        return set(chunk.pages[chunk.start // size : self._memory.pages_for(end)])

    def _check_chunk(self, sequence: "_Sequence", chunk: Chunk) -> None:
        self._check_table(sequence, chunk)
        assert chunk.start == sequence.num_kept, f"{chunk} does not start at {sequence.num_kept}, which was kept"
        end, known = chunk.start + chunk.num_tokens - chunk.num_drafts, sequence.num_known
        assert end <= known, f"{chunk} computes {end} tokens, {known} are known"
        assert chunk.samples == (end == known), f"{chunk} samples before the last of {known} tokens, or not there"
        if chunk.num_drafts:
            assert chunk.num_tokens == 1 + chunk.num_drafts, f"{chunk} guesses before all that is known is computed"
            most = sequence.max_tokens - sequence.num_outputs
            assert chunk.samples and chunk.num_tokens <= most, f"{chunk} may bring more tokens than the {most} allowed"
        self._check_history(sequence, chunk)

    def _check_table(self, sequence: "_Sequence", chunk: Chunk) -> None:
        """The table grows at its end, by the pages granted; and nobody else who is live has a use for those."""
        if not sequence.pages:
            assert chunk.start % self._memory.page_size == 0, f"{chunk} starts within a page that it never computed"
            sequence.num_kept = chunk.start
        old = sequence.pages or chunk.pages[: chunk.start // self._memory.page_size]
        assert chunk.pages[: len(old)] == old, f"{chunk} moved pages; they were {old}"
        assert len(chunk.pages) - len(old) == chunk.num_granted, f"{chunk} grants pages beyond {old}"
        sequence.pages = chunk.pages
        granted = set(chunk.pages[len(old) :])
        for other in self._live.values() if granted else ():
            assert other is sequence or granted.isdisjoint(other.pages), f"{chunk} takes pages of {other.request.id}"

    def _check_history(self, sequence: "_Sequence", chunk: Chunk) -> None:
        """All tokens before `chunk` are in its pages."""
        size = self._memory.page_size
        for index in range(self._memory.pages_for(chunk.start)):
            page = self._cache[chunk.pages[index]]
            needed = min(size, chunk.start - index * size)
            assert page.label == sequence.label(index), f"{chunk}: page {chunk.pages[index]} holds {page}"
            assert page.num_tokens >= needed, f"{chunk}: page {chunk.pages[index]} holds {page}, {needed} are read"

    def _write(self, sequence: "_Sequence", chunk: Chunk, end: int) -> None:
        """What `chunk` writes from position `end` on is of wrong guesses."""
        size = self._memory.page_size
        for index in range(chunk.start // size, self._memory.pages_for(chunk.start + chunk.num_tokens)):
            page = self._cache[chunk.pages[index]]
            page.label = sequence.label(index)
            page.num_tokens = min(size, max(0, end - index * size))


@dataclass(slots=True)
class _Page:
    """What a page of the cache holds: the first `num_tokens` of the page that `label` names."""

    label: Hashable = None
    num_tokens: int = 0


@dataclass(slots=True)
class _Sequence:
    """One live request as its executor knows it."""

    number: int
    request: Request
    max_tokens: int
    num_output: int
    num_outputs: int = 0
    num_kept: int = 0
    num_keys: int = field(init=False)
    pages: tuple[int, ...] = ()
    must_restart: bool = False

    def __post_init__(self) -> None:
        self.num_keys = len(self.request.keys)

    @property
    def num_known(self) -> int:
        return self.request.num_prompt + self.num_outputs

    def label(self, index: int) -> Hashable:
        """Names the contents of its page `index`: equal keys are equal tokens, all else is its own."""
        keys = self.request.keys
        return keys[index] if index < len(keys) else ("output", self.number, index)

    def new_keys(self, page_size: int) -> tuple[Hashable, ...]:
        """Keys of pages that became full; none if the prompt came without its own."""
        if len(self.request.keys) < self.request.num_prompt // page_size:
            return ()
        first, self.num_keys = self.num_keys, self.num_known // page_size
        return tuple(self.label(index) for index in range(first, self.num_keys))

    def lose_pages(self) -> None:
        self.pages, self.num_kept, self.must_restart = (), 0, False
