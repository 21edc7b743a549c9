"""Prompts and params as people give them, turned into token ids and one `SamplingParams` each, or refused by name."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from batchwright.errors import ConfigError, RequestError
from batchwright.serve.loading.tokenizer import Tokenizer
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.sampling.params import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids: a list, or an array or tensor of one dimension."""

Params = SamplingParams | Sequence[SamplingParams] | None

Adapters = str | Sequence[str | None] | None
"""Names of adapters; None: the model as it is."""


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts, also of one text or one list of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    several = _listed(prompts)
    return [several] if several and all(isinstance(one, int) for one in several) else several


def paired(
    prompts: Sequence[Prompt], params: Params, adapters: Adapters = None
) -> list[tuple[Prompt, SamplingParams, str | None]]:
    """Each prompt with its params and the name of its adapter: one for all, or one each."""
    named = partial(_each, len(prompts))
    its_params = named(
        "sampling params", params or SamplingParams(), SamplingParams, "SamplingParams(max_tokens=..., ...)"
    )
    return list(zip(prompts, its_params, named("adapters", adapters, str | None, "names, or None"), strict=True))


def _each(num_prompts: int, what: str, given: Any, kind: Any, use: str) -> list[Any]:
    """`given` for each prompt if it is of that kind, or else a list of as many."""
    if isinstance(given, kind):
        return [given] * num_prompts
    several: list[Any] = list(given)
    asked = f"generate from {num_prompts} prompts"
    if wrong := [one for one in several if not isinstance(one, kind)]:
        fact = f"{type(wrong[0]).__name__} {wrong[0]!r} is no {getattr(kind, '__name__', 'name')}"
        raise ConfigError(asked, fact, f"use {use}")
    if len(several) != num_prompts:
        raise ConfigError(asked, f"there are {len(several)} {what}", "give one for all, or each")
    return several


def token_ids(prompt: Prompt, model: LoadedModel) -> list[int]:
    """`prompt` as ids of `model`'s vocabulary, at least one. Raises RequestError."""
    asked = "submit a request"
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(model, asked)
        if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise RequestError(asked, "its prompt holds half a surrogate pair, which is no character", "remove it")
        tokens = tokenizer.encode(prompt)
    else:
        try:
            tokens = _listed(prompt)
        except ConfigError as error:
            raise RequestError(asked, error.fact, error.remedy) from error
    if not tokens:
        raise RequestError(asked, "its prompt is empty (0 tokens)", "give at least one token")
    vocabulary = model.decoder.shape.vocab
    wrong = [token for token in tokens if type(token) is not int or not 0 <= token < vocabulary]
    if wrong:
        fact = f"its prompt holds {wrong[0]!r}; token ids are integers from 0 to {vocabulary - 1}"
        raise RequestError(asked, fact, "encode the prompt with this model's tokenizer")
    return tokens


def tokenizer_of(model: LoadedModel, asked: str) -> Tokenizer:
    """Raises RequestError where `model` has none."""
    if model.tokenizer is None:
        raise RequestError(asked, f"{model.name} has no tokenizer: {model.no_tokenizer}", "give token ids")
    return model.tokenizer


def _listed(given: Any) -> list[Any]:
    """An iterable, array or tensor as a list. What iterates over something else than prompts or ids is refused."""
    remedy = "give text, a list of token ids, or a list of such prompts"
    if isinstance(given, bytes | bytearray | Mapping):
        raise ConfigError("read prompts", f"{type(given).__name__} is neither text nor token ids", remedy)
    try:
        return list(given.tolist() if hasattr(given, "tolist") else given)
    except TypeError as error:
        raise ConfigError("read prompts", f"{type(given).__name__} holds no prompts ({error})", remedy) from error
