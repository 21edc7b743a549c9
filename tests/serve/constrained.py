"""Random texts of a grammar: what a model with random logits would write under its masks."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from batchwright.serve.constraints.masks import Masks
from batchwright.serve.constraints.matcher import Matcher
from batchwright.serve.loading.tokenizer import Tokenizer

ENOUGH = 40  # tokens, after which a text is brought to its end


def allowed(bits_W: torch.Tensor) -> np.ndarray:
    """The tokens whose bits are set."""
    return np.flatnonzero(np.unpackbits(bits_W.numpy().view(np.uint8), bitorder="little"))


NUM_VOCAB, END = 49_152, 2  # of SmolLM2


class RandomModel:
    """Chooses among the allowed tokens at random; past `ENOUGH` it mostly takes what closes something, or a hint."""

    def __init__(self, tokenizer: Tokenizer, num_vocab: int, end_id: int, seed: int, hints: str = "") -> None:
        self.end_id = end_id
        self.masks = Masks(num_vocab, torch.device("cpu"))
        self._rng = random.Random(seed)
        closing = (tokenizer.token_id(text) for text in ('"', "}", "]", ")", "Ġ"))
        self._closing = [end_id, *(token for token in closing if token is not None)]
        self._hints = {token for hint in hints for token in tokenizer.encode(hint, add_special_tokens=False)}

    def write(self, matchers: Sequence[Matcher], most: int = 1_000) -> list[list[int]]:
        """The tokens of one text for each, with the one that ends it, unless that is not among the first `most`."""
        outputs: list[list[int]] = [[] for _ in matchers]
        going = list(range(len(matchers)))
        for _ in range(most):
            pending = self.masks.begin([(matchers[i], outputs[i]) for i in going])
            assert pending is not None
            bits_RW, errors = pending.wait()
            assert not errors
            chosen = [self._choose(allowed(bits_W), len(outputs[i])) for bits_W, i in zip(bits_RW, going, strict=True)]
            for token, i in zip(chosen, going, strict=True):
                outputs[i].append(token)
            going = [i for token, i in zip(chosen, going, strict=True) if token != self.end_id]
            if not going:
                break
        return outputs

    def _choose(self, tokens: np.ndarray, num_before: int) -> int:
        assert len(tokens), "no token is allowed"
        if self._rng.random() < (0.8 if num_before >= ENOUGH else 0.2):
            options = set(tokens.tolist())
            for token in self._closing:
                if token in options:
                    return token
            tokens = sorted(options & self._hints) or tokens
        return int(self._rng.choice(tokens))
