"""Constrained requests through the whole engine: beside free ones, in chunks, after preemption, with guesses, ahead."""

import json
import re
from functools import partial
from typing import Any

import pytest

from batchwright import Constraint
from batchwright.errors import RequestError
from batchwright.policy.continuous import Continuous, ContinuousSettings
from batchwright.policy.pages import Memory
from batchwright.policy.speculation import Speculation
from batchwright.records import Recorder
from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.outputs import Completion
from batchwright.serve.sampling.params import SamplingParams
from tests.serve.scripted import OverlappingExecutor, tiny

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["city", "year", "tags"],
    "additionalProperties": False,
}
CONSTRAINTS = [
    Constraint.json_schema(SCHEMA),
    Constraint.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    None,
    Constraint.choice(["yes", "no", "it depends"]),
    Constraint.grammar('start: NUMBER ("+" NUMBER){2}\nNUMBER: /[0-9]{1,3}/'),
    None,
]
PROMPTS = [f"Say something in the right form, number {row}: " for row in range(12)]
ROOMY, CROWDED = Memory(200, 8, 512), Memory(26, 8, 512)


def params_of(row: int, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 90, "temperature": 0.9, "seed": row, "constraint": CONSTRAINTS[row % 6]}
    if settings["constraint"] is None:
        settings["max_tokens"] = 30
    return SamplingParams(**settings | changes)


def holds(completion: Completion, row: int) -> bool:
    """Whether the text has the form that its row asked for."""
    text, which = completion.text, row % 6
    if which == 0:
        value = json.loads(text)
        return sorted(value) == ["city", "tags", "year"] and 1000 <= value["year"] <= 2999 and len(value["tags"]) <= 2
    if which == 1:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", text))
    if which == 3:
        return text in {"yes", "no", "it depends"}
    return which in (2, 5) or bool(re.fullmatch(r"\d{1,3}(\+\d{1,3}){2}", text))


def engine_of(model: LoadedModel, memory: Memory = ROOMY, budget: int = 2048, **how: Any) -> Engine:
    settings = ContinuousSettings(token_budget=budget, speculation=how.pop("speculation", None))
    policy = partial(Continuous, settings=settings)
    return Engine(model, policy, memory=memory, recorder=partial(Recorder, "run"), **how)


@pytest.fixture(scope="module")
def alone(smollm2: LoadedModel) -> list[Completion]:
    """Each by itself."""
    return [engine_of(smollm2).generate(prompt, params_of(row))[0] for row, prompt in enumerate(PROMPTS)]


def test_every_output_has_its_form_and_ends(alone: list[Completion]) -> None:
    """What is constrained ends by itself."""
    for row, completion in enumerate(alone):
        assert completion.error is None
        assert holds(completion, row)
        assert CONSTRAINTS[row % 6] is None or completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"budget": 11},
        {"memory": CROWDED},
        {"speculation": Speculation(position_cost=0)},
        {"executor": OverlappingExecutor},
        {"memory": CROWDED, "speculation": Speculation(position_cost=0), "executor": OverlappingExecutor},
    ],
    ids=["roomy", "in chunks", "preempted", "guessing", "ahead", "all of it"],
)
def test_company_changes_nothing(how: dict[str, Any], alone: list[Completion], smollm2: LoadedModel) -> None:
    """Free and constrained requests in one batch get what they get alone."""
    engine = engine_of(smollm2, **how)
    together = engine.generate(PROMPTS, [params_of(row) for row in range(12)])
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    if how == {"memory": CROWDED}:
        assert sum(request.num_preempted for request in engine.recorder.requests)
    if "speculation" in how:
        assert sum(step.num_drafts for step in engine.recorder.steps)


def test_each_choice_follows_its_constraint_by_itself(smollm2: LoadedModel) -> None:
    (completion,) = engine_of(smollm2).generate(PROMPTS[0], params_of(0, n=4, best_of=6))
    choices = [completion, *completion.alternatives]
    assert len(choices) == 4
    assert all(holds(choice, 0) for choice in choices if choice.finish_reason == "stop")
    assert len({choice.tokens for choice in choices}) > 1


def test_what_nothing_meets_is_refused_and_the_others_run(smollm2: LoadedModel) -> None:
    """At once, before it is queued."""
    impossible = Constraint.json_schema({"type": "integer", "minimum": 3, "maximum": 2})
    engine = engine_of(smollm2)
    with pytest.raises(RequestError, match="constraining output by a json schema"):
        engine.submit("x", SamplingParams(constraint=impossible))
    refused, good = engine.generate(["x", PROMPTS[1]], [SamplingParams(constraint=impossible), params_of(1)])
    assert refused.finish_reason == "refused"
    assert holds(good, 1)
    assert engine.scheduler.load.pages_held == 0


def test_a_constraint_that_becomes_too_costly_ends_its_request_alone(smollm2: LoadedModel) -> None:
    """Where the letters lie is open for so long that there are too many states to keep."""
    costly = SamplingParams(
        max_tokens=300, temperature=3.0, seed=1, constraint=Constraint.regex(".{0,500}a.{0,500}b.{0,500}c")
    )
    bad, good = engine_of(smollm2).generate([PROMPTS[0], PROMPTS[1]], [costly, params_of(1)])
    assert holds(good, 1)
    assert bad.finish_reason == "error"
    assert "cannot be worked out" in (bad.error or "")


def test_without_an_end_token_there_is_nothing_to_constrain() -> None:
    with pytest.raises(RequestError, match="tiny has no end token"):
        Engine(tiny(), memory=ROOMY).submit([1, 2], SamplingParams(constraint=Constraint.json_object()))


def test_what_cannot_be_constrained_is_refused() -> None:
    """A choice that is no list, and text that would go on behind the end."""
    with pytest.raises(RequestError, match="'yes' is no list; give a list of strings"):
        Constraint.choice("yes")
    with pytest.raises(RequestError, match="its constraint says where the output ends"):
        SamplingParams(constraint=Constraint.json_object(), ignore_eos=True)


def test_a_malformed_schema_is_called_that(smollm2: LoadedModel) -> None:
    """And the next one is none the worse for it."""
    malformed = [
        Constraint.json_schema({"type": [{}]}),
        Constraint("json_schema", '{"type": "array", "minItems": 1e400, "items": {"type": "null"}}'),
        Constraint("choice", "5"),
    ]
    engine = engine_of(smollm2)
    for constraint in malformed:
        with pytest.raises(RequestError, match="constraining output by a") as refused:
            engine.submit("x", SamplingParams(constraint=constraint))
        assert "MiB" not in refused.value.fact
    assert holds(engine.generate(PROMPTS[1], params_of(1))[0], 1)
