"""What a client asks for, checked and made ready to run: token ids, params, an adapter, what a constraint allows.

Nothing here touches the engine's state, so threads may do it side by side, while a step runs.
"""

import math
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from batchwright.errors import ConfigError, RequestError
from batchwright.serve.constraints.compiler import Compiler
from batchwright.serve.constraints.constraint import Constraint
from batchwright.serve.constraints.matcher import Grammar, Matcher
from batchwright.serve.decoders.adapters import Adapter
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.loading.adapter_file import load_adapter
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.prompts import Prompt, token_ids, tokenizer_of
from batchwright.serve.sampling.bad_words import bad_word_ids
from batchwright.serve.sampling.params import SamplingParams, check_ids
from batchwright.serve.sequences import Extras

_LONGEST = 1e9  # seconds, of any wait


class Work(NamedTuple):
    """One request, ready to run; `salt` tells apart whose pages must not be shared."""

    tokens: list[int]
    params: SamplingParams
    end_ids: tuple[int, ...]
    salt: str = ""
    adapter: Adapter | None = None
    grammar: Grammar | None = None

    def extras(self, max_drafts: int) -> Extras:
        """For one choice: each follows its constraint by itself."""
        return Extras(self.end_ids, self.adapter, max_drafts, Matcher(self.grammar) if self.grammar else None)


class Intake:
    """Makes `Work` for `model`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._adapters: dict[str, Adapter] = {}
        self._compiler: Compiler | None = None
        self._lock = Lock()

    def add_adapter(self, name: str, folder: str | Path) -> None:
        """Load the LoRA adapter in `folder`, which PEFT wrote; requests know it by `name`."""
        decoder = self._model.decoder
        if not isinstance(decoder, Decoder):
            fact = f"a {type(decoder).__name__} has no place for them: only families of our own do"
            raise ConfigError(f"add adapter {name!r} to {self._model.name}", fact, 'load it with backend="native"')
        if not name:
            raise ConfigError("add an adapter", "its name is empty", "give it one")
        self._adapters[name] = load_adapter(folder, decoder)

    def work(self, prompt: Prompt, params: SamplingParams, adapter: str | None) -> Work:
        """Raises RequestError for what can never run."""
        tokens = token_ids(prompt, self._model)
        if params.bad_words and any(isinstance(word, str) for word in params.bad_words):
            words = bad_word_ids(params, tokenizer_of(self._model, "rule out bad words"))
            params = replace(params, bad_words=words)
        check_ids(params, self._model.decoder.shape.vocab)
        end_ids = tuple({*self._model.eos_ids, *params.stop_token_ids})
        return Work(tokens, params, end_ids, adapter or "", self._adapter(adapter), self._grammar(params.constraint))

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is None:
            return None
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise RequestError(f"use adapter {name!r:.80}", f"the engine has {known}", "name one of these, or none")
        return self._adapters[name]

    def _grammar(self, constraint: Constraint | None) -> Grammar | None:
        if constraint is None:
            return None
        if not self._model.eos_ids:
            fact = f"{self._model.name} has no end token, so nothing could end it"
            raise RequestError(constraint.asked, fact, "use a model that has one")
        with self._lock:
            if self._compiler is None:
                tokenizer = tokenizer_of(self._model, "constrain an output")
                self._compiler = Compiler(tokenizer, self._model.decoder.shape.vocab, self._model.eos_ids)
        return self._compiler.compile(constraint).grammar


def seconds(name: str, value: float) -> float:
    """A duration as a float that is not too large. Raises RequestError."""
    given = moment(name, value)
    if not abs(given) < _LONGEST:
        fact = f"the limit is {_LONGEST:g} s"
        raise RequestError(f"submit a request with {name}={given}", fact, "give less, or None")
    return given


def moment(name: str, value: float) -> float:
    """A time as a finite float. Raises RequestError."""
    asked = f"submit a request with {name}={value!r:.40}"
    try:
        given = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(asked, str(error), "give seconds") from error
    if math.isnan(given):
        raise RequestError(asked, "that is no number", "give seconds")
    return given
