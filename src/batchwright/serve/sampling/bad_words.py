"""Words that must not be generated: the last token of one is ruled out wherever the tokens before it already stand.

As in transformers, and unlike in vLLM, a word may begin in the prompt. A word is matched in the ways that a tokenizer
writes it at the beginning and in the middle of a text, as vLLM does it; written in yet another way it goes through.
All rows' words are compared at once.

R rows, P prefixes, L the longest one's tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from batchwright.errors import RequestError
from batchwright.serve.sampling.params import SamplingParams

_ANY, _NOTHING = -1, -2


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def bad_word_ids(params: SamplingParams, tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """The token sequences that `params.bad_words` stand for; what is given as ids stays. Raises RequestError.

    The form after a space counts where it differs from the other in its first token and not in its length: else it is
    the other one, or begins with a token for the space alone.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if not isinstance(word, str):
            sequences[word] = None
            continue
        if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
            asked = f"sampling with bad_words={word!r:.80}"
            raise RequestError(asked, "it holds half a surrogate pair, which is no character", "remove it")
        bare, spaced = (
            tuple(tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
        )
        if not bare:
            raise RequestError(
                f"sampling with bad_words={word!r}",
                "the tokenizer makes no token of it",
                "leave it out, or give token ids",
            )
        sequences[bare] = None
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences[spaced] = None
    return tuple(sequences)


class BadWords(NamedTuple):
    """One request's: the tokens before each word's last, filled up at the left with `_ANY`; and the last."""

    prefixes_PL: NDArray[np.int64]
    last_P: NDArray[np.int64]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "BadWords":
        """`sequences` of at least one token each."""
        length = max(len(sequence) for sequence in sequences) - 1
        filled = [[_ANY] * (length + 1 - len(sequence)) + list(sequence[:-1]) for sequence in sequences]
        prefixes_PL = np.array(filled, dtype=np.int64).reshape(len(sequences), length)
        return cls(prefixes_PL, np.array([sequence[-1] for sequence in sequences], dtype=np.int64))


class WordsOfRow(NamedTuple):
    """A row of logits, which follows `tokens[:end]`."""

    row: int
    words: BadWords
    tokens: Sequence[int]
    end: int


def completions(rows: Sequence[WordsOfRow]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and token of all that would complete a word."""
    length = max(row.words.prefixes_PL.shape[1] for row in rows)
    tails_RL = np.full((len(rows), length), _NOTHING, dtype=np.int64)
    for tail_L, row in zip(tails_RL, rows, strict=True):
        tail = row.tokens[max(0, row.end - length) : row.end]
        tail_L[length - len(tail) :] = tail
    prefixes_PL = np.concatenate([_widened(row.words.prefixes_PL, length) for row in rows])
    index_P = np.arange(len(rows)).repeat([len(row.words.last_P) for row in rows])
    matches_P = ((prefixes_PL == tails_RL[index_P]) | (prefixes_PL == _ANY)).all(-1)
    last_P = np.concatenate([row.words.last_P for row in rows])
    return np.array([row.row for row in rows], dtype=np.int64)[index_P[matches_P]], last_P[matches_P]


def _widened(prefixes_PL: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    missing = length - prefixes_PL.shape[1]
    return np.pad(prefixes_PL, ((0, 0), (missing, 0)), constant_values=_ANY) if missing else prefixes_PL
