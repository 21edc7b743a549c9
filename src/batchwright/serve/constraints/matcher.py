"""Where one request's output stands in its grammar; it goes wherever the output goes, back as well.

Matchers of one grammar share its lexer, which remembers every state that any of their texts led to: what one request
has worked out is there for the next. What it remembers is bounded; when it is full, the grammar is compiled again for
those to come, and the request that met the bound goes on with the new one, unless that would hold up its step.
Cost: a token is taken in within microseconds.
"""

import time
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

from batchwright.errors import RequestError
from batchwright.serve.constraints.guidance import build, on_deep_stack

MAX_RENEWAL_S = 0.02
REPLAYED_AT_ONCE = 64


class Grammar:
    """A compiled grammar, and how to compile it again. `seconds`: what that takes."""

    def __init__(self, tokenizer: LLTokenizer, text: str, seconds: float, asked: str) -> None:
        self.asked = asked
        self.num_tokens = tokenizer.vocab_size
        self.end_ids = frozenset(tokenizer.eos_tokens)
        self._tokenizer, self._text, self._seconds = tokenizer, text, seconds
        self.compiled = on_deep_stack(lambda: build(tokenizer, text))

    def renew(self, full: LLMatcher) -> bool:
        """Compile it again, unless that was done since `full` was; False if it takes too long within a step."""
        if self.compiled is full and self._seconds <= MAX_RENEWAL_S:
            self.compiled = on_deep_stack(lambda: build(self._tokenizer, self._text))
        return self.compiled is not full


class Matcher:
    """One request's place in a grammar: after the output tokens that it was last told. For one thread at a time."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._taken: list[int] = []
        self._origin = grammar.compiled
        self.core = self._origin.deep_copy()

    def is_done(self, outputs: Sequence[int]) -> bool:
        """Whether nothing but an end can follow `outputs`, its output tokens so far. Not while masks are computed."""
        self.take(self.missing(outputs))
        return self.core.is_stopped() and not self.core.is_error()

    def missing(self, outputs: Sequence[int]) -> list[int]:
        """Forget what is not in `outputs`; what of them is still to be taken in, up to a token that ends the text."""
        known = len(self._taken)
        if list(outputs[:known]) != self._taken:
            pairs = enumerate(zip(outputs, self._taken, strict=False))
            same = next((i for i, (now, before) in pairs if now != before), min(len(outputs), known))
            self.core.rollback(known - same)
            del self._taken[same:]
        return until_end(outputs[len(self._taken) :], self.grammar.end_ids)

    def take(self, tokens: Sequence[int]) -> None:
        """Go on by `tokens`; if the grammar has no such text, `core` is in error from now on."""
        self.core.consume_tokens(list(tokens))
        self._taken += tokens

    def note(self, token: int) -> None:
        """`core` was made to go on by `token`."""
        self._taken.append(token)

    def renew(self) -> bool:
        """Start again with a lexer that remembers less, if that helps and is quick; else False."""
        if not (self.core.get_error().startswith("lexer") and self.grammar.renew(self._origin)):
            return False
        core, latest = self.grammar.compiled.deep_copy(), time.perf_counter() + MAX_RENEWAL_S
        for first in range(0, len(self._taken), REPLAYED_AT_ONCE):
            core.consume_tokens(self._taken[first : first + REPLAYED_AT_ONCE])
            if time.perf_counter() > latest:
                return False
        self._origin, self.core = self.grammar.compiled, core
        return True

    def error(self) -> str | None:
        """Why it cannot go on, as its request's error."""
        if not self.core.is_error():
            return None
        reason = self.core.get_error().partition("\n")[0]
        fact = f"what may follow its {len(self._taken)} tokens cannot be worked out: {reason}"
        return str(RequestError(self.grammar.asked, fact, "simplify it, with fewer alternatives at any one place"))


def until_end(tokens: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """Those before the first that ends a text."""
    return list(tokens[: next((i for i, token in enumerate(tokens) if token in end_ids), None)])
