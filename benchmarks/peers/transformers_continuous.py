"""transformers' own continuous batching, with its defaults; its cache is new in every run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from protocol import Job, Made, Run, Setup, work
from transformers import AutoModelForCausalLM, GenerationConfig

NO_EOS = -1
TIMEOUT = 120  # seconds without an answer


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """It takes no settings."""
    torch.set_num_threads(setup.threads)
    transformers.logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, setup.dtype)).eval()
    longest = max(job.num_output for job in setup.jobs)
    config = GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0, max_new_tokens=longest)

    def run(jobs: Sequence[Job]) -> Made:
        outputs: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=config, block=True, timeout=TIMEOUT
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


if __name__ == "__main__":
    work(prepare, ["transformers", "torch"])
