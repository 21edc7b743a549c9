"""transformers' own continuous batching, with its defaults but for the cache, which is new in every run.

Left alone it takes four fifths of the free memory for it, and writes zeros there while the clock runs. A GiB is what
our own engine takes, and far more than these requests need.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from protocol import Job, Made, Run, Setup, work
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
)

NO_EOS = -1
CACHE_BYTES = 1 << 30
TIMEOUT = 120  # seconds without an answer


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """It takes no settings."""
    torch.set_num_threads(setup.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()
    pages = ContinuousBatchingConfig(num_blocks=num_pages(model))
    longest = max(job.num_output for job in setup.jobs)
    config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0, max_new_tokens=longest)

    def run(jobs: Sequence[Job]) -> Made:
        outputs: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=pages, block=True, timeout=TIMEOUT
        ) as batches:
            names = [
                batches.add_request(job.prompt, max_new_tokens=job.num_output, eos_token_id=NO_EOS) for job in jobs
            ]
            while len(outputs) < len(jobs):
                result = batches.get_result(timeout=TIMEOUT)
                assert result is not None, "transformers' continuous batching stopped answering"
                if result.is_finished():
                    outputs[result.request_id] = result.generated_tokens
        return Made([outputs[name] for name in names])

    return run


def num_pages(model: PreTrainedModel) -> int:
    """How many pages of the default size fit."""
    sizes = model.config
    num_values = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    return CACHE_BYTES // (num_values * model.dtype.itemsize * ContinuousBatchingConfig().page_size)


if __name__ == "__main__":
    work(prepare, ["transformers", "torch"])
