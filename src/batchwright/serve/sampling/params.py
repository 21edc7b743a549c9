"""What a client may ask of the choice of its tokens, and of their end; every value is checked where it enters.

Whatever a client can make long is bounded, so that one request's cost per token is too.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from batchwright.errors import RequestError
from batchwright.serve.constraints.constraint import Constraint

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1_000
MAX_STOP_IDS = 128
MAX_BIASES = 300
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 100
MAX_FORMS = 2 * MAX_BAD_WORDS  # of bad words as token ids: a tokenizer writes a word in up to two ways
MAX_FORM_LENGTH = 5 * MAX_BAD_WORD_LENGTH  # and makes of a character up to four tokens, or rarely more
MAX_ALLOWED = 1 << 16
MAX_ANSWERS = 128
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 100.0
MAX_SHOWN = 200  # characters of a refused value that its error repeats
_SEEDS = -(1 << 63), (1 << 64) - 1
_BIASES = f"at most {MAX_BIASES} different tokens, each with a bias from {-MAX_BIAS:g} to {MAX_BIAS:g}"
_WORDS = (
    f"at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters, or {MAX_FORMS} sequences of "
    f"1 to {MAX_FORM_LENGTH} token ids, a string counting as two"
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when they end; the defaults are greedy decoding of 128 tokens.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and `typical_p` 1 are off. Without a `seed`, a request's
    place in the engine's order of submission is its seed, so that equal prompts get different answers.

    `repetition_penalty` (1 is off, above 1 discourages) is for tokens of prompt and output, `presence_penalty` and
    `frequency_penalty` (0 is off) for those of the output. `logit_bias`: what is added to the logits of some tokens, a
    mapping of ids, which is kept as pairs. `bad_words` are not generated: strings, or sequences of ids. Only
    `allowed_token_ids` are, if there are any. `constraint`: the form that the output takes.

    `stop` strings (at most 16, of at most 1,000 characters) end the text before themselves; a bare string counts as
    one, None as none. `stop_token_ids` end it in addition to the model's own end tokens, which `ignore_eos` disregards;
    neither comes before `min_tokens` tokens. (A stop string may: it is seen in the text, and not ruled out.)

    `logprobs` asks for the chosen token's log-probability and those of that many likeliest tokens, under the model's
    own distribution: before temperature, penalties and filters, as OpenAI and vLLM report it; `prompt_logprobs` for
    the same of each token of the prompt. `n` answers are given, the likeliest of `best_of`, if that is more.
    Raises RequestError for a value out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        for name, as_tuple in _TUPLES.items():
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        for name, (is_valid, allowed) in _RULES.items():
            if not is_valid(getattr(self, name)):
                raise RequestError(self._asked(name), "the value is out of range", f"{name} must be {allowed}")
        self._check_together()

    def _check_together(self) -> None:
        if self.min_tokens > self.max_tokens:
            fact = f"max_tokens={self.max_tokens} is less"
            raise RequestError(self._asked("min_tokens"), fact, "min_tokens must be at most max_tokens")
        for name in ("ignore_eos", "min_tokens"):
            if self.constraint is not None and getattr(self, name):
                fact = "its constraint says where the output ends"
                raise RequestError(self._asked(name), fact, f"leave {name} out")
        if self.best_of is not None and self.best_of < self.n:
            fact = f"n={self.n} answers are to be chosen from them"
            raise RequestError(self._asked("best_of"), fact, "best_of must be at least n")

    def _asked(self, name: str) -> str:
        shown = repr(getattr(self, name))
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}... ({len(shown):,} characters)"
        return f"sampling with {name}={shown}"


def check_ids(params: SamplingParams, num_vocab: int) -> None:
    """Raises RequestError where `params` name a token that the vocabulary does not have."""
    named: dict[str, Sequence[int]] = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_words": [token for word in params.bad_words if not isinstance(word, str) for token in word],
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        if (highest := max(tokens, default=0)) >= num_vocab:
            fact = f"the model's token ids are 0 to {num_vocab - 1}"
            raise RequestError(f"sampling with {name} of token {highest}", fact, "take ids from this model's tokenizer")


def _as_tuple(value: object) -> tuple[object, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _as_pairs(value: object) -> tuple[object, ...]:
    """Pairs of token and bias, by token where they are valid. A key may be written as a string, as JSON has it."""
    if not isinstance(value, Mapping):
        return _as_tuple(value)
    pairs: list[Any] = [(_as_id(token), bias) for token, bias in value.items()]
    return tuple(sorted(pairs) if _are_biases(pairs) else pairs)


def _as_id(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < MAX_SHOWN else value


def _as_words(value: object) -> tuple[object, ...]:
    return tuple(tuple(word) if isinstance(word, list) else word for word in _as_tuple(value))


def _as_set(value: object) -> tuple[object, ...] | None:
    if value is None:
        return None
    several: tuple[Any, ...] = _as_tuple(value)
    return tuple(sorted(set(several))) if _are_ids(several) else several


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= min(high, sys.float_info.max)
    )


def _are_stops(values: Sequence[object]) -> bool:
    return len(values) <= MAX_STOPS and all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in values)


def _are_ids(values: Sequence[object]) -> bool:
    return all(_is_int(value, 0) for value in values)


def _are_biases(values: Sequence[object]) -> bool:
    pairs = [value for value in values if isinstance(value, tuple) and len(value) == 2]
    return (
        len(pairs) == len(values) <= MAX_BIASES
        and all(_is_int(token, 0) and _is_number(bias, -MAX_BIAS, MAX_BIAS) for token, bias in pairs)
        and len({token for token, _ in pairs}) == len(pairs)
    )


def _are_words(values: Sequence[object]) -> bool:
    num_forms = sum(2 if isinstance(word, str) else 1 for word in values)
    return num_forms <= MAX_FORMS and all(_is_word(word) for word in values)


def _is_word(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip()) and len(value) <= MAX_BAD_WORD_LENGTH
    return isinstance(value, tuple) and 1 <= len(value) <= MAX_FORM_LENGTH and _are_ids(value)


def _whole(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: _is_int(value, low, high)


def _whole_or_none(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: value is None or _is_int(value, low, high)


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: _is_number(value, low, high)


def _share(value: object) -> bool:
    return _is_number(value, 0, 1) and value != 0


_TUPLES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "stop": _as_tuple,
        "stop_token_ids": _as_tuple,
        "logit_bias": _as_pairs,
        "bad_words": _as_words,
        "allowed_token_ids": _as_set,
    }
)
"""How what is given in some other way becomes a tuple, so that params stay hashable."""

_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "max_tokens": (_whole(1), "an integer of at least 1"),
        "temperature": (_number(0), "a finite number of at least 0; 0 is greedy"),
        "ignore_eos": (lambda value: isinstance(value, bool), "True or False"),
        "top_k": (_whole(0), "an integer of at least 0; 0 turns it off"),
        "top_p": (_share, "above 0 and at most 1; 1 turns it off"),
        "min_p": (_number(0, 1), "from 0 to 1; 0 turns it off"),
        "typical_p": (_share, "above 0 and at most 1; 1 turns it off"),
        "seed": (
            _whole_or_none(*_SEEDS),
            "an integer of at most 64 bits, or None for the request's place in the order of submission",
        ),
        "repetition_penalty": (
            _number(1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            f"from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}; 1 turns it off",
        ),
        "presence_penalty": (
            _number(-MAX_PENALTY, MAX_PENALTY),
            f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}; 0 turns it off",
        ),
        "frequency_penalty": (
            _number(-MAX_PENALTY, MAX_PENALTY),
            f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}; 0 turns it off",
        ),
        "logit_bias": (_are_biases, _BIASES),
        "bad_words": (_are_words, _WORDS),
        "allowed_token_ids": (
            lambda ids: ids is None or (0 < len(ids) <= MAX_ALLOWED and _are_ids(ids)),
            f"1 to {MAX_ALLOWED:,} token ids, or None for all",
        ),
        "stop": (_are_stops, f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH:,} characters; () for none"),
        "stop_token_ids": (
            lambda ids: len(ids) <= MAX_STOP_IDS and _are_ids(ids),
            f"at most {MAX_STOP_IDS} token ids of at least 0",
        ),
        "min_tokens": (_whole(0), "an integer of at least 0"),
        "n": (_whole(1, MAX_ANSWERS), f"an integer from 1 to {MAX_ANSWERS}"),
        "best_of": (_whole_or_none(1, MAX_ANSWERS), f"an integer from n to {MAX_ANSWERS}, or None for n"),
        "logprobs": (
            _whole_or_none(0, MAX_LOGPROBS),
            f"an integer from 0 to {MAX_LOGPROBS}, or None for no log-probabilities",
        ),
        "prompt_logprobs": (
            _whole_or_none(0, MAX_LOGPROBS),
            f"an integer from 0 to {MAX_LOGPROBS}, or None for no log-probabilities",
        ),
        "constraint": (lambda value: value is None or isinstance(value, Constraint), "a Constraint, or None"),
    }
)
