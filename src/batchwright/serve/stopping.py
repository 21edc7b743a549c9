"""Decides when a request's output ends, and which of its text may already be shown.

Text that could still turn out to be the beginning of a stop string is held back until that is decided; the stop string
itself is never released. All that is released is the text up to the earliest start of any stop string, however it was
cut into pieces. A place in the text is ruled out as a start once, so the number of comparisons grows linearly with the
text; `SamplingParams` bounds the number and the length of the stop strings, and with them the cost of one comparison.

    stop "</s>"      text  a  b  <  /  b  <  /  s  >
                 released  a  b        </b               then finish "stop"
"""

from collections.abc import Collection

from batchwright.records import FinishReason
from batchwright.serve.sampling.params import SamplingParams


class StopChecker:
    """Watches one request's output, of at most `max_tokens` tokens (by default as many as `params` allow).

    `eos_ids` are the model's own end tokens, disregarded under `ignore_eos`.
    """

    def __init__(self, params: SamplingParams, eos_ids: Collection[int], max_tokens: int | None = None) -> None:
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._max_tokens = max_tokens or params.max_tokens
        self._stops = params.stop
        self._held = ""
        self._finished = False

    def ends(self, token: int) -> bool:
        """Is it an end token of the model, or a stop token of the request? Then its own text is not shown."""
        return token in self._stop_ids

    def push(self, token: int, text: str, num_output: int) -> tuple[str, FinishReason | None]:
        """Take one new token, the text it adds (possibly "") and the count of output tokens, this one included.

        For a token that `ends`, `text` is what its decoder still held, without the token's own text.
        Returns the text that may be shown now and, if the request ends here, why: "stop" or "length". With the reason
        comes everything that will ever be released. A stop string outranks the length limit.
        """
        assert not self._finished, "push after the end"
        released, found = self._release(text)
        if found:
            self._finished = True
            return released, "stop"
        if self.ends(token):
            return released + self.flush(), "stop"
        if num_output >= self._max_tokens:
            found = any(stop in self._held for stop in self._stops)
            return released + self.flush(), "stop" if found else "length"
        return released, None

    def flush(self, text: str = "") -> str:
        """End here for another reason (abort, deadline): what is still held back, less any stop string in it.

        `text` is what the decoder still held.
        """
        if self._finished:
            return ""
        self._finished = True
        held = self._held + text
        starts = [held.index(stop) for stop in self._stops if stop in held]
        return held[: min(starts, default=len(held))]

    def _release(self, text: str) -> tuple[str, bool]:
        """The text before the first place where a stop string may begin, and whether one is complete there.

        A shorter stop string may be complete while a longer one, which began before it, is still undecided: the
        earlier start is decided first.
        """
        if not self._stops:
            return text, False
        held = self._held + text
        for start in range(len(held)):
            begun = [stop for stop in self._stops if stop.startswith(held[start : start + len(stop)])]
            if begun:
                self._held = held[start:]
                return held[:start], any(self._held.startswith(stop) for stop in begun)
        self._held = ""
        return held, False
