"""Guesses from the request's own text: what followed the last few tokens where they stood before.

Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding). Of the places where the last two
tokens stood, the newest `_MOST_PLACES` are compared, and the one that agrees with the end for longest is continued, up
to `_LONGEST` tokens back, the newest of equals. Costs O(1) per token and per draft, and some 150 bytes per token. A
guess may be anything: only speed depends on it.
"""

from array import array
from collections.abc import Sequence

_SHORTEST = 2
_LONGEST = 8
_MOST_PLACES = 4


class PromptLookup:
    """Guesses the continuation of `tokens`, the caller's own list, as long as it is whenever a guess is asked for."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._forget()

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens that may follow; none if the last tokens never stood before.

        What follows may run into the end, and then goes on with itself, as a text does that repeats itself.
        """
        self._index()
        place = self._find()
        if not place:
            return []
        guess = list(self._tokens[place : place + most])
        period = len(self._tokens) - place
        while len(guess) < most:
            guess.append(guess[-period])
        return guess

    def _forget(self) -> None:
        self._newest: dict[tuple[int, ...], int] = {}  # the last tokens -> the place behind them
        self._older = array("l", [0] * _SHORTEST)  # place -> the one before, behind the same tokens; 0: none

    def _index(self) -> None:
        """Take in what is new. Tokens that were taken back are rare: then all is read again."""
        tokens = self._tokens
        if len(tokens) < len(self._older):
            self._forget()
        for place in range(len(self._older), len(tokens)):
            last = tuple(tokens[place - _SHORTEST : place])
            self._older.append(self._newest.get(last, 0))
            self._newest[last] = place

    def _find(self) -> int:
        """The place that follows what is most like the end; 0 if nothing is."""
        best, longest = 0, _SHORTEST - 1
        place = self._newest.get(tuple(self._tokens[-_SHORTEST:]), 0)
        for _ in range(_MOST_PLACES):
            if not place or longest == _LONGEST:
                break
            length = self._agreement(place)
            if length > longest:
                best, longest = place, length
            place = self._older[place]
        return best

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` are those at the end, up to `_LONGEST`."""
        tokens, end, length = self._tokens, len(self._tokens), 0
        while length < min(place, _LONGEST) and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
