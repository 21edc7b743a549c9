"""A token is masked exactly if no text of the grammar goes on with it; whatever the order of steps, guesses, retreats.

The vocabularies are tiny and the languages finite, so every claim is held against a list of all texts.
"""

import random
from collections.abc import Iterable, Sequence
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.serve.constraints.constraint import Constraint
from batchwright.serve.constraints.grammar import grammar_of
from batchwright.serve.constraints.guidance import Vocabulary, tokenizer_of
from batchwright.serve.constraints.masks import Masks
from batchwright.serve.constraints.matcher import Grammar, Matcher
from tests.serve.constrained import allowed

LETTERS = "ab0"
PIECES = ["a", "b", "0", "ab", "ba", "aa", "0a", "abb", "b0b", "a", "", "c", "é", "aba0"]  # "a" twice; "" has no text
NUM_VOCAB = 40  # rows of the embedding: the last ones have no token
ENDS = [NUM_VOCAB - 3, NUM_VOCAB - 1]
TOKENS = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa9"] + [b""] * (NUM_VOCAB - len(PIECES) - 2)
VOCABULARY = Vocabulary(TOKENS, ENDS, strips_space=False)
TOKENIZER = tokenizer_of(VOCABULARY)
CPU = torch.device("cpu")

short_texts = st.text(LETTERS, min_size=1, max_size=6)


def matcher_of(constraint: Constraint, vocabulary: Vocabulary = VOCABULARY) -> Matcher:
    tokenizer = TOKENIZER if vocabulary is VOCABULARY else tokenizer_of(vocabulary)
    return Matcher(
        Grammar(tokenizer, grammar_of(constraint, after_space=vocabulary.strips_space), 0.0, constraint.asked)
    )


def bits(masks: Masks, *rows: tuple[Matcher | None, Sequence[int]]) -> list[set[int]]:
    pending = masks.begin(rows)
    assert pending is not None
    bits_RW, errors = pending.wait()
    assert not errors
    return [set(allowed(bits_W).tolist()) for bits_W in bits_RW]


def possible(texts: Iterable[str], output: Sequence[int]) -> set[int]:
    """By its definition: the tokens that some text goes on with, and the ends if it is one itself."""
    before = b"".join(TOKENS[token] for token in output)
    rest = [text.encode()[len(before) :] for text in texts if text.encode().startswith(before)]
    going_on = {v for v, piece in enumerate(TOKENS) if piece and any(text.startswith(piece) for text in rest)}
    return going_on | (set(ENDS) if b"" in rest else set())


def assert_exact(texts: set[str], matcher: Matcher, seed: int) -> None:
    """Along random ways through the language, each mask is what the list of texts says."""
    masks, rng = Masks(NUM_VOCAB, CPU), random.Random(seed)
    for _ in range(5):
        output: list[int] = []
        while True:
            (mask,) = bits(masks, (matcher, output))
            assert mask == possible(texts, output)
            if (token := rng.choice(sorted(mask))) in ENDS:
                break
            output.append(token)


@settings(max_examples=150, deadline=None)
@given(texts=st.sets(short_texts | st.just("é") | st.just("abé0"), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_of_a_choice_no_way_is_lost_and_none_gained(texts: set[str], seed: int) -> None:
    assert_exact(texts, matcher_of(Constraint.choice(sorted(texts))), seed)


Language = tuple[str, frozenset[str]]
"""An expression, and all texts that it matches."""

LEAVES = {"a": ["a"], "b": ["b"], "0": ["0"], "ab": ["ab"], "[ab]": ["a", "b"], "é?": ["", "é"], "(0|ba)": ["0", "ba"]}


def twice(one: Language) -> Language:
    return f"({one[0]}){{0,2}}", frozenset({""} | one[1] | {first + second for first in one[1] for second in one[1]})


def languages() -> st.SearchStrategy[Language]:
    return st.recursive(
        st.sampled_from([(pattern, frozenset(texts)) for pattern, texts in LEAVES.items()]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(
                lambda p: (p[0][0] + p[1][0], frozenset(a + b for a in p[0][1] for b in p[1][1]))
            ),
            st.tuples(inner, inner).map(lambda p: (f"({p[0][0]}|{p[1][0]})", p[0][1] | p[1][1])),
            inner.map(lambda one: (f"({one[0]})?", one[1] | {""})),
            inner.map(twice),
        ),
        max_leaves=5,
    ).filter(lambda language: len(language[1]) < 500)


@settings(max_examples=200, deadline=None)
@given(language=languages(), seed=st.integers(0, 99))
def test_of_an_expression_no_way_is_lost_and_none_gained(language: Language, seed: int) -> None:
    """Whatever groups, options and repeats it nests, and though a character may take two tokens."""
    pattern, texts = language
    assert_exact(set(texts), matcher_of(Constraint.regex(pattern)), seed)


def test_a_grammar_loses_no_way_either() -> None:
    """All sums of at most three terms, by all its tokens."""
    terms = ["a", "ab", "b0"]
    texts = {"0".join(chosen) for length in (1, 2, 3) for chosen in product(terms, repeat=length)}
    grammar = 'start: term ("0" term){0,2}\nterm: "a" | "ab" | "b0"'
    assert_exact(texts, matcher_of(Constraint.grammar(grammar)), 0)


SUMS = Constraint.grammar('start: term ("0" term)*\nterm: "a" | "ab" | "b"')


def outputs_of(matcher: Matcher, seed: int, length: int) -> list[int]:
    """Tokens of an unfinished text."""
    masks, rng, output = Masks(NUM_VOCAB, CPU), random.Random(seed), []
    while len(output) < length:
        (mask,) = bits(masks, (matcher, output))
        output.append(rng.choice(sorted(mask - set(ENDS))))
    return output


WAYS = [outputs_of(matcher_of(SUMS), seed, 12) for seed in range(4)]


@settings(max_examples=100, deadline=None)
@given(stays=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=12))
def test_a_matcher_goes_wherever_the_output_goes(stays: list[tuple[int, int]]) -> None:
    """Forward, back, or to another text altogether: its mask is a new matcher's."""
    masks, matcher = Masks(NUM_VOCAB, CPU), matcher_of(SUMS)
    for way, length in stays:
        output = WAYS[way][:length]
        assert bits(masks, (matcher, output)) == bits(masks, (matcher_of(SUMS), output))


@settings(max_examples=100, deadline=None)
@given(length=st.integers(0, 6), guesses=st.lists(st.integers(0, NUM_VOCAB - 1), max_size=4), right=st.integers(0, 4))
def test_behind_guesses_masks_are_what_they_would_be_if_those_were_known(
    length: int, guesses: list[int], right: int
) -> None:
    """As far as the guesses are the grammar's. Behind a wrong one nothing is restricted, for nobody is given that."""
    matcher, masks = matcher_of(SUMS), Masks(NUM_VOCAB, CPU)
    way = WAYS[length % 4]
    output, guesses = way[:length], way[length : length + right] + guesses
    rows = [(matcher, output + guesses[:num]) for num in range(len(guesses) + 1)]
    follows = True
    for num, mask in enumerate(bits(masks, *rows)):
        if follows:
            assert bits(masks, (matcher_of(SUMS), output + guesses[:num])) == [mask]
            follows = num < len(guesses) and guesses[num] in mask and guesses[num] not in ENDS
        else:
            assert mask >= set(range(NUM_VOCAB))
    assert bits(masks, (matcher, output)) == bits(masks, (matcher_of(SUMS), output))


def test_rows_do_not_notice_each_other() -> None:
    """Constrained ones get what they get alone, free ones everything, and so does one that has come to its end."""
    masks = Masks(NUM_VOCAB, CPU)
    constraints = [SUMS, Constraint.choice(["ab", "b0b"]), Constraint.regex("[ab]{2,5}0"), SUMS]
    rows = [(matcher_of(c), outputs_of(matcher_of(c), seed, 1)) for seed, c in enumerate(constraints)]
    alone = [bits(masks, row)[0] for row in rows]
    ended = (matcher_of(SUMS), [PIECES.index("ab"), ENDS[1]])
    together = bits(masks, (None, [1, 2]), *rows[:2], ended, (None, []), *rows[2:])
    everything = set(range(64))
    assert together == [everything, *alone[:2], everything, everything, *alone[2:]]


def test_a_step_that_nothing_restricts_costs_nothing() -> None:
    masks = Masks(NUM_VOCAB, CPU)
    assert masks.begin([(None, []), (None, [3])]) is None
    assert masks.begin([]) is None


def test_memory_for_the_bits_is_written_again() -> None:
    masks, matcher = Masks(NUM_VOCAB, CPU), matcher_of(SUMS)
    first, second = (masks.begin([(matcher, [])]).wait().bits_RW for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


def test_special_tokens_and_rows_without_a_token_are_never_allowed() -> None:
    """Not even by a grammar that allows any text; and ends only where it may end."""
    (mask,) = bits(Masks(NUM_VOCAB, CPU), (matcher_of(Constraint.regex("(?s:.*)c")), []))
    assert mask == {v for v, piece in enumerate(TOKENS) if piece and piece != b"\xa9"}


def test_where_the_model_has_no_end_a_matcher_says_when_it_is_done() -> None:
    """Nothing is allowed then; before, masks are as ever."""
    for num_vocab in (len(TOKENS), 32):  # with and without room for one more bit in the last word
        matcher = matcher_of(Constraint.choice(["abb", "ab0"]), Vocabulary(TOKENS[:num_vocab], [], strips_space=False))
        masks, known = Masks(num_vocab, CPU), [PIECES.index("ab")]
        assert bits(masks, (matcher, known)) == [{PIECES.index("b"), PIECES.index("0")}]
        assert not matcher.is_done(known)
        assert matcher.is_done([*known, PIECES.index("0")])
        assert not matcher.is_done(known)
        (mask,) = bits(masks, (matcher, [*known, PIECES.index("0")]))
        assert not mask & set(range(num_vocab))


def test_what_becomes_too_costly_ends_its_own_row() -> None:
    """Of an ambiguous grammar every place has as many readings as it has places before it."""
    costly = matcher_of(Constraint.grammar('start: s\ns: s s s | s s | "a" | ""'))
    masks, letter = Masks(NUM_VOCAB, CPU), PIECES.index("a")
    for length in range(1_000):
        pending = masks.begin([(costly, [letter] * length), (matcher_of(SUMS), [])])
        _, errors = masked = pending.wait()
        if errors:
            break
    assert list(errors) == [0]
    assert "cannot be worked out" in errors[0]
    assert [set(allowed(masked.bits_RW[1]).tolist())] == bits(Masks(NUM_VOCAB, CPU), (matcher_of(SUMS), []))


EXPONENTIAL = Constraint.regex("[ab0]*a[ab0]{16}b")


def test_a_full_lexer_is_compiled_again() -> None:
    """Requests share what it remembers, which is bounded; those under way when it is full do not notice."""
    grammar = matcher_of(EXPONENTIAL).grammar
    first, masks, rng = grammar.compiled, Masks(NUM_VOCAB, CPU), random.Random(0)
    letters = {v for v, piece in enumerate(TOKENS) if piece and set(piece.decode(errors="replace")) <= set(LETTERS)}
    while grammar.compiled is first:
        rows = [(Matcher(grammar), []) for _ in range(64)]
        for _ in range(60):
            assert all(mask - set(ENDS) == letters for mask in bits(masks, *rows))
            for _, output in rows:
                output.append(rng.choice(sorted(letters)))


def test_a_lexer_that_takes_long_to_compile_is_not_compiled_within_a_step() -> None:
    """When it is full, requests that need more of it end."""
    slow = Grammar(TOKENIZER, grammar_of(EXPONENTIAL, after_space=False), 1.0, "constraining output by a regex")
    masks, rng, errors = Masks(NUM_VOCAB, CPU), random.Random(0), {}
    letters = sorted(
        v for v, piece in enumerate(TOKENS) if piece and set(piece.decode(errors="replace")) <= set(LETTERS)
    )
    while not errors:
        rows = [(Matcher(slow), []) for _ in range(64)]
        for _ in range(60):
            errors |= masks.begin(rows).wait().errors
            for _, output in rows:
                output.append(rng.choice(letters))
    assert "too many" in next(iter(errors.values()))
