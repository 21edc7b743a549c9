"""openvino-genai's ContinuousBatchingPipeline, with its own defaults but for what `settings` says.

Prefix caching is off: its cache would outlive a run, and no two requests share a prefix. Keys and values are in the
CPU plugin's default type, 8-bit integers, unless `kv_in_dtype` is set.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Job, Made, Run, Setup, work

HINTS = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GIB = 1


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """`settings`: those of SchedulerConfig, and `kv_in_dtype`: keys and values have the contest's dtype."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.enable_prefix_caching = False
    for name in settings.keys() - {"kv_in_dtype"}:
        setattr(scheduler, name, settings[name])
    properties = {"INFERENCE_NUM_THREADS": setup.threads, "INFERENCE_PRECISION_HINT": HINTS[setup.dtype]}
    if settings.get("kv_in_dtype"):
        properties["KV_CACHE_PRECISION"] = HINTS[setup.dtype]
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(setup.model), scheduler, "CPU", properties)

    def run(jobs: Sequence[Job]) -> Made:
        prompts = [openvino.Tensor(np.array([job.prompt], dtype=np.int64)) for job in jobs]
        results = pipeline.generate(prompts, [greedy(job.num_output) for job in jobs])
        return Made([result.m_generation_ids[0] for result in results])

    return run


def greedy(num_output: int) -> openvino_genai.GenerationConfig:
    """Exactly so many tokens, each the likeliest."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = num_output
    config.min_new_tokens = 0
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    work(prepare, ["openvino-genai", "openvino"])
