"""A request under way: its text as far as it is known, what ends it, and the keys of its pages."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from batchwright.records import FinishReason
from batchwright.serve.keys import PageKeys
from batchwright.serve.outputs import Output
from batchwright.serve.params import SamplingParams
from batchwright.serve.stopping import StopChecker
from batchwright.serve.weights import LoadedModel


class LiveRequest:
    """What the engine knows of a request from its submission to its end; `has_ended` is set there.

    A step that was planned before the end may still compute a row of it, whose token nobody is given.
    """

    def __init__(
        self, request_id: str, tokens: Sequence[int], params: SamplingParams, model: LoadedModel, page_size: int,
        on_output: Callable[[Output], None] | None,
    ) -> None:  # fmt: skip
        self.id = request_id
        self.has_ended = False
        self.num_output = 0
        self.params = params
        self.keys = PageKeys(page_size)
        self.prompt_keys = self.keys.push(tokens)
        self.decoder = model.tokenizer.stream(skip_special_tokens=True) if model.tokenizer else None
        self.on_output = on_output

    def admit(self, max_tokens: int, eos_ids: Sequence[int]) -> None:
        """It will get at most `max_tokens`."""
        self.max_tokens = max_tokens
        self.stop = StopChecker(replace(self.params, max_tokens=max_tokens), eos_ids)

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take its next token: the text that may be shown now and, if it ends here, why."""
        self.num_output += 1
        return self.stop.push(token, self._text_of(token), self.num_output)

    def rest(self) -> str:
        """The text that is still held back, when it ends for another reason than its tokens."""
        return self.stop.flush(self.decoder.finish() if self.decoder else "")

    def _text_of(self, token: int) -> str:
        """The text that `token` completes; with its last token, all that is left."""
        if self.decoder is None:
            return ""
        if self.stop.ends(token):
            return self.decoder.finish()
        text = self.decoder.push(token)
        return text + self.decoder.finish() if self.num_output == self.max_tokens else text
