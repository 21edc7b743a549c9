"""Several answers to one prompt: one request to its client, several to the scheduler; and what a prompt scores."""

from functools import partial

import pytest
import torch

from batchwright.errors import RequestError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.order import Queueing
from batchwright.policy.pages import Memory
from batchwright.records import Recorder
from batchwright.serve.engine import Engine
from batchwright.serve.outputs import Completion, Output
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.scripted import forced, reference_logits, tiny, tokens_of

MEMORY = Memory(60, 4, 256)
PROMPT = tokens_of(1, 21)


def engine_of(memory: Memory = MEMORY, max_requests: int | None = None) -> Engine:
    settings = ContinuousSettings(queueing=Queueing(max_requests=max_requests))
    return Engine(tiny(), lambda memory: Continuous(memory, settings), memory=memory, recorder=partial(Recorder, "run"))


def choices_of(completion: Completion) -> list[Completion]:
    return [completion, *completion.alternatives]


def mean_logprob(completion: Completion) -> float:
    return sum(logprob for logprob, _ in completion.logprobs) / len(completion.logprobs)


def test_the_first_choice_is_the_answer_that_one_alone_would_be() -> None:
    """And the others differ, from it and from what the next seed gives."""
    params = {"temperature": 1.5, "seed": 3}
    (alone,) = engine_of().generate(PROMPT, forced(12, **params))
    (several,) = engine_of().generate(PROMPT, forced(12, n=5, **params))
    (neighbour,) = engine_of().generate(PROMPT, forced(12, temperature=1.5, seed=4))
    assert several.tokens == alone.tokens
    tokens = [choice.tokens for choice in choices_of(several)]
    assert len({*tokens, neighbour.tokens}) == 6


def test_greedy_choices_are_equal_and_each_ends_once() -> None:
    """Outputs carry the index of their choice; the request ends with its last."""
    engine = engine_of()
    request_id = engine.submit(PROMPT, forced(4, n=3, temperature=1e-9))
    assert engine.num_live == 3
    outputs: list[Output] = []
    while engine.num_live:
        outputs += engine.step() or ()
    by_choice = {index: [output for output in outputs if output.choice == index] for index in range(3)}
    assert {output.request_id for output in outputs} == {request_id}
    assert all([output.finish_reason for output in own] == [None, None, None, "length"] for own in by_choice.values())
    assert len({tuple(output.token for output in own) for own in by_choice.values()}) == 1


def test_choices_share_the_pages_of_their_prompt() -> None:
    """The prompt's full pages are computed by the first alone."""
    engine = engine_of()
    engine.generate(PROMPT, forced(3, n=4, temperature=1.0, seed=0))
    requests, steps = engine.recorder.complete()
    assert sorted(request.num_cached for request in requests) == [0, 20, 20, 20]
    assert max(step.pages_held for step in steps) <= 5 + 4 * 2


@pytest.mark.parametrize("logprobs", [None, 2])
def test_best_of_hands_out_the_likeliest_at_the_end(logprobs: int | None) -> None:
    """The same as asking for all with log-probabilities, and sorting them."""
    params = {"temperature": 1.2, "seed": 5, "max_tokens": 6, "ignore_eos": True}
    (every,) = engine_of().generate(PROMPT, SamplingParams(n=6, logprobs=0, **params))
    ranked = sorted(choices_of(every), key=mean_logprob, reverse=True)
    (best,) = engine_of().generate(PROMPT, SamplingParams(n=2, best_of=6, logprobs=logprobs, **params))
    assert [choice.tokens for choice in choices_of(best)] == [choice.tokens for choice in ranked[:2]]
    assert all(len(choice.logprobs) == (0 if logprobs is None else 6) for choice in choices_of(best))

    engine = engine_of()
    outputs: list[Output] = []
    engine.submit(PROMPT, SamplingParams(n=2, best_of=6, **params), on_output=outputs.append)
    while engine.num_live:
        assert not outputs
        engine.step()
    assert [output.choice for output in outputs] == [0] * 6 + [1] * 6


def test_an_abort_ends_all_choices() -> None:
    """And their id can be used again at once."""
    engine = engine_of()
    outputs: list[Output] = []
    engine.submit(PROMPT, forced(50, n=3, temperature=1.0), request_id="a", on_output=outputs.append)
    engine.step()
    with pytest.raises(RequestError, match="that id is live"):
        engine.submit(PROMPT, request_id="a#2")
    engine.abort("a")
    assert [output.choice for output in outputs if output.finish_reason == "abort"] == [0, 1, 2]
    engine.submit(PROMPT, forced(2), request_id="a")
    while engine.num_live:
        engine.step()
    assert engine.scheduler.load.pages_held == 0


def test_all_choices_are_queued_or_none() -> None:
    """A queue with room for two takes no request for three, and keeps nothing of it."""
    engine = engine_of(max_requests=2)
    with pytest.raises(RequestError, match="2 wait, which is the limit"):
        engine.submit(PROMPT, forced(2, n=3, temperature=1.0))
    assert engine.num_live == engine.scheduler.load.num_waiting == 0
    engine.submit(PROMPT, forced(2, n=2, temperature=1.0))
    while engine.num_live:
        engine.step()
    assert len(engine.recorder.requests) == 2


def test_a_choice_does_not_take_the_id_of_a_live_request() -> None:
    """It is refused as a whole, and the other goes on."""
    engine = engine_of()
    engine.submit(PROMPT, forced(3), request_id="a#1")
    with pytest.raises(RequestError, match="id a#1 is live"):
        engine.submit(PROMPT, forced(3, n=2, temperature=1.0), request_id="a")
    while engine.num_live:
        engine.step()
    assert [(request.id, request.num_output) for request in engine.recorder.requests] == [("a#1", 3)]


def test_a_clamped_limit_below_the_least_asked_for_is_a_limit() -> None:
    """The context has room for fewer tokens than `min_tokens`."""
    engine = engine_of()
    (completion,) = engine.generate(PROMPT, SamplingParams(max_tokens=900, min_tokens=800))
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == min(256, 240) - len(PROMPT)
    assert engine.num_live == engine.scheduler.load.pages_held == 0


@pytest.mark.parametrize("calls", ["abort", "step"])
def test_a_callback_may_call_the_engine_when_a_choice_ends(calls: str) -> None:
    """Which may tell the last of the request before its own call has returned."""
    engine = engine_of()
    ends: list[int] = []

    def listen(output: Output) -> None:
        if output.finish_reason:
            ends.append(output.choice)
            engine.abort(output.request_id) if calls == "abort" else engine.step()

    engine.submit(PROMPT, forced(3, n=2, temperature=1.0), on_output=listen)
    while engine.num_live:
        engine.step()
    assert sorted(ends) == [0, 1]
    assert len(engine.recorder.requests) == 2


def test_a_wrong_arrival_leaves_nothing_behind() -> None:
    engine = engine_of()
    for arrival in ("x", float("nan")):
        with pytest.raises(RequestError, match="arrival"):
            engine.submit([1], forced(1), arrival=arrival)
    assert engine.num_live == engine.scheduler.load.num_waiting == 0
    assert engine.generate([[1, 2, 3]], forced(2))[0].finish_reason == "length"


def test_a_callback_that_raises_ends_every_choice() -> None:
    engine = engine_of()

    def refuse(output: Output) -> None:
        raise ValueError("no room")

    engine.submit(PROMPT, forced(50, n=3, temperature=1.0), on_output=refuse)
    while engine.num_live:
        engine.step()
    assert [request.finish_reason for request in engine.recorder.requests] == ["error"] * 3


# ---- log-probabilities of prompts


@pytest.mark.parametrize("budget", [7, 2048])
def test_a_prompt_scores_what_the_reference_gives_it(budget: int) -> None:
    """However it is cut, and though its pages are known already."""
    policy = partial(Continuous, settings=ContinuousSettings(token_budget=budget))
    engine = Engine(tiny(), policy, memory=MEMORY)
    engine.generate(PROMPT, forced(2))
    (completion,) = engine.generate(PROMPT, forced(2, prompt_logprobs=3))
    logprobs_TV = reference_logits(PROMPT).log_softmax(-1)
    assert len(completion.prompt_logprobs) == len(PROMPT)
    assert completion.prompt_logprobs[0] is None
    for position, scored in enumerate(completion.prompt_logprobs[1:]):
        assert scored is not None
        assert scored[0] == pytest.approx(float(logprobs_TV[position, PROMPT[position + 1]]), abs=1e-4)
        expected = logprobs_TV[position].topk(3)
        assert [token for token, _ in scored[1]] == expected.indices.tolist()
        torch.testing.assert_close(torch.tensor([one for _, one in scored[1]]), expected.values, atol=1e-4, rtol=0)


def test_a_prompt_is_scored_again_under_an_id_that_was_used_before() -> None:
    """Its pages are still known from then; they are not taken for computed."""
    engine = engine_of()
    scores = []
    for _ in range(2):
        outputs: list[Output] = []
        engine.submit(PROMPT, forced(1, prompt_logprobs=0), request_id="x", on_output=outputs.append)
        while engine.num_live:
            engine.step()
        scores.append(outputs[0].prompt_logprobs)
    assert scores[0] == scores[1]
    assert all(scores[1][1:])


def test_a_scored_prompt_survives_preemption() -> None:
    """Its pages are taken in the middle of things; the scores come once, and whole."""
    engine = Engine(tiny(), memory=Memory(12, 4, 256), recorder=partial(Recorder, "run"))
    params = [forced(14), forced(14, prompt_logprobs=0), forced(14, prompt_logprobs=0)]
    prompts = [tokens_of(seed, 9) for seed in range(3)]
    completions = engine.generate(prompts, params)
    assert sum(record.num_preempted for record in engine.recorder.requests)
    assert not completions[0].prompt_logprobs
    for prompt, completion in zip(prompts[1:], completions[1:], strict=True):
        logprobs_TV = reference_logits(prompt).log_softmax(-1)
        expected = [float(logprobs_TV[i, token]) for i, token in enumerate(prompt[1:])]
        assert [scored[0] for scored in completion.prompt_logprobs if scored] == pytest.approx(expected, abs=1e-4)


def test_several_choices_score_their_prompt_once() -> None:
    (completion,) = engine_of().generate(PROMPT, forced(2, n=3, temperature=1.0, prompt_logprobs=0))
    assert [len(choice.prompt_logprobs) for choice in choices_of(completion)] == [len(PROMPT), 0, 0]
