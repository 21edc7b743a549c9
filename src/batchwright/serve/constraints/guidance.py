"""llguidance as we use it: one set of limits, tokens that are bytes, and a stack that deep grammars do not overflow.

Its limits are counted work, not time, so they refuse the same grammars on every machine; the figures say what they come
to on one core. What they do not bound (some products of `multipleOf`, long lists of properties) the time and memory of
`vetting.py` do. Its recursion takes a few kilobytes of stack per level of a grammar: a chain of 1,000 `$ref`s overflows
the usual 8 MiB and ends the process, so grammars are compiled on threads with a stack of their own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # to compile: 100 ms or so
    step_lexer_fuel=100_000,  # of a mask: 20 ms
    step_max_items=10_000,  # of a mask: 10 to 50 ms, with the number of alternatives
    max_items_in_row=700,  # alternatives at one place, unless the grammar itself lists more
    max_lexer_states=50_000,  # of all texts that were made by one compiled grammar: 25 MiB or so
    max_grammar_size=10_000,  # symbols: a schema of 1,200 properties
    verbose_errors=False,
)
STACK_BYTES = 256 << 20  # of address space: only what is used becomes memory

_T = TypeVar("_T")
_setting_stack_size = threading.Lock()


class Vocabulary(NamedTuple):
    """`token_bytes[v]`: what token v adds to the text. `end_ids`: tokens that end it, if any.

    `strips_space`: decoding drops one space from the beginning of a text.
    """

    token_bytes: list[bytes]
    end_ids: list[int]
    strips_space: bool


def tokenizer_of(vocabulary: Vocabulary) -> LLTokenizer:
    """Of as many tokens as the vocabulary, and one more to stand for the end where no token does."""
    return LLTokenizer(_Tokens(vocabulary), eos_token=vocabulary.end_ids or None)


class _Tokens(TokenizerWrapper):
    """What llguidance wants to know of tokens. None of our grammars forces text, so nothing is ever encoded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.is_tokenizer_wrapper = True
        self.tokens = vocabulary.token_bytes
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else None  # type: ignore[assignment]  # it may
        self.bos_token_id = None
        self.special_token_ids = vocabulary.end_ids

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("a grammar of ours forces nothing")


def build(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compiles, on a deep stack; `is_error` says whether it worked. Lets other threads run meanwhile."""
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def on_deep_stack(work: Callable[[], _T]) -> _T:
    """The result of `work`, run by a thread with `STACK_BYTES` of stack."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  whatever it is, it is raised where the result is wanted
            future.set_exception(error)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    with _setting_stack_size:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()
