"""What an engine takes: its weights, its pages and a workspace that is stated, and nothing besides."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchwright.serve.decoders import native

AROUND = 30 << 20
"""Bytes for the tokenizer, libraries that load with a model, and what the allocator keeps of reading the file."""

NO_KERNELS = native.why_not(torch.bfloat16, torch.device("cpu"))

PEAK = """
import json, re, sys
import torch
from batchwright import Engine
from batchwright.serve.kernels.build import built
from batchwright.serve.loading.weights import load
from tests.serve.scripted import forced, workload64

def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

built()
jobs = workload64()
before = peak()
model = load("smollm2", quantization=sys.argv[1] or None)
engine = Engine(model)
engine.executor.kv.pages_LPMSD.zero_()  # as if every page had been used
engine.generate([job.prompt for job in jobs], [forced(min(job.num_output, 60)) for job in jobs])
steps = engine.recorder.steps
most = max(sum(row.num_tokens for row in step.rows) for step in steps), max(len(step.rows) for step in steps)
print(peak() - before, model.decoder.num_bytes, engine.executor.kv.num_bytes, model.decoder.workspace_bytes(*most))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.skipif(bool(NO_KERNELS), reason=f"the workspace is stated for our kernels: {NO_KERNELS}")
@pytest.mark.parametrize("quantization", ["", "int8"])
def test_peak_memory_is_weights_pool_and_workspace_within_a_twentieth(quantization: str) -> None:
    """64 requests on the embedded model with the default pool of 1 GiB: prefill steps of 2,048, decodes of 64 rows."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, quantization],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    grown, weights, pool, workspace = map(int, done.stdout.split())
    stated = weights + pool + workspace + AROUND
    assert weights > 150e6 and pool > 1e9 and 20e6 < workspace < 60e6
    assert 0.95 * stated < grown < 1.05 * stated
