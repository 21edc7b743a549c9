"""The engine: every request ends once, whatever happens to it; its neighbours and the pages are unharmed."""

import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.bench.summary import summarize
from batchwright.errors import ConfigError, RequestError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.dynamic import DynamicSettings, dynamic
from batchwright.policy.order import Queueing, by_strict_priority
from batchwright.policy.pages import Memory
from batchwright.policy.static import one_by_one, static
from batchwright.policy.types import StepPlan
from batchwright.records import RequestRecord
from batchwright.serve.engine import Engine, Policy, default_memory
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.outputs import Completion, Output
from batchwright.serve.sampling.params import SamplingParams
from batchwright.testing import VirtualClock
from tests.serve.scripted import (
    PretendingExecutor,
    WatchedExecutor,
    forced,
    reference_logits,
    tiny,
    tokens_of,
    workload64,
)


def continuous(**changes: Any) -> Policy:
    return lambda memory: Continuous(memory, ContinuousSettings(**changes))


POLICIES: dict[str, Policy] = {
    "one by one": one_by_one,
    "static": lambda memory: static(memory, 8),
    "dynamic": lambda memory: dynamic(memory, DynamicSettings(max_batch_size=6, allowed_sizes=(2, 4, 6))),
    "utilization": continuous(token_budget=40, chunk_cap=11),
    "guaranteed": continuous(capacity="guaranteed", token_budget=64),
}
MEMORY = Memory(64, 4, 128)
THREE_PARTS = re.compile(r".+: .+; .+", re.DOTALL)


def real(policy: Policy = Continuous, memory: Memory = MEMORY, model: LoadedModel | None = None, **more: Any) -> Engine:
    """An engine that computes, on the tiny model."""
    return Engine(model or tiny(), policy, memory=memory, executor=WatchedExecutor, **more)


def pretending(policy: Policy = Continuous, memory: Memory = MEMORY, **more: Any) -> tuple[Engine, PretendingExecutor]:
    """An engine that computes nothing, and asserts that pages are used rightly."""
    engine = Engine(tiny(), policy, memory=memory, executor=PretendingExecutor, **more)
    assert isinstance(engine.executor, PretendingExecutor)
    return engine, engine.executor


def drain(engine: Engine) -> list[Output]:
    """Step until nothing is live."""
    engine.flush()
    outputs: list[Output] = []
    while engine.num_live:
        outputs += engine.step() or ()
    return outputs


def is_empty(engine: Engine) -> bool:
    """Nobody is left, and all pages are free."""
    load = engine.scheduler.load
    counts = (load.num_waiting, load.num_running, load.pages_held, load.tokens_stored, load.num_in_flight)
    return not any(counts) and not engine.num_live


def ends(engine: Engine) -> dict[str, str]:
    """Finish reasons by id; a request with two records would not be told apart, so their number is checked."""
    records = engine.recorder.requests
    assert len({record.id for record in records}) == len(records)
    return {record.id: record.finish_reason for record in records}


def mixed_prompts() -> list[list[int]]:
    """Sixteen, of 1 to 61 tokens, four of which begin alike."""
    prefix = tokens_of(99, 19)
    return [tokens_of(seed, 1 + 4 * seed) for seed in range(12)] + [prefix + tokens_of(seed, seed) for seed in range(4)]


# ---- what comes out


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_references_tokens(policy: str) -> None:
    """Sixteen requests of mixed lengths: logits within 1e-4 of transformers, and its greedy tokens, in any batching."""
    engine = real(POLICIES[policy])
    prompts, limits = mixed_prompts(), [3 + 5 * index % 17 for index in range(16)]
    completions = engine.generate(prompts, [forced(limit) for limit in limits])
    sequences = {}
    for prompt, limit, completion in zip(prompts, limits, completions, strict=True):
        assert (completion.finish_reason, len(completion.tokens)) == ("length", limit)
        tokens = [*prompt, *completion.tokens]
        sequences[completion.request_id] = tokens
        expected = reference_logits(tokens)[len(prompt) - 1 : -1].argmax(-1)
        assert list(completion.tokens) == expected.tolist()
    assert engine.executor.worst(sequences) < 1e-4
    assert is_empty(engine)


def test_a_pool_that_is_too_small_preempts_and_loses_nothing() -> None:
    """Requests that outgrow nine pages together are preempted and resumed, with the logits of one undisturbed pass."""
    engine = real(POLICIES["utilization"], Memory(9, 4, 128))
    prompts = [tokens_of(seed, 5 + seed) for seed in range(8)]
    completions = engine.generate(prompts, forced(20))
    assert sum(record.num_preempted for record in engine.recorder.requests) >= 3
    pairs = zip(prompts, completions, strict=True)
    sequences = {completion.request_id: [*prompt, *completion.tokens] for prompt, completion in pairs}
    assert {len(tokens) for tokens in sequences.values()} == set(range(25, 33))
    assert engine.executor.worst(sequences) < 1e-4
    assert is_empty(engine)


def test_a_cached_prefix_gives_the_same_logits() -> None:
    """The second of two equal prompts computes only its last page, and a follow-up reuses outputs as well."""
    engine = real()
    prompt = tokens_of(1, 30)
    first, second = (engine.generate([prompt], forced(9))[0] for _ in range(2))
    follow_up = [*prompt, *first.tokens]
    third = engine.generate([follow_up], forced(3))[0]
    assert [record.num_cached for record in engine.recorder.requests] == [0, 28, 36]
    assert first.tokens == second.tokens
    sequences = {each.request_id: [*prompt, *each.tokens] for each in (first, second)}
    assert engine.executor.worst(sequences | {third.request_id: [*follow_up, *third.tokens]}) < 1e-4


@settings(max_examples=15)
@given(st.integers(3, 40), st.integers(1, 5), st.integers(2, 30), st.data())
def test_tokens_do_not_depend_on_pool_or_company(
    num_pages: int, page_size: int, token_budget: int, data: st.DataObject
) -> None:
    """Drawn tokens are those of a request run alone: no pool, page size, budget or neighbour has a say."""
    room = num_pages * page_size
    memory = Memory(num_pages, page_size, 128)
    lengths = data.draw(st.lists(st.integers(1, min(30, room - 1)), min_size=1, max_size=6))
    prompts = [tokens_of(seed, length) for seed, length in enumerate(lengths)]
    params = [
        SamplingParams(max_tokens=min(10, room - length), temperature=0.9, top_k=40, top_p=0.95, seed=length)
        for length in lengths
    ]
    engine = real(continuous(token_budget=token_budget), memory)
    together = engine.generate(prompts, params)
    alone = [real().generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert is_empty(engine)


def test_seeds_repeat_and_differ() -> None:
    """The same seed gives the same tokens, in company or not; another seed gives others."""
    drawn = [SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in (1, 2, 1)]
    one, other, again = real().generate([tokens_of(0, 9)] * 3, drawn)
    assert one.tokens == again.tokens != other.tokens
    assert real().generate([tokens_of(0, 9)], drawn[0])[0].tokens == one.tokens


def test_logprobs_are_the_models_own() -> None:
    """Each token comes with its log-probability and the likeliest alternatives, within 1e-4 of the reference."""
    prompt = tokens_of(3, 8)
    completion, plain = real().generate([prompt, prompt], [forced(6, logprobs=5), forced(6)])
    expected_TV = reference_logits([*prompt, *completion.tokens])[7:-1].log_softmax(-1)
    assert len(completion.logprobs) == 6 and plain.logprobs == ()
    for (logprob, top), token, expected_V in zip(completion.logprobs, completion.tokens, expected_TV, strict=True):
        assert abs(logprob - float(expected_V[token])) < 1e-4
        assert [alternative for alternative, _ in top] == expected_V.topk(5).indices.tolist()
        assert max(abs(value - float(expected_V[alternative])) for alternative, value in top) < 1e-4


def test_stop_token_ids_end_a_request_with_that_token() -> None:
    """The token is reported, the reason is `stop`, and what follows is not computed."""
    free = real().generate([tokens_of(2, 7)], forced(10))[0]
    stop = free.tokens[4]
    stopped = real().generate([tokens_of(2, 7)], SamplingParams(max_tokens=10, stop_token_ids=(stop,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_max_tokens_is_cut_to_the_context_and_to_the_pool() -> None:
    """Whichever is smaller ends the request with `length`, its last token in the last place."""
    for memory in (Memory(64, 4, 20), Memory(5, 4, 128)):
        engine = real(memory=memory)
        (completion,) = engine.generate([tokens_of(0, 15)], forced(99))
        assert (completion.finish_reason, len(completion.tokens)) == ("length", 5)
        assert engine.recorder.requests[0].max_tokens == 5
        assert is_empty(engine)


def test_completions_are_in_the_order_of_the_prompts_refused_ones_included() -> None:
    """A prompt that cannot run has its completion too, with a three-part error; the others run."""
    engine = real(memory=Memory(64, 4, 40))
    prompts = [tokens_of(0, 30), [], tokens_of(1, 3), tokens_of(2, 40), tokens_of(3, 39)]
    completions = engine.generate(prompts, [forced(n) for n in (9, 1, 2, 1, 7)])
    assert [each.finish_reason for each in completions] == ["length", "refused", "length", "refused", "length"]
    assert [len(each.tokens) for each in completions] == [9, 0, 2, 0, 1]
    assert all(THREE_PARTS.fullmatch(each.error) for each in completions if each.error)
    assert sum(each.error is not None for each in completions) == 2
    assert len(ends(engine)) == 3


def test_nothing_to_generate_is_fine() -> None:
    """No prompts, no completions."""
    assert real().generate([]) == []


def test_params_are_one_for_all_or_one_each() -> None:
    """Any other number is refused before anything runs."""
    engine = real()
    with pytest.raises(ConfigError, match="3 prompts: there are 2 sampling params; give one"):
        engine.generate([[1], [2], [3]], [forced(1)] * 2)
    assert is_empty(engine)


# ---- streams


def test_a_stream_interleaves_requests_and_says_when_each_ends() -> None:
    """Tokens come as steps bring them; the last output of each request, and no other, has its reason."""
    engine = real()
    outputs = list(engine.stream([tokens_of(0, 5), [], tokens_of(1, 9)], [forced(3), forced(1), forced(5)]))
    by_id: dict[str, list[Output]] = {}
    for output in outputs:
        by_id.setdefault(output.request_id, []).append(output)
    reasons = {request_id: [each.finish_reason for each in theirs] for request_id, theirs in by_id.items()}
    assert reasons == {
        "request-0": [None, None, "length"],
        "request-1": ["refused"],
        "request-2": [None, None, None, None, "length"],
    }
    order = [output.request_id for output in outputs if output.token is not None]
    assert order[:6].count("request-0") == 3 and order[-2:] == ["request-2"] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_closing_a_stream_aborts_the_rest_and_frees_all_pages(policy: str) -> None:
    """After a few outputs the client leaves: nothing is live, nothing is held, each request has one record."""
    engine = real(POLICIES[policy])
    stream = engine.stream([tokens_of(seed, 9) for seed in range(10)], forced(8))
    for _ in range(9):
        next(stream)
    stream.close()
    assert is_empty(engine)
    assert len(ends(engine)) == 10
    assert "abort" in ends(engine).values()
    assert [len(each.tokens) for each in engine.generate([[1, 2]] * 3, forced(4))] == [4, 4, 4]


def test_two_streams_at_once_each_get_their_own() -> None:
    """Whichever of them steps the engine, neither loses an output of the other."""
    prompts = [[tokens_of(seed, 6) for seed in seeds] for seeds in ((0, 1), (2, 3, 4))]
    engine = real()
    streams = [engine.stream(its_prompts, forced(9)) for its_prompts in prompts]
    tokens: dict[str, list[int]] = {}
    while streams:
        for stream in list(streams):
            output = next(stream, None)
            if output is None:
                streams.remove(stream)
            elif output.token is not None:
                tokens.setdefault(output.request_id, []).append(output.token)
    expected = [list(each.tokens) for each in real().generate(prompts[0] + prompts[1], forced(9))]
    assert sorted(tokens.values()) == sorted(expected)


# ---- endings that are nobody's fault


def test_an_aborted_request_ends_now() -> None:
    """It gets no further token, its pages return, unknown and ended ids are ignored, and the others go on."""
    engine = real()
    kept, dropped = engine.submit(tokens_of(0, 9), forced(6)), engine.submit(tokens_of(1, 9), forced(6))
    engine.step()
    for request_id in (dropped, dropped, "nobody"):
        engine.abort(request_id)
    outputs = drain(engine)
    assert [output.finish_reason for output in outputs if output.request_id == dropped] == ["abort"]
    assert ends(engine) == {dropped: "abort", kept: "length"}
    assert sum(output.token is not None for output in outputs if output.request_id == kept) == 5
    assert is_empty(engine)


def test_deadlines_end_requests_that_run_and_requests_that_wait() -> None:
    """Each ends at its own deadline with what it has; `wakeup` says when the next one is due."""
    clock = VirtualClock()
    engine, _ = pretending(one_by_one, clock=clock.now)
    engine.submit([1, 2, 3], forced(50), request_id="runs", deadline=10.0)
    engine.submit([1, 2, 3], forced(50), request_id="waits", deadline=5.0)
    engine.submit([1, 2, 3], forced(2), request_id="patient")
    assert [output.request_id for output in engine.step() or ()] == ["runs"]
    assert engine.wakeup() == 5.0
    clock.advance_to(5.0)
    assert Output("waits", None, "", "deadline") in (engine.step() or ())
    clock.advance_to(10.0)
    assert Output("runs", None, "", "deadline") in (engine.step() or ())
    drain(engine)
    assert ends(engine) == {"waits": "deadline", "runs": "deadline", "patient": "length"}
    assert {record.id: record.num_output for record in engine.recorder.requests}["runs"] == 2
    assert is_empty(engine)


def test_a_queue_timeout_ends_only_requests_that_never_ran() -> None:
    """Who waits too long is dropped; who has started is not."""
    clock = VirtualClock()
    engine, _ = pretending(one_by_one, clock=clock.now)
    engine.submit([1], forced(5), request_id="runs", queue_timeout=1.0)
    engine.submit([1], forced(5), request_id="waits", queue_timeout=1.0)
    engine.step()
    clock.advance_to(2.0)
    drain(engine)
    assert ends(engine) == {"waits": "queue_timeout", "runs": "length"}
    assert is_empty(engine)


def test_priorities_reach_the_scheduler() -> None:
    """The lower number goes first, though it came last."""
    strict = Queueing(order=by_strict_priority)
    engine, _ = pretending(lambda memory: one_by_one(memory, strict))
    for priority in (2, 0, 1):
        engine.submit([1], forced(1), request_id=f"{priority}", priority=priority)
    drain(engine)
    assert list(ends(engine)) == ["0", "1", "2"]


def test_a_full_queue_refuses_in_three_parts() -> None:
    """The limit is in the message; nothing of the request remains."""
    engine, _ = pretending(lambda memory: static(memory, 4, Queueing(max_requests=1)))
    engine.submit([1], forced(1))
    with pytest.raises(RequestError, match="queue one more request: 1 wait, which is the limit; try again later"):
        engine.submit([1], forced(1))
    drain(engine)
    assert len(ends(engine)) == 1


def test_static_batches_wait_for_company_until_flushed() -> None:
    """Without a flush nothing runs and nothing is awaited; `step` says so with None."""
    engine, _ = pretending(POLICIES["static"])
    engine.submit([1], forced(1))
    assert engine.step() is None
    assert engine.wakeup() is None
    assert len(drain(engine)) == 1


# ---- callbacks


class Clumsy(Exception):
    pass


@pytest.mark.parametrize("fails_at", [1, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_callback_that_raises_ends_its_request_alone(policy: str, fails_at: int) -> None:
    """At its first, a middle and its very last output: one record, one last output, in three parts; pages return."""
    engine = real(POLICIES[policy])
    seen: list[Output] = []

    def on_output(output: Output) -> None:
        seen.append(output)
        if len(seen) == fails_at:
            raise Clumsy("no room on disk")

    bad = engine.submit(tokens_of(0, 9), forced(5), on_output=on_output)
    good = engine.submit(tokens_of(1, 7), forced(5))
    outputs = drain(engine)
    assert ends(engine) == {bad: "error", good: "length"}
    last = [output for output in outputs if output.request_id == bad and output.finish_reason]
    assert [each.finish_reason for each in last] == ["error"]
    assert outputs.index(last[0]) == max(i for i, output in enumerate(outputs) if output.request_id == bad)
    assert last[0].error and THREE_PARTS.fullmatch(last[0].error) and "Clumsy: no room on disk" in last[0].error
    assert len(seen) == fails_at
    assert is_empty(engine)
    assert real().generate([tokens_of(1, 7)], forced(5))[0].tokens == tuple(
        output.token for output in outputs if output.request_id == good
    )


@pytest.mark.parametrize("at", [1, 5])
def test_a_callback_may_abort_its_own_request(at: int) -> None:
    """In the middle it ends with `abort`, after the output that it was told of; at the last output it has ended."""
    engine = real()
    seen: list[Output] = []

    def on_output(output: Output) -> None:
        seen.append(output)
        if len(seen) == at:
            engine.abort(output.request_id)

    request_id = engine.submit(tokens_of(0, 9), forced(5), on_output=on_output)
    assert drain(engine) == []  # its callback alone is told
    assert [output.finish_reason for output in seen] == [None] * (len(seen) - 1) + ["abort" if at == 1 else "length"]
    assert ends(engine) == {request_id: "abort" if at == 1 else "length"}
    assert is_empty(engine)


def test_a_callback_may_abort_and_submit_others() -> None:
    """Neighbours in the same step, before and behind it, end at once; a new request runs."""
    engine = real()
    ids = ["before", "caller", "behind"]

    def on_output(output: Output) -> None:
        if engine.num_live == 3:
            engine.abort("before")
            engine.abort("behind")
            engine.submit(tokens_of(5, 4), forced(2), request_id="new")

    for index, request_id in enumerate(ids):
        prompt = tokens_of(index, 6)
        engine.submit(prompt, forced(4), request_id=request_id, on_output=on_output if request_id == "caller" else None)
    drain(engine)
    assert ends(engine) == {"before": "abort", "behind": "abort", "caller": "length", "new": "length"}
    assert is_empty(engine)


def test_requests_dropped_together_may_abort_one_another() -> None:
    """Two deadlines pass at once, and each one's callback aborts the other: both have ended already, once."""
    clock = VirtualClock()
    engine, _ = pretending(clock=clock.now)
    for request_id, other in (("a", "b"), ("b", "a")):
        engine.submit([1], forced(9), request_id=request_id, deadline=1.0, on_output=lambda _, o=other: engine.abort(o))
    clock.advance_to(1.0)
    engine.step()
    assert ends(engine) == {"a": "deadline", "b": "deadline"}
    assert is_empty(engine)


# ---- bad input


@pytest.mark.parametrize(
    "prompt, fact",
    [
        ([], "its prompt is empty"),
        (list(range(97)) * 2, "it needs a context of 195, the limit is 128"),
        ([97], "holds 97; token ids are integers from 0 to 96"),
        ([3, -1], "holds -1"),
        ([2.0], "holds 2.0"),
        ([True], "holds True"),
        ([None], "holds None"),
        ("text", "tiny has no tokenizer"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_in_three_parts(prompt: Any, fact: str) -> None:
    """What was asked, what is true with the numbers, what to do; and there is no trace of it in the engine."""
    engine = real()
    with pytest.raises(RequestError) as caught:
        engine.submit(prompt, forced(1))
    assert fact in str(caught.value)
    assert caught.value.asked and caught.value.fact and caught.value.remedy
    assert is_empty(engine)
    assert engine.recorder.requests == []


def test_a_prompt_over_the_pool_is_refused_with_its_pages() -> None:
    """The pages it needs, the pages there are, and the remedy."""
    engine = real(memory=Memory(5, 4, 128))
    with pytest.raises(RequestError) as caught:
        engine.submit(tokens_of(0, 20), forced(1))
    assert caught.value.fact == "with one output token it needs 6 pages of 4, the pool has 5"
    assert caught.value.remedy == "shorten the prompt or raise num_pages"
    assert len(engine.generate([tokens_of(0, 19)], forced(9))[0].tokens) == 1


@pytest.mark.parametrize("max_tokens", [0, -1, True, 2.5])
def test_max_tokens_must_be_a_positive_number(max_tokens: Any) -> None:
    """The params themselves refuse it, so no engine ever sees it."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(max_tokens=max_tokens)
    assert "max_tokens" in caught.value.asked and "at least 1" in caught.value.remedy


def test_an_id_that_is_live_is_refused() -> None:
    """And the one that has it is unharmed."""
    engine = real()
    engine.submit([1, 2], forced(2), request_id="a")
    with pytest.raises(RequestError, match="that id is live; use another id"):
        engine.submit([3, 4], forced(2), request_id="a")
    drain(engine)
    assert ends(engine) == {"a": "length"}


def test_an_id_may_be_empty() -> None:
    """It is text like any other."""
    engine = real()
    assert engine.submit([1, 2], forced(3), request_id="") == ""
    assert [output.request_id for output in drain(engine)] == [""] * 3


def test_dtype_and_device_of_a_loaded_model_are_settled() -> None:
    """Giving them again would have no effect, which is an error."""
    with pytest.raises(ConfigError, match="loaded already"):
        Engine(tiny(), dtype=torch.float32)


@pytest.mark.parametrize("policy", POLICIES)
def test_non_finite_logits_end_their_request_and_no_other(policy: str) -> None:
    """Beside a poisoned prompt the others' tokens are a clean run's, and its pages give clean results afterwards."""
    poisoned = tiny(poison=96)
    prompts = [[token for token in tokens_of(seed, 5 + 3 * seed) if token != 96] for seed in range(5)]
    bad = [*prompts[3][:4], 96, *prompts[3][4:]]
    memory = Memory(40, 4, 128)
    clean = real(POLICIES[policy], memory).generate(prompts, forced(7))
    assert not any(96 in each.tokens for each in clean)
    engine = real(POLICIES[policy], memory, poisoned)
    *others, error = engine.generate([*prompts, bad], forced(7))
    assert [each.tokens for each in others] == [each.tokens for each in clean]
    assert (error.finish_reason, error.tokens) == ("error", ())
    assert error.error and THREE_PARTS.fullmatch(error.error) and "NaN" in error.error
    assert is_empty(engine)
    for _ in range(3):
        assert [each.tokens for each in engine.generate(prompts, forced(7))] == [each.tokens for each in clean]


# ---- steps that fail


@pytest.mark.parametrize("policy", POLICIES)
def test_running_out_of_memory_shrinks_the_step_and_everybody_finishes(policy: str) -> None:
    """Steps above 24 positions fail; after smaller ones every request has all its tokens."""
    engine, executor = pretending(POLICIES[policy])
    executor.fake.max_positions = 24
    completions = engine.generate([tokens_of(seed, 12) for seed in range(9)], forced(5))
    assert [(each.finish_reason, len(each.tokens)) for each in completions] == [("length", 5)] * 9
    failed = [step.failed for step in engine.recorder.steps if step.failed]
    assert set(failed) == ({"oom"} if policy != "one by one" else set())
    assert is_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_breaks_every_step_errs_alone(policy: str) -> None:
    """It is found by halving, and ends with the reason in three parts; the others have all their tokens."""
    engine, executor = pretending(POLICIES[policy])
    executor.fake.poison = {"request-3"}
    completions = engine.generate([tokens_of(seed, 6) for seed in range(8)], forced(5))
    bad = completions.pop(3)
    assert (bad.finish_reason, bad.tokens) == ("error", ())
    assert bad.error is not None and THREE_PARTS.fullmatch(bad.error) and "a step broke" in bad.error
    assert [(each.finish_reason, each.tokens) for each in completions] == [("length", (1, 2, 3, 4, 5))] * 7
    assert sum(step.failed is not None for step in engine.recorder.steps) <= 1 + 2 * 3
    assert is_empty(engine)


def test_a_row_that_errs_ends_its_request_with_the_executors_reason() -> None:
    """An error of one row is no failure of the step."""
    engine, executor = pretending()
    executor.errors["request-1"] = "look at row 1: it is bad; send another"
    fine, bad = engine.generate([[1], [2]], forced(3))
    assert (fine.finish_reason, bad.finish_reason, bad.error) == ("length", "error", executor.errors["request-1"])
    assert not [step for step in engine.recorder.steps if step.failed]
    assert is_empty(engine)


def exhausted() -> None:
    torch.empty(1 << 50)


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "fail, outcome",
    [
        (exhausted, "oom"),
        (raising(torch.OutOfMemoryError("CUDA out of memory")), "oom"),
        (raising(MemoryError()), "oom"),
        (raising(RuntimeError("shapes differ")), "exception"),
    ],
    ids=["cpu", "cuda", "python", "other"],
)
def test_a_step_that_fails_once_is_run_again(fail: Callable[[], None], outcome: str) -> None:
    """Out of memory, in whatever words, or another error: recorded as such, and no token is lost or doubled."""
    engine, executor = pretending()
    steps = count()
    executor.hook = lambda plan: fail() if next(steps) == 2 else None
    completions = engine.generate([[1, 2], [3, 4]], forced(4))
    assert [each.tokens for each in completions] == [(1, 2, 3, 4)] * 2
    assert [step.failed for step in engine.recorder.steps if step.failed] == [outcome]
    assert is_empty(engine)


def test_a_request_that_is_too_big_even_alone_ends_in_error() -> None:
    """Where one position runs out of memory, the request is given up, with a remedy; others still run."""
    engine, executor = pretending()

    def hook(plan: StepPlan) -> None:
        if any(chunk.request_id == "big" for chunk in plan.chunks):
            raise MemoryError("too big")

    executor.hook = hook
    engine.submit(tokens_of(0, 9), forced(3), request_id="big")
    engine.submit(tokens_of(1, 9), forced(3), request_id="small")
    (error,) = [output.error for output in drain(engine) if output.error]
    assert THREE_PARTS.fullmatch(error) and "too big" in error and "free memory" in error
    assert ends(engine) == {"big": "error", "small": "length"}
    assert is_empty(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), AssertionError("a bug"), IndexError("ours")])
def test_an_interrupt_or_a_bug_passes_through_and_leaves_the_engine_usable(error: BaseException) -> None:
    """It reaches the caller; the stream it ended has aborted its requests, and all pages are back."""
    engine, executor = pretending()
    steps = count()
    executor.hook = lambda plan: raising(error)() if next(steps) == 3 else None
    with pytest.raises(type(error)):
        engine.generate([tokens_of(seed, 9) for seed in range(4)], forced(9))
    assert is_empty(engine)
    assert set(ends(engine).values()) == {"abort"}
    assert engine.generate([[1, 2]], forced(3))[0].tokens == (1, 2, 3)


# ---- records


@pytest.mark.parametrize("policy", POLICIES)
def test_records_add_up(policy: str) -> None:
    """One record per request; rows of the steps compute each position and sample each token that was reported."""
    engine = real(POLICIES[policy], memory := Memory(400, 4, 128))
    prompts, limits = mixed_prompts(), list(range(1, 17))
    completions = engine.generate(prompts, [forced(limit) for limit in limits])
    records = {record.id: record for record in engine.recorder.requests}
    assert list(records) and len(records) == len(engine.recorder.requests) == 16
    for prompt, completion in zip(prompts, completions, strict=True):
        record = records[completion.request_id]
        assert (record.num_prompt, record.num_output) == (len(prompt), len(completion.tokens))
        _assert_times_are_in_order(record)
        rows = [row for step in engine.recorder.steps for row in step.rows if row.request_id == record.id]
        computed = record.num_prompt + record.num_output - 1 - record.num_cached
        assert sum(row.num_tokens for row in rows) == computed
        assert sum(row.samples for row in rows) == record.num_output
    assert summarize(engine.recorder.requests, engine.recorder.steps).num_completed == 16
    assert all(step.pages_held <= step.pages_total == memory.num_pages for step in engine.recorder.steps)


def _assert_times_are_in_order(record: RequestRecord) -> None:
    assert record.started is not None
    moments = [record.arrival, record.started, *record.token_times, record.finished]
    assert moments == sorted(moments)
    assert len(record.token_times) == record.num_output


def test_an_arrival_before_its_submission_counts_from_then() -> None:
    """Time spent before the engine heard of a request is part of its latency."""
    clock = VirtualClock(100.0)
    engine, _ = pretending(clock=clock.now)
    clock.advance_to(103.0)
    engine.submit([1], forced(1), arrival=102.0)
    drain(engine)
    (record,) = engine.recorder.requests
    assert (record.arrival, record.started, record.finished) == (2.0, 3.0, 3.0)


# ---- lean


def pretend_workload64(memory: Memory, **changes: Any) -> tuple[Engine, list[Completion]]:
    engine, _ = pretending(continuous(**changes), memory)
    jobs = workload64()
    params = [forced(job.num_output) for job in jobs]
    return engine, engine.generate([[token % 97 for token in job.prompt] for job in jobs], params)


@pytest.mark.parametrize("page_size, most", [(16, 0.055), (8, 0.03)])
def test_pages_are_nearly_full_on_the_workload(page_size: int, most: float) -> None:
    """Tokens that fit into the pages held, minus tokens stored: at most 5.5% with pages of 16 and 3% with 8."""
    engine, completions = pretend_workload64(Memory(16384 // page_size, page_size, 2048))
    waste = summarize(engine.recorder.requests, engine.recorder.steps).kv_waste
    assert [len(each.tokens) for each in completions] == [job.num_output for job in workload64()]
    assert waste is not None and waste <= most


@pytest.mark.parametrize("capacity", ["utilization", "guaranteed"])
@pytest.mark.parametrize("num_pages", [40, 44, 64])
def test_a_pool_too_small_for_the_workload_finishes_everything(capacity: str, num_pages: int) -> None:
    """The longest request alone needs 39 pages of 16: all 64 finish, by preemption or by waiting, token for token."""
    engine, completions = pretend_workload64(Memory(num_pages, 16, 2048), capacity=capacity)
    assert [each.tokens for each in completions] == [tuple(range(1, job.num_output + 1)) for job in workload64()]
    num_preempted = sum(record.num_preempted for record in engine.recorder.requests)
    assert (num_preempted > 0) == (capacity == "utilization")
    assert is_empty(engine)


# ---- text, on a model that has some


@pytest.fixture(scope="module")
def talking() -> Engine:
    """The embedded model as the engine loads it by default: bfloat16 and 1 GiB of pages."""
    return Engine()


FRANCE = "What is the capital of France?"


def chat(engine: Engine, **params: Any) -> Completion:
    return engine.chat([{"role": "user", "content": FRANCE}], SamplingParams(max_tokens=20, **params))


def test_a_chat_is_answered_through_the_models_template(talking: Engine) -> None:
    """The end token ends the answer and is not part of its text."""
    answer = chat(talking)
    assert (answer.text, answer.finish_reason) == ("The capital of France is Paris.", "stop")
    assert answer.tokens[-1] in talking.model.eos_ids


def test_ignoring_the_end_token_goes_on_to_the_limit(talking: Engine) -> None:
    """All of `max_tokens` come, beginning with the same answer."""
    answer = chat(talking, ignore_eos=True)
    assert (len(answer.tokens), answer.finish_reason) == (20, "length")
    assert answer.text.startswith("The capital of France is Paris.")


def test_a_stop_string_ends_the_text_before_itself(talking: Engine) -> None:
    """No part of it is ever shown, though its tokens were computed."""
    prompt = talking.chat_prompt([{"role": "user", "content": FRANCE}])
    texts = [output.text for output in talking.stream([prompt], SamplingParams(max_tokens=20, stop="France is"))]
    assert "".join(texts) == "The capital of "
    assert chat(talking, stop=("nowhere", " Par")).text == "The capital of France is"


def test_text_prompts_are_encoded_and_text_comes_back(talking: Engine) -> None:
    """The texts of a stream joined are the decoded tokens."""
    (completion,) = talking.generate(["def add(a, b):\n    return"], forced(8))
    assert completion.text == talking.model.tokenizer.decode(completion.tokens)


def test_memory_is_one_gibibyte_by_default(talking: Engine) -> None:
    """As many pages as that buys, and the model's own context."""
    model = talking.model
    assert talking.memory == default_memory(model) == Memory((1 << 30) // (16 * 23040), 16, 8192)
    assert talking.executor.kv.num_bytes <= (1 << 30) + 16 * 23040


# ---- prompts as people give them


def test_one_prompt_need_not_be_in_a_list() -> None:
    """A flat list of token ids is one prompt; so is a text, which is not taken apart into letters."""
    engine = real()
    assert len(engine.generate([5, 6, 7], forced(2))) == 1
    (refused,) = engine.generate("text", forced(2))
    assert refused.finish_reason == "refused"


def test_requests_without_a_seed_draw_differently_and_reproducibly() -> None:
    """The same prompt eight times gives different answers, and a new engine gives the same eight."""
    params = forced(6, temperature=1.0)
    first, again = ([one.tokens for one in real().generate([[3, 4, 5]] * 8, params)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 4


class _Holding:
    """A decoder that knows its text only at the end, as one for byte tokens may."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token_id: int) -> str:
        self.held += f"<{token_id}>"
        return ""

    def finish(self) -> str:
        held, self.held = self.held, ""
        return held


class _HoldingTokenizer:
    def stream(self, *, skip_special_tokens: bool) -> _Holding:
        assert skip_special_tokens
        return _Holding()


@pytest.mark.parametrize("ending", ["length", "stop", "abort"])
def test_text_that_the_decoder_still_holds_is_handed_out_at_the_end(ending: str) -> None:
    """Whatever ends the request; the stop token's own text is not part of it."""
    model = replace(tiny(), tokenizer=_HoldingTokenizer())
    plain = Engine(tiny()).generate([[3, 4, 5]], forced(4))[0].tokens
    engine = Engine(model)
    stop_ids = (plain[2],) if ending == "stop" else ()
    request_id = engine.submit([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True, stop_token_ids=stop_ids))
    outputs: list[Output] = []
    while engine.num_live:
        if ending == "abort" and len(outputs) == 2:
            engine.abort(request_id)
        outputs += engine.step() or []
    shown = {"length": plain, "stop": plain[: plain.index(plain[2])], "abort": plain[:2]}[ending]
    assert "".join(output.text for output in outputs) == "".join(f"<{token}>" for token in shown)
    assert outputs[-1].finish_reason == ending


@pytest.mark.parametrize(
    "prompts, kind",
    [({"prompt": "Once"}, "dict"), (b"abc", "bytes"), (5, "int"), (None, "NoneType"), (torch.tensor(3), "Tensor")],
)
def test_what_is_no_prompt_is_refused_by_name(prompts: Any, kind: str) -> None:
    """A mapping, bytes or a number is not taken apart into something that happens to run."""
    with pytest.raises(ConfigError, match=kind):
        real().generate(prompts, forced(2))


def test_arrays_and_mappings_inside_a_list() -> None:
    """A tensor of ids is a prompt like any other; a mapping is refused alone."""
    tensor, mapping = real().generate([torch.tensor([5, 6, 7]), {"prompt": "Hi"}], forced(2))
    assert tensor.tokens == real().generate([5, 6, 7], forced(2))[0].tokens
    assert mapping.finish_reason == "refused"
    assert "dict is neither text nor token ids" in str(mapping.error)


def test_params_and_policies_of_the_wrong_kind_are_refused() -> None:
    """With what to give instead."""
    with pytest.raises(ConfigError, match=r"no SamplingParams; use SamplingParams\("):
        real().generate([[1], [2]], [{"max_tokens": 3}, None])
    policy: Any = "static"
    with pytest.raises(ConfigError, match="lambda memory: static"):
        Engine(tiny(), policy)


def test_threads_may_share_an_engine() -> None:
    """Six threads generate at once: each gets what it would get alone, and their requests share batches."""
    prompts = [tokens_of(index, 5 + index) for index in range(6)]
    alone = [real().generate([prompt], forced(12))[0].tokens for prompt in prompts]
    engine = real()
    together: dict[int, tuple[int, ...]] = {}
    start = threading.Barrier(len(prompts))

    def run(index: int) -> None:
        start.wait()
        together[index] = engine.generate([prompts[index]], forced(12))[0].tokens

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[index] for index in range(len(prompts))] == alone
    assert is_empty(engine)


def test_a_stream_leaves_other_requests_outputs_to_step() -> None:
    """What was submitted without a callback is still there after somebody generated in between."""
    engine = real()
    engine.submit([1, 2, 3], forced(2), request_id="mine")
    engine.generate([[4, 5]], forced(6))
    assert engine.num_live == 0
    assert [output.request_id for output in engine.step() or ()] == ["mine", "mine"]


# ---- what broke it once


def test_an_id_is_free_again_only_after_its_last_output() -> None:
    """A callback that reuses its own id at its end is told so; the next request may have it."""
    engine = real()
    errors: list[str] = []

    def on_output(output: Output) -> None:
        if output.finish_reason:
            with pytest.raises(RequestError, match="that id is live") as caught:
                engine.submit([1, 2], forced(1), request_id=output.request_id)
            errors.append(str(caught.value))

    for _ in range(2):
        engine.submit([1, 2], forced(2), request_id="a", on_output=on_output)
        drain(engine)
    assert len(errors) == 2
    assert [record.finish_reason for record in engine.recorder.requests] == ["length", "length"]


@pytest.mark.parametrize("policy", [one_by_one, lambda memory: static(memory, 3), Continuous])
@pytest.mark.parametrize("at", range(2, 40))
def test_an_interrupt_anywhere_leaves_a_usable_engine(policy: Policy, at: int) -> None:
    """Ctrl-C at the n-th look at the clock: no page is lost, and what runs afterwards ends."""
    looks = count(1)

    def clock() -> float:
        number = next(looks)
        if number == at:
            signal.raise_signal(signal.SIGINT)
        return float(number)

    engine, _ = pretending(policy, clock=clock)
    while next(looks) <= at:
        with suppress(KeyboardInterrupt):
            engine.generate([[1, 2, 3], [4, 5]], forced(3))
    assert is_empty(engine)
    assert [one.finish_reason for one in engine.generate([[1], [2]], forced(2))] == ["length"] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": float("nan")},
        {"priority": 10**400},
        {"priority": "high"},
        {"priority": None},
        {"deadline": float("nan")},
        {"deadline": 10**400},
        {"deadline": "soon"},
        {"queue_timeout": float("inf")},
        {"request_id": 7},
        {"request_id": "\ud800"},
    ],
)
@pytest.mark.parametrize("policy", [lambda memory: dynamic(memory, DynamicSettings(4)), Continuous])
def test_a_number_that_is_none_is_refused_before_it_is_compared(policy: Policy, wrong: dict[str, Any]) -> None:
    """In three parts, and without a trace of the request."""
    engine = real(policy)
    with pytest.raises(RequestError):
        engine.submit([1, 2], forced(2), **wrong)
    assert is_empty(engine)
    assert engine.generate([[1, 2]], forced(2))[0].finish_reason == "length"


def test_a_callback_may_wait_for_a_thread_that_submits() -> None:
    """Outputs are delivered without holding the engine."""
    engine = real()

    def on_output(output: Output) -> None:
        if output.finish_reason is None:
            thread = threading.Thread(target=engine.submit, args=([4, 5], forced(1)))
            thread.start()
            thread.join(timeout=30)
            assert not thread.is_alive()

    engine.submit([1, 2, 3], forced(2), on_output=on_output)
    drain(engine)
    assert sorted(record.finish_reason for record in engine.recorder.requests) == ["length", "length"]


def test_half_a_surrogate_pair_is_refused_alone(smollm2: LoadedModel) -> None:
    """The other prompt is answered."""
    refused, answered = Engine(smollm2).generate(["\ud800", "Hello"], forced(1))
    assert (refused.finish_reason, answered.finish_reason) == ("refused", "length")
