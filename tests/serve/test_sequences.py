"""What a plan feeds and samples, without a model: logits that point at the token wanted."""

from collections.abc import Sequence

import torch
from torch import Tensor

from batchwright.policy.types import Chunk
from batchwright.serve.sampling.sampler import Sampler
from batchwright.serve.sequences import Sequences
from tests.serve.scripted import forced

VOCABULARY = 50


def chunk(request_id: str | None, start: int, num_tokens: int, padding: int = 0, *, samples: bool = False) -> Chunk:
    return Chunk(request_id, start, num_tokens, padding, samples, 0, ())


def pointing_at(tokens: Sequence[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCABULARY).float()


def prompted(*prompts: Sequence[int]) -> Sequences:
    """Requests "0", "1" and so on."""
    sequences = Sequences(Sampler(VOCABULARY, torch.device("cpu")))
    for index, prompt in enumerate(prompts):
        sequences.add(f"{index}", prompt, forced(9))
    return sequences


def test_a_feed_has_all_positions_and_the_last_of_each_row_that_samples() -> None:
    """Chunks, fillers and dead rows in the order given; rows are counted over all of them."""
    chunks = [
        chunk("0", 1, 2),
        chunk("1", 0, 2, 3, samples=True),
        chunk(None, 0, 0, 2),
        chunk("2", 4, 0, 1),
        chunk("0", 3, 1, samples=True),
    ]
    feed = prompted([1, 2, 3, 4], [5, 6]).feed(chunks)
    assert feed.tokens == [[2, 3], [5, 6, 0, 0, 0], [0, 0], [0], [4]]
    assert feed.rows == [3, 10]
    assert feed.sampling_ids == ["1", "0"]


def test_what_was_sampled_is_fed_next() -> None:
    """And a step run again overwrites it."""
    sequences = prompted([1, 2])
    prefill, decode = [chunk("0", 0, 2, samples=True)], [chunk("0", 2, 1, samples=True)]
    for token in (7, 8):
        assert sequences.feed(prefill).results(pointing_at([token]))[0].samples[0].token == token
        assert sequences.feed(decode).tokens == [[token]]


def test_a_row_in_error_leaves_something_to_feed() -> None:
    """The step planned before its error was known still has its row: it must be given an id that exists."""
    sequences = prompted([1, 2])
    (result,) = sequences.feed([chunk("0", 0, 2, samples=True)]).results(torch.full((1, VOCABULARY), torch.nan))
    assert result.samples[0].error
    assert sequences.feed([chunk("0", 2, 1, samples=True)]).tokens == [[0]]


def test_a_late_row_does_not_touch_who_has_its_id_now() -> None:
    """A request is removed while its step runs, and another of that name is added."""
    sequences = prompted([1, 2])
    late = sequences.feed([chunk("0", 0, 2, samples=True)])
    sequences.remove("0")
    sequences.add("0", [3, 4, 5, 6], forced(9))
    assert late.results(pointing_at([9]))[0].request_id == "0"
    assert sequences.feed([chunk("0", 0, 4)]).tokens == [[3, 4, 5, 6]]


def test_nothing_to_sample_has_no_results() -> None:
    """A chunk in the middle of a prompt."""
    assert prompted([1, 2]).feed([chunk("0", 0, 1)]).results(torch.empty(0, VOCABULARY)) == []
