"""A request under way: its text as far as it is known, what ends it, and the keys of its pages."""

from collections.abc import Iterable, Sequence

from batchwright.records import FinishReason
from batchwright.serve.choices import Choices
from batchwright.serve.intake import Work
from batchwright.serve.keys import PageKeys
from batchwright.serve.loading.weights import LoadedModel
from batchwright.serve.outputs import Output
from batchwright.serve.sampling.params import SamplingParams
from batchwright.serve.sampling.sampler import Sampled
from batchwright.serve.sampling.scoring import Score
from batchwright.serve.stopping import StopChecker


class LiveRequest:
    """What the engine knows of one choice of a request from its submission to its end; `has_ended` is set there.

    A step that was planned before the end may still compute a row of it, whose token nobody is given.
    """

    def __init__(
        self, choices: Choices, index: int, params: SamplingParams, work: Work, number: int, model: LoadedModel,
        page_size: int,
    ) -> None:  # fmt: skip
        """`number` is no other request's: what is scored is computed, and not taken from another's pages."""
        self.choices = choices
        self.index = index
        self.id = f"{choices.id}#{index}" if index else choices.id
        self.has_ended = False
        self.num_output = 0
        self.params = params
        is_scored = params.prompt_logprobs is not None
        salt = f"{work.salt}\0{number}" if is_scored else work.salt
        self.keys = PageKeys(page_size, salt)
        self.prompt_keys = self.keys.push(work.tokens)
        self.decoder = model.tokenizer.stream(skip_special_tokens=True) if model.tokenizer else None
        self._prompt_scores: list[Score | None] = [None] * len(work.tokens) if is_scored else []

    def admit(self, max_tokens: int, eos_ids: Sequence[int]) -> None:
        """It will get at most `max_tokens`."""
        self.max_tokens = max_tokens
        self.stop = StopChecker(self.params, eos_ids, max_tokens)

    def push(self, sampled: Sampled) -> Output:
        """Take its next token: the text that may be shown now and, if it ends here, why."""
        self.num_output += 1
        text, reason = self.stop.push(sampled.token, self._text_of(sampled.token), self.num_output)
        scores = tuple(self._prompt_scores) if self.num_output == 1 else ()
        return Output(
            self.choices.id, sampled.token, text, reason, None, sampled.logprob, sampled.top, self.index, scores
        )

    def score(self, scores: Iterable[tuple[int, Score]]) -> None:
        """Note the log-probabilities of tokens of its prompt."""
        for index, scored in scores:
            self._prompt_scores[index] = scored

    def ending(self, reason: FinishReason, error: str | None = None) -> Output:
        """Its last output when it ends for another reason than its tokens, with the text that was still held back."""
        text = self.stop.flush(self.decoder.finish() if self.decoder else "")
        return Output(self.choices.id, None, text, reason, error, choice=self.index)

    def _text_of(self, token: int) -> str:
        """The text that `token` completes; with its last token, all that is left."""
        if self.decoder is None:
            return ""
        if self.stop.ends(token):
            return self.decoder.finish()
        text = self.decoder.push(token)
        return text + self.decoder.finish() if self.num_output == self.max_tokens else text
