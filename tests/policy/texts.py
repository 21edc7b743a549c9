"""An executor that really writes a text: its next token is a function of what it reads from the pages of its request.

So a page that holds a refused guess, somebody else's tokens or none shows in the text. `write` is the same function
without pages, plans or guesses: what every request must get. Guesses are the tokens to come, or wrong ones.
"""

import random
from collections.abc import Sequence

from batchwright.policy.pages import Memory
from batchwright.policy.types import Chunk, ItemOutcome, Request, StepOutcome, StepPlan

NUM_TOKENS = 61  # in the vocabulary
END = 0


def next_token(tokens: Sequence[int]) -> int:
    """Depends on all of `tokens`, and on their order."""
    return sum((index + 3) * token for index, token in enumerate(tokens)) % NUM_TOKENS


def write(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """The text that follows `prompt`, up to its end or `max_tokens`."""
    text: list[int] = []
    while len(text) < max_tokens and (not text or text[-1] != END):
        text.append(next_token([*prompt, *text]))
    return text


def prefix_keys(tokens: Sequence[int], page_size: int) -> tuple[tuple[int, ...], ...]:
    """One for each full page: the tokens up to its end."""
    return tuple(tuple(tokens[:end]) for end in range(page_size, len(tokens) + 1, page_size))


class TextExecutor:
    """Runs plans in order. It offers up to `most` guesses, each right with probability `quality`."""

    def __init__(self, memory: Memory, quality: float, most: int, seed: int) -> None:
        self.texts: dict[str, list[int]] = {}
        self._memory = memory
        self._quality = quality
        self._most = most
        self._random = random.Random(seed)
        self._slots: list[int | None] = [None] * memory.num_tokens
        self._prompts: dict[str, list[int]] = {}
        self._limits: dict[str, int] = {}
        self._num_keys: dict[str, int] = {}

    def receive(self, request: Request, prompt: Sequence[int], max_tokens: int) -> None:
        self.texts[request.id] = []
        self._prompts[request.id] = list(prompt)
        self._limits[request.id] = max_tokens
        self._num_keys[request.id] = len(request.keys)

    def execute(self, plan: StepPlan) -> StepOutcome:
        """All rows write before any reads, as on a device. A late row, of a text that has ended, is left out."""
        chunks = [chunk for chunk in plan.chunks if not self._has_ended(chunk.request_id)]
        self.write(plan)
        return StepOutcome(tuple(self._run(chunk) for chunk in chunks))

    def write(self, plan: StepPlan) -> None:
        """What a step leaves in the pages, also one that fails."""
        for chunk in plan.chunks:
            if not self._has_ended(chunk.request_id):
                for position, token in enumerate(self._fed(chunk), chunk.start):
                    self._slots[self._slot(chunk, position)] = token

    def _fed(self, chunk: Chunk) -> list[int]:
        tokens = self._tokens(chunk.request_id)
        known = chunk.start + chunk.num_tokens - chunk.num_drafts
        assert known <= len(tokens)
        guessed = tokens[:known]
        for _ in range(chunk.num_drafts):
            is_right = self._random.random() < self._quality
            guessed.append(next_token(guessed) if is_right else (next_token(guessed) + 1) % NUM_TOKENS)
        return guessed[chunk.start :]

    def _run(self, chunk: Chunk) -> ItemOutcome:
        request_id = chunk.request_id
        text = self.texts[request_id]
        num_accepted = 0
        while chunk.samples and num_accepted <= chunk.num_drafts and not self._has_ended(request_id):
            end = chunk.start + chunk.num_tokens - chunk.num_drafts + num_accepted
            read = [self._slots[self._slot(chunk, position)] for position in range(end)]
            if num_accepted and read[-1] != text[-1]:
                break  # that guess was wrong
            text.append(next_token(read))
            num_accepted += 1
        keys = prefix_keys(self._tokens(request_id), self._memory.page_size)[self._num_keys[request_id] :]
        self._num_keys[request_id] += len(keys)
        num_drafts = self._random.randint(0, self._most)
        return ItemOutcome(request_id, num_accepted, self._has_ended(request_id), keys=keys, num_drafts=num_drafts)

    def _tokens(self, request_id: str) -> list[int]:
        return self._prompts[request_id] + self.texts[request_id]

    def _has_ended(self, request_id: str) -> bool:
        text = self.texts[request_id]
        return len(text) == self._limits[request_id] or (bool(text) and text[-1] == END)

    def _slot(self, chunk: Chunk, position: int) -> int:
        page, offset = divmod(position, self._memory.page_size)
        return chunk.pages[page] * self._memory.page_size + offset
