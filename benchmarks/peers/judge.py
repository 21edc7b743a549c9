"""How likely outputs are under transformers in float32: a judge that is none of those who want to be fast.

One line in, {"jobs": [[prompt, number], ...], "model": checkpoint, "threads": n, "outputs": {name: [tokens, ...]}};
one line out, {name: nats per output token}. One teacher-forced forward for each request and distinct output of it.
"""

import json
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import transformers
from protocol import answers, say
from transformers import AutoModelForCausalLM, PreTrainedModel

Tokens = Sequence[int]


class Judge:
    """Scores, each kept so that equal outputs cost one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def nll(self, prompts: Sequence[Tokens], outputs: Sequence[Tokens]) -> float:
        """Nats per token, over all outputs."""
        nats = [self._nats(tuple(prompt), tuple(output)) for prompt, output in zip(prompts, outputs, strict=True)]
        return sum(nats) / sum(map(len, outputs))

    @torch.inference_mode()
    def _nats(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
        if (prompt, output) not in self._known:
            ids = torch.tensor([prompt + output[:-1]])
            logits_RV = self._model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
            self._known[prompt, output] = F.cross_entropy(logits_RV, torch.tensor(output), reduction="sum").item()
        return self._known[prompt, output]


def main() -> None:
    """Judge once."""
    with answers() as out:
        asked = json.loads(sys.stdin.readline())
        torch.set_num_threads(asked["threads"])
        transformers.logging.set_verbosity_error()
        judge = Judge(AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval())
        prompts = [prompt for prompt, _ in asked["jobs"]]
        say(out, {name: judge.nll(prompts, outputs) for name, outputs in asked["outputs"].items()})


if __name__ == "__main__":
    main()
