"""Makes of a constraint what follows one request's output, and keeps what was compiled for the next that asks the same.

Thousands of requests share a few constraints: the newest `MAX_KEPT` stay compiled, and refusals with them. A new one is
vetted in another process first (`vetting.py`), which bounds its time and memory. So `compile` belongs where waiting for
up to twelve seconds harms nobody, not on the thread that runs steps; as a rule it takes milliseconds.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from batchwright.errors import RequestError
from batchwright.serve.constraints.constraint import Constraint
from batchwright.serve.constraints.guidance import tokenizer_of
from batchwright.serve.constraints.matcher import Grammar, Matcher
from batchwright.serve.constraints.vetting import TIME_LIMIT_S, Vetting
from batchwright.serve.constraints.vocabulary import vocabulary_of
from batchwright.serve.loading.tokenizer import Tokenizer

MAX_KEPT = 64  # at the worst 64 MiB each as compiled, and 25 MiB that its lexer remembers; as a rule one or two
WAIT_LIMIT_S = 8.0


class Compiler:
    """For a model over `num_vocab` tokens, of which `eos_ids` end a text. Several threads may use it.

    `time_limit_s`: for each constraint that is not kept. Takes a tenth of a second for 50,000 tokens. Raises
    UnsupportedModel where tokens are not bytes of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_vocab: int, eos_ids: Sequence[int], *, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        vocabulary = vocabulary_of(tokenizer, num_vocab, eos_ids)
        self._tokenizer = tokenizer_of(vocabulary)
        self._vetting = Vetting(vocabulary, time_limit_s)
        self._kept: OrderedDict[Constraint, Grammar | RequestError] = OrderedDict()
        self._keeping = threading.Lock()
        self._compiling = threading.Lock()

    def compile(self, constraint: Constraint) -> Matcher:
        """At the beginning of its grammar.

        Raises RequestError for what cannot be fulfilled, cannot be enforced, or takes more time or memory than there
        is: within the time limit, and `WAIT_LIMIT_S` if others are compiled before it.
        """
        grammar = self._find(constraint) or self._new(constraint)
        if isinstance(grammar, RequestError):
            raise RequestError(grammar.asked, grammar.fact, grammar.remedy)
        return Matcher(grammar)

    def _find(self, constraint: Constraint) -> Grammar | RequestError | None:
        with self._keeping:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
            return self._kept.get(constraint)

    def _new(self, constraint: Constraint) -> Grammar | RequestError:
        if not self._compiling.acquire(timeout=WAIT_LIMIT_S):
            fact = f"others have been compiled for {WAIT_LIMIT_S:g} seconds, one after another"
            return RequestError(constraint.asked, fact, "try again later")
        try:
            return self._find(constraint) or self._vetted(constraint)  # others may have asked for the same
        finally:
            self._compiling.release()

    def _vetted(self, constraint: Constraint) -> Grammar | RequestError:
        verdict = self._vetting.vet(constraint)
        grammar: Grammar | RequestError
        if verdict.grammar:
            grammar = Grammar(self._tokenizer, verdict.grammar, verdict.seconds, constraint.asked)
        else:
            grammar = RequestError(constraint.asked, verdict.fact, verdict.remedy)
        if verdict.is_certain:
            with self._keeping:
                self._kept[constraint] = grammar
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return grammar
