"""Which guesses pay: decodes may carry guesses of their next tokens, and a step may then bring several tokens.

A step costs alpha, and beta for each position; r = beta / alpha. If a row's guesses are each right with probability p,
the i-th counts with probability p^i, for all before it must be right too (Leviathan et al., 2023, arXiv 2211.17192).
R rows without guesses bring R / (1 + r R) tokens in the time alpha. One more guess brings p^i and costs r, so it raises
that rate iff p^i / r > R / (1 + r R). As guesses are added, best first, the rate to beat rises; once the next one does
not beat it, none of the others would, and no other choice of guesses has a higher rate (for they all cost the same).
Prompts in the same step have to be computed anyway and don't enter. Outputs never depend on any of this; speed does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from batchwright.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """A row carries at most `max_drafts` guesses in a step, and only those that are expected to pay.

    `position_cost`: r above, what one more position adds to a step, as a fraction of what a step costs without any.
    It is a fixed number, not learned from the steps' times, so that a run can be repeated, and simulated, plan by plan.
    Measure it where it matters: if steps of 1 and 16 decodes take t and u seconds, it is (u - t) / (16 t - u). On two
    CPU cores SmolLM2-135M takes 6.6 ms and 0.37 ms a row, so 0.056.
    """

    max_drafts: int = 8
    position_cost: float = 0.05

    def __post_init__(self) -> None:
        if self.max_drafts < 1:
            raise ConfigError(f"use max_drafts={self.max_drafts}", "it must be at least 1", "leave speculation out")
        if not 0 <= self.position_cost < float("inf"):
            fact = "it is one duration divided by another"
            raise ConfigError(f"use position_cost={self.position_cost}", fact, "use 0 or more")


class Acceptance:
    """How often one request's guesses were right, of late, with a hopeful prior: the first guess finds out.

    About the `_WINDOW` newest guesses count. Where they were wrong, the rate soon is too low to pay, and it stops
    guessing. What it knows then fades by half after `_REST` tokens, again after twice, three times as many, until a
    guess is right: so it tries again, ever less often.
    """

    __slots__ = ("_judged_at", "_num_rests", "_right", "_tried")

    def __init__(self) -> None:
        self._right = self._tried = 0.0  # guesses, the older ones counting less
        self._num_rests = 0  # since a guess was right
        self._judged_at = 0  # outputs that it had when it guessed last, or forgot half

    def learn(self, num_drafts: int, num_right: int, num_outputs: int) -> None:
        """Of `num_drafts` guesses the first `num_right` were right, and the next wrong; it now has `num_outputs`."""
        num_tried = min(num_right + 1, num_drafts)
        kept = (1 - 1 / _WINDOW) ** num_tried
        self._right = kept * self._right + num_right
        self._tried = kept * self._tried + num_tried
        self._judged_at = num_outputs
        if num_right:
            self._num_rests = 0

    def rate(self, num_outputs: int) -> float:
        """The chance that its next guess is right, as it has `num_outputs`."""
        if num_outputs - self._judged_at >= _REST * (1 + self._num_rests):
            self._right, self._tried = self._right / 2, self._tried / 2
            self._judged_at = num_outputs
            self._num_rests += 1
        return (_PRIOR + self._right) / (1 + self._tried)


_WINDOW = 40
_REST = 16
_PRIOR = 0.7  # counts for one guess; so a new request tries where r R is below 0.7 / 0.3


def allot(offers: Sequence[tuple[float, int]], num_rows: int, position_cost: float, *, must_skip: bool) -> list[int]:
    """How many guesses each of `offers` carries: each is a row's rate and the most guesses that it can have.

    `num_rows` decode in the step, those without offers included. `must_skip`: a row with guesses misses the next step,
    as that is planned before it is known how many were right; so what it gains must be more than that step's token.
    """
    num_tokens, cost = float(num_rows), 1 + position_cost * num_rows
    candidates: list[tuple[float, int]] = []
    for index, (rate, most) in enumerate(offers):
        candidates += [(odds, index) for odds in _paying(rate, most, position_cost * num_tokens / cost)]
    candidates.sort(key=itemgetter(0), reverse=True)
    counts, gains = [0] * len(offers), [0.0] * len(offers)
    for odds, index in candidates:
        if odds * cost <= position_cost * num_tokens:
            break
        num_tokens += odds
        cost += position_cost
        counts[index] += 1
        gains[index] += odds
    return [0 if must_skip and gain <= 1 else count for count, gain in zip(counts, gains, strict=True)]


def _paying(rate: float, most: int, least: float) -> list[float]:
    """The chances of a row's guesses, first to last, while they are above `least`."""
    odds: list[float] = []
    chance = rate
    while chance > least and len(odds) < most:
        odds.append(chance)
        chance *= rate
    return odds
