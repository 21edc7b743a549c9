"""What a client may ask of the choice of its tokens, and of their end; every value is checked where it enters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from batchwright.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1_000
MAX_SHOWN = 200  # characters of a refused value that its error repeats
MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when they end; the defaults are greedy decoding of 128 tokens.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. Without a `seed`, a request's place in the engine's
    order of submission is its seed, so that equal prompts get different answers. `stop` strings (at most 16, of at
    most 1,000 characters) end the text before themselves; a bare string counts as one, None as none. `stop_token_ids`
    end it in addition to the model's own end tokens, which `ignore_eos` disregards. `logprobs` asks for the chosen
    token's log-probability and those of that many likeliest tokens, under the model's own distribution: before
    temperature and filters, as OpenAI and vLLM report it.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))
        stops = f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH:,} characters; () for none"
        seeds = "an integer of at most 64 bits, or None for the request's place in the order of submission"
        logprobs = f"an integer from 0 to {MAX_LOGPROBS}, or None for no log-probabilities"
        for name, is_valid, allowed in (
            ("max_tokens", _is_int(self.max_tokens, 1), "an integer of at least 1"),
            ("temperature", _is_number(self.temperature, 0), "a finite number of at least 0; 0 is greedy"),
            ("top_k", _is_int(self.top_k, 0), "an integer of at least 0; 0 turns it off"),
            ("top_p", _is_number(self.top_p, 0) and 0 < self.top_p <= 1, "above 0 and at most 1; 1 turns it off"),
            ("seed", self.seed is None or _is_int(self.seed, -(1 << 63), MASK_64), seeds),
            ("stop", _are_stops(self.stop), stops),
            ("stop_token_ids", all(_is_int(t, 0) for t in self.stop_token_ids), "token ids of at least 0"),
            ("logprobs", self.logprobs is None or _is_int(self.logprobs, 0, MAX_LOGPROBS), logprobs),
        ):
            if not is_valid:
                asked = f"sampling with {name}={_shortened(repr(getattr(self, name)))}"
                raise RequestError(asked, "the value is out of range", f"{name} must be {allowed}")


def _as_tuple(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _as_stops(value: object) -> tuple[object, ...]:
    return () if value is None else _as_tuple(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text):,} characters)"


def _are_stops(values: Sequence[object]) -> bool:
    return len(values) <= MAX_STOPS and all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in values)


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value < math.inf
