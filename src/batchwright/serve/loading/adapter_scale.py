"""How much an adapter weighs: the rank and the scale that its adapter_config.json gives each module.

The scale is alpha / r (Hu et al. 2021, section 4.1), or alpha / sqrt(r) where the config says `use_rslora`
(Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"). Either number may differ by
module: the first pattern counts that matches the whole name or its end after a dot, as in PEFT 0.21. Patterns are
regular expressions out of a foreign file, so those that could take long to match are refused before they are tried.
"""

import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading.checkpoint import section

_LONGEST = 40
"""Characters of a module's name, about; each wildcard of a pattern may stand for as many."""

_MOST_WAYS = 1_000_000
"""In which all patterns of a config together may be matched with one name: about ten milliseconds."""

_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[\d,]*\}|\(\?:|\(\?|.", re.DOTALL)


class Scaling:
    """Ranks and scales by the module's name. Raises BrokenWeights, UnsupportedModel for values that are none."""

    def __init__(self, asked: str, config: Mapping[str, Any]) -> None:
        self._asked = asked
        self._rank = self._whole("r", config.get("r", 8))
        self._alpha = self._number("lora_alpha", config.get("lora_alpha", 8))
        self._is_root = self._flag("use_rslora", config.get("use_rslora"))
        self._num_ways = 0.0
        ranks, alphas = section(config, "rank_pattern"), section(config, "alpha_pattern")
        self._ranks = [(self._compiled(pattern), self._whole("rank_pattern", rank)) for pattern, rank in ranks.items()]
        self._alphas = [(self._compiled(pattern), self._number("alpha_pattern", a)) for pattern, a in alphas.items()]

    def rank(self, module: str) -> int:
        return next((rank for pattern, rank in self._ranks if pattern.match(module)), self._rank)

    def scale(self, module: str) -> float:
        alpha = next((alpha for pattern, alpha in self._alphas if pattern.match(module)), self._alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        self._num_ways += num_ways(pattern)
        if self._num_ways > _MOST_WAYS:
            fact = f"its pattern {reprlib.repr(pattern)} could take long to match, or uses a rare kind of group"
            raise UnsupportedModel(self._asked, fact, "write out the names, with few wildcards")
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, OverflowError, RecursionError) as error:
            fact = f"its pattern {reprlib.repr(pattern)} is no regular expression: {error}"
            raise BrokenWeights(self._asked, fact, "correct adapter_config.json") from error

    def _whole(self, key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._odd(key, value, "a positive whole number")
        return value

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
            raise self._odd(key, value, "a finite number")
        return float(value)

    def _flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool | None):
            raise self._odd(key, value, "true or false")
        return bool(value)

    def _odd(self, key: str, value: Any, kind: str) -> BrokenWeights:
        return BrokenWeights(
            self._asked, f"{key} holds {reprlib.repr(value)}, which is not {kind}", "correct adapter_config.json"
        )


def num_ways(pattern: str) -> float:
    """About how often `re` may try to match the pattern, at most: alternatives and repeats multiply.

    A repeated group could be entered in exponentially many ways, and groups of other kinds than ( and (?: are not
    looked into: infinite.
    """
    ways, alternatives, previous = float(_LONGEST), [1], ""
    for piece in _PIECE.findall(pattern):
        if piece in ("(", "(?:"):
            alternatives.append(1)
        elif piece == "|":
            alternatives[-1] += 1
        elif piece == ")" and len(alternatives) > 1:
            ways *= alternatives.pop()
        elif piece == "?":
            ways *= 2
        elif piece[0] in "*+{" and previous != ")":
            ways *= _LONGEST
        elif piece in ("*", "+", ")", "(?") or piece[0] == "{":
            return math.inf
        previous = piece
    return ways * math.prod(alternatives)
