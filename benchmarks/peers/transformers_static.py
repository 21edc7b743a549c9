"""transformers' `generate` on left-padded batches of `size`, in order of arrival, each as long as its longest request.

Tokens that a batch makes beyond a request's length are made all the same, and thrown away: they are not useful.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from protocol import Job, Made, Run, Setup, work
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """`settings`: the batches' size."""
    torch.set_num_threads(setup.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()

    def run(jobs: Sequence[Job]) -> Made:
        size = settings["size"]
        batches = (jobs[first : first + size] for first in range(0, len(jobs), size))
        return Made([output for batch in batches for output in generate(model, batch)])

    return run


def generate(model: PreTrainedModel, batch: Sequence[Job]) -> list[list[int]]:
    """The useful tokens of one batch."""
    width, length = max(len(job.prompt) for job in batch), max(job.num_output for job in batch)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
    config = GenerationConfig(
        max_new_tokens=length, min_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    made = model.generate(ids, attention_mask=mask, generation_config=config)
    return [row[width : width + job.num_output].tolist() for row, job in zip(made, batch, strict=True)]


if __name__ == "__main__":
    work(prepare, ["transformers", "torch"])
