"""Output ends where it must, and no character is shown that a stop string later claims."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.stopping import StopChecker

EOS = 2
WORD = 7  # a token that ends nothing


def run(stop, pieces, max_tokens=1_000_000):
    """Push the pieces until the request ends; what was released by each push, by the flush, and why it ended."""
    checker = StopChecker(SamplingParams(stop=stop, max_tokens=max_tokens), {EOS})
    released, reason = [], None
    for num_output, piece in enumerate(pieces, 1):
        text, reason = checker.push(WORD, piece, num_output)
        released.append(text)
        if reason is not None:
            break
    return released, checker.flush(), reason


def text_before_stop(text, stop):
    starts = [text.find(s) for s in stop if s in text]
    return text[: min(starts)] if starts else text


few_letters = st.text(alphabet="ab<", max_size=40)
stop_strings = st.lists(st.text(alphabet="ab<", min_size=1, max_size=6), max_size=4).map(tuple)


@st.composite
def cut_texts(draw):
    text = draw(few_letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=500)
@given(stop_strings, cut_texts())
@example(("abab<", "ba"), ["abab", "a"])
@example(("aab", "aaa"), ["a", "a", "a"])
def test_released_text_is_the_text_before_the_earliest_stop_string(stop, pieces):
    """However the text is cut, all that is released is the text up to the earliest start of any stop string."""
    released, rest, _ = run(stop, pieces)
    assert "".join(released) + rest == text_before_stop("".join(pieces), stop)


@settings(max_examples=500)
@given(stop_strings, cut_texts(), few_letters)
def test_no_released_character_can_still_be_claimed(stop, pieces, future):
    """What is released before the end stays right whatever text follows, and nothing is held back without need."""
    released, _, reason = run(stop, pieces)
    seen, shown = "".join(pieces), "".join(released)
    assert text_before_stop(seen + future, stop).startswith(shown)
    if reason is None:
        held = seen[len(shown) :]
        assert held == "" or any(s.startswith(held[: len(s)]) for s in stop)


@settings(max_examples=300)
@given(stop_strings, cut_texts())
def test_length_limit_releases_everything_up_to_a_stop_string(stop, pieces):
    """The last push gives out the held text; a stop string in it, decided or not, makes the reason "stop"."""
    released, rest, reason = run(stop, pieces, max_tokens=len(pieces))
    text = "".join(pieces)
    assert "".join(released) == text_before_stop(text, stop)
    assert rest == ""
    assert reason == ("stop" if any(s in text for s in stop) else "length")


def test_beginning_of_a_stop_string_is_held_until_decided():
    """A piece that may begin a stop string waits; it appears once the text goes another way."""
    checker = StopChecker(SamplingParams(stop="</s>"), set())
    assert checker.push(WORD, "ab<", 1) == ("ab", None)
    assert checker.push(WORD, "/b<", 2) == ("</b", None)
    assert checker.push(WORD, "/s> more", 3) == ("", "stop")
    assert checker.flush() == ""


def test_a_complete_stop_string_waits_for_one_that_began_earlier():
    """With "abcd" and "bc", "abc" is undecided: "abcd" began first, and its failure makes "bc" the end."""
    assert run(("abcd", "bc"), ["abc", "d"]) == (["", ""], "", "stop")
    assert run(("abcd", "bc"), ["abc", "x"]) == (["", "a"], "", "stop")


@pytest.mark.parametrize(
    ("params", "ending"),
    [
        (SamplingParams(), {EOS}),
        (SamplingParams(stop_token_ids=(WORD,)), {EOS, WORD}),
        (SamplingParams(stop_token_ids=(WORD,), ignore_eos=True), {WORD}),
        (SamplingParams(ignore_eos=True), set()),
    ],
    ids=["eos", "both", "stop id", "neither"],
)
def test_end_tokens_are_the_models_and_the_requests(params, ending):
    """A token ends the output if it is a stop token of the request, or one of the model's that isn't ignored."""
    checker = StopChecker(params, {EOS})
    assert {token for token in range(10) if checker.ends(token)} == ending


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(stop_token_ids=(EOS,), ignore_eos=True)], ids=["eos", "stop id"]
)
def test_a_stop_token_ends_the_output_with_the_text_it_is_given(params):
    """An end token ends the output, even as the last allowed token, and what the decoder still held is shown."""
    checker = StopChecker(params, {EOS})
    assert checker.push(WORD, "word", 1) == ("word", None)
    assert checker.push(EOS, "\ufffd", params.max_tokens) == ("\ufffd", "stop")


def test_the_text_with_a_stop_token_is_searched_too():
    """A stop string that the decoder's last text completes is cut off as any other."""
    checker = StopChecker(SamplingParams(stop="<\ufffd"), {EOS})
    assert checker.push(WORD, "word<", 1) == ("word", None)
    assert checker.push(EOS, "\ufffd", 2) == ("", "stop")


def test_a_stop_token_releases_what_was_held():
    """Text held for a stop string that the end token cut short is shown with the end."""
    checker = StopChecker(SamplingParams(stop="<end>"), {EOS})
    assert checker.push(WORD, "x <en", 1) == ("x ", None)
    assert checker.push(EOS, "", 2) == ("<en", "stop")
    assert checker.flush() == ""


def test_ignored_end_tokens_are_text_like_any_other():
    """Under `ignore_eos` only the length limit ends the request."""
    checker = StopChecker(SamplingParams(ignore_eos=True, max_tokens=2), {EOS})
    assert checker.push(EOS, "</s>", 1) == ("</s>", None)
    assert checker.push(EOS, "</s>", 2) == ("</s>", "length")


def test_flush_gives_the_held_text_of_an_aborted_request_once():
    """A request that ends from outside still gets the text that was held back."""
    checker = StopChecker(SamplingParams(stop="<end>"), {EOS})
    checker.push(WORD, "x<e", 1)
    assert checker.flush() == "<e"
    assert checker.flush() == ""


@pytest.mark.parametrize("stop", ["a" * 999 + "b", "ab" * 499 + "c"], ids=["run", "cycle"])
@pytest.mark.parametrize("piece_length", [1, 4000])
def test_work_is_linear_in_the_text_however_long_the_stop_string(stop, piece_length):
    """Text made to provoke rescans costs at most one comparison per character and one per piece."""
    num_compared = 0

    class CountedStop(str):
        __slots__ = ()

        def startswith(self, *arguments):
            nonlocal num_compared
            num_compared += 1
            return super().startswith(*arguments)

    text = (stop[:-1] * 20)[:20_000] + "x"
    pieces = [text[i : i + piece_length] for i in range(0, len(text), piece_length)]
    released, rest, _ = run((CountedStop(stop),), pieces)
    assert "".join(released) + rest == text
    assert num_compared <= len(text) + len(pieces)
