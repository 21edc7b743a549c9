"""What may be asked of sampling, and how what may not is refused."""

import math
from dataclasses import replace

import pytest

from batchwright.errors import RequestError
from batchwright.serve.sampling.params import SamplingParams, check_ids


@pytest.mark.parametrize(
    "setting",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 2.0},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"typical_p": 0},
        {"typical_p": 1.5},
        {"typical_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 101},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"presence_penalty": "much"},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: -100.5}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {1: None}},
        {"logit_bias": 7},
        {"logit_bias": ((1, 2.0), (1, 3.0))},
        {"bad_words": ("",)},
        {"bad_words": (" ",)},
        {"bad_words": ((),)},
        {"bad_words": (3,)},
        {"bad_words": ((3, "a"),)},
        {"bad_words": ((-3,),)},
        {"allowed_token_ids": ()},
        {"allowed_token_ids": (-1,)},
        {"allowed_token_ids": ("a",)},
        {"min_tokens": -1},
        {"min_tokens": None},
        {"n": 0},
        {"n": 129},
        {"n": None},
        {"best_of": 0},
        {"best_of": 129},
        {"seed": 2**64},
        {"seed": "x"},
        {"stop": ""},
        {"stop": ("a", "")},
        {"stop": (3,)},
        {"stop": ("a",) * 17},
        {"stop_token_ids": (-1,)},
        {"stop_token_ids": ("a",)},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": True},
        {"constraint": "[a-z]+"},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(setting):
    """The error names the setting, its value, and what is allowed."""
    [(name, value)] = setting.items()
    with pytest.raises(RequestError) as refused:
        SamplingParams(**setting)
    assert refused.value.asked.startswith(f"sampling with {name}=")
    assert isinstance(value, dict) or str(value) in refused.value.asked
    assert refused.value.remedy.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("setting", "most"),
    [
        ("stop", ["x" * 1000] * 16),
        ("stop_token_ids", [7] * 128),
        ("logit_bias", dict.fromkeys(range(300), 1.0)),
        ("bad_words", ["x" * 100] * 128),
        ("bad_words", [[3] * 500] * 256),
        ("allowed_token_ids", range(65_536)),
    ],
    ids=str,
)
def test_what_a_client_can_make_long_is_bounded(setting, most):
    """The most that is allowed is taken; one more, or one longer, is refused by an error that doesn't repeat it all."""
    most = most if isinstance(most, dict) else list(most)
    SamplingParams(**{setting: most})
    beyond = [{300: 1.0} | most] if isinstance(most, dict) else [[*most, 70_000]]
    if isinstance(most, list) and not isinstance(most[0], int):
        beyond = [[*most, most[0]], [most[0] + most[0][:1]]]
    for value in beyond:
        with pytest.raises(RequestError, match=r"at most|1 to") as refused:
            SamplingParams(**{setting: value})
        assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("setting", "fact"),
    [
        ({"min_tokens": 129}, "max_tokens=128 is less"),
        ({"n": 3, "best_of": 2, "temperature": 1.0}, "n=3 answers are to be chosen from them"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(setting, fact):
    """The error says which other setting is in the way."""
    with pytest.raises(RequestError) as refused:
        SamplingParams(**setting)
    assert refused.value.fact == fact


def test_a_number_that_no_float_holds_is_out_of_range():
    with pytest.raises(RequestError, match="temperature must be"):
        SamplingParams(temperature=10**400)


def test_answers_may_be_several_also_where_they_are_equal():
    """Of a request that is drawn, as many as 128."""
    assert SamplingParams(n=2, best_of=128, temperature=0.5).best_of == 128
    assert SamplingParams(n=2).n == 2  # as OpenAI's API has it


@pytest.mark.parametrize(
    ("setting", "equal"),
    [
        ({"stop": None}, {}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop_token_ids": None}, {}),
        ({"bad_words": None}, {}),
        ({"bad_words": "word"}, {"bad_words": ("word",)}),
        ({"bad_words": ["word", [1, 2]]}, {"bad_words": ("word", (1, 2))}),
        ({"logit_bias": None}, {}),
        ({"logit_bias": {"50256": -100, 7: 2.5}}, {"logit_bias": ((7, 2.5), (50256, -100))}),
        ({"allowed_token_ids": [5, 3, 5]}, {"allowed_token_ids": (3, 5)}),
    ],
    ids=str,
)
def test_values_may_be_written_as_json_has_them(setting, equal):
    """None for nothing, a bare string for one, lists for tuples, strings for a mapping's ids; params stay hashable."""
    params = SamplingParams(**setting)
    assert params == SamplingParams(**equal)
    assert hash(params) == hash(SamplingParams(**equal))
    assert replace(params, seed=3) == SamplingParams(**equal, seed=3)


@pytest.mark.parametrize(
    "setting",
    [{"logit_bias": {50: 1.0}}, {"bad_words": ["x", (3, 50)]}, {"allowed_token_ids": (50,)}, {"stop_token_ids": (50,)}],
    ids=str,
)
def test_tokens_outside_the_vocabulary_are_refused(setting):
    """The error names the token, and the ids that the model has."""
    check_ids(SamplingParams(**setting), 51)
    with pytest.raises(RequestError, match=r"of token 50: the model's token ids are 0 to 49"):
        check_ids(SamplingParams(**setting), 50)
