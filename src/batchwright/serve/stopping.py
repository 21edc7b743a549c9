"""Decides when a request's output ends, and which of its text may already be shown.

Text that could still turn out to be the beginning of a stop string is held back until that is decided; the stop string
itself is never released. All that is released is the text up to the earliest start of any stop string, however it was
cut into pieces. The text is read once, by an Aho-Corasick automaton (Aho and Corasick, CACM 18(6), 1975), whose state
*is* the longest ending of the text that begins some stop string: the cost is linear however long the stop strings are.

    stop "</s>"      text  a  b  <  /  b  <  /  s  >
                 released  a  b        </b               then finish "stop"
"""

from collections import deque
from collections.abc import Collection
from functools import lru_cache
from typing import Literal

from batchwright.serve.sampling import SamplingParams

FinishReason = Literal["stop", "length"]


class StopChecker:
    """Watches one request's output. `eos_ids` are the model's own end tokens, disregarded under `ignore_eos`."""

    def __init__(self, params: SamplingParams, eos_ids: Collection[int]) -> None:
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._max_tokens = params.max_tokens
        self._watch = _StopStrings(params.stop) if params.stop else None
        self._finished = False

    def push(self, token: int, text: str, num_output: int) -> tuple[str, FinishReason | None]:
        """Take one new token, the text it completed (possibly "") and the count of output tokens, this one included.

        Returns the text that may be shown now and, if the request ends here, why. The text of a stop token is dropped.
        With the reason comes everything that will ever be released. A stop string outranks the length limit.
        """
        assert not self._finished, "push after the end"
        is_stop_token = token in self._stop_ids
        released = "" if is_stop_token else self._release(text)
        reason: FinishReason | None = None
        if is_stop_token or self._has_stop_string():
            reason = "stop"
        elif num_output >= self._max_tokens:
            reason = "length"
        if reason is not None:
            released += self.flush()
            reason = "stop" if self._has_stop_string() else reason
        return released, reason

    def flush(self) -> str:
        """End here for another reason (abort, context full): the text still held back, less any stop string in it."""
        if self._finished:
            return ""
        self._finished = True
        return "" if self._watch is None else self._watch.end()

    def _release(self, text: str) -> str:
        return text if self._watch is None else self._watch.read(text)

    def _has_stop_string(self) -> bool:
        return self._watch is not None and self._watch.is_decided


class _StopStrings:
    """Releases text up to the earliest start of any stop string; `is_decided` once that start is certain."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = _automaton(stops)
        self._state = 0
        self._num_read = 0
        self._num_released = 0
        self._start: int | None = None
        self._held = _HeldText()
        self.is_decided = False

    def read(self, text: str) -> str:
        """The part of the text so far that no stop string can claim any more and that was not released before."""
        self._held.append(text)
        depths, longest_matches = self._automaton.depths, self._automaton.longest_matches
        for character in text:
            self._state = self._automaton.step(self._state, character)
            self._num_read += 1
            earliest_candidate = self._num_read - depths[self._state]
            if longest_matches[self._state]:
                start = self._num_read - longest_matches[self._state]
                self._start = start if self._start is None else min(self._start, start)
            # A shorter stop string may be complete while a longer one, which began before it, is still undecided.
            if self._start is not None and earliest_candidate >= self._start:
                self.is_decided = True
                return self._release_up_to(self._start)
        return self._release_up_to(self._num_read - depths[self._state])

    def end(self) -> str:
        """No more text comes: what was held back, up to the stop string if one is complete."""
        if self._start is None:
            return self._release_up_to(self._num_read)
        self.is_decided = True
        return self._release_up_to(self._start)

    def _release_up_to(self, end: int) -> str:
        released = self._held.take(end - self._num_released)
        self._num_released = end
        return released


class _Automaton:
    """Aho-Corasick over the stop strings: state 0 is the root; the tables are per state and never change."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]  # length of the ending of the text that this state stands for
        self.longest_matches = [0]  # length of the longest stop string that ends here, 0 for none
        for stop in stops:
            self._insert(stop)
        self.fallbacks = [0] * len(self.depths)  # the next shorter ending that also begins a stop string
        self._link()

    def step(self, state: int, character: str) -> int:
        while state and character not in self.children[state]:
            state = self.fallbacks[state]
        return self.children[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self.children[state]:
                self.children[state][character] = len(self.depths)
                self.children.append({})
                self.depths.append(self.depths[state] + 1)
                self.longest_matches.append(0)
            state = self.children[state][character]
        self.longest_matches[state] = len(stop)

    def _link(self) -> None:
        """Breadth first, so that a state's fallback is complete before the state itself needs it."""
        queue = deque(self.children[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.children[state].items():
                self.fallbacks[child] = self.step(self.fallbacks[state], character)
                queue.append(child)
            self.longest_matches[state] = self.longest_matches[state] or self.longest_matches[self.fallbacks[state]]


@lru_cache(maxsize=256)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class _HeldText:
    """A queue of characters that arrive in pieces; a piece is never copied to take something off its front."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._num_taken = 0  # characters already taken off the first piece

    def append(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def take(self, num: int) -> str:
        taken: list[str] = []
        while num:
            first = self._pieces[0]
            part = first[self._num_taken : self._num_taken + num]
            taken.append(part)
            num -= len(part)
            self._num_taken += len(part)
            if self._num_taken == len(first):
                self._pieces.popleft()
                self._num_taken = 0
        return "".join(taken)
