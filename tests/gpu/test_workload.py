"""The embedded model on a CUDA device, over the whole workload: the CPU's tokens in float32, near them in bfloat16."""

from collections.abc import Sequence
from time import perf_counter

import pytest
import torch

from batchwright.serve.engine import Engine
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.serve.outputs import Completion
from tests.serve.scripted import Job, forced, workload64
from tests.serve.test_quality import exact, judged

pytestmark = pytest.mark.gpu

NEAR_TIE = 1e-3  # between the log-probabilities of the CPU's two likeliest tokens: either may win elsewhere
JOBS = workload64()


def run(model: LoadedModel, jobs: Sequence[Job] = JOBS) -> list[Completion]:
    params = [forced(job.num_output, logprobs=2) for job in jobs]
    return Engine(model).generate([job.prompt for job in jobs], params)


def first_difference(one: Completion, other: Completion) -> int | None:
    pairs = zip(one.tokens, other.tokens, strict=True)
    return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def test_float32_tokens_of_64_requests_equal_the_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    """Greedy; where a request parts from the CPU's, the CPU's two best were a near tie, and few do."""
    torch.backends.cuda.matmul.allow_tf32 = False
    on_cpu, on_gpu = run(load(dtype=torch.float32)), run(load(dtype=torch.float32, device="cuda"))
    parted = {}
    for index, (there, here) in enumerate(zip(on_cpu, on_gpu, strict=True)):
        if (at := first_difference(there, here)) is not None:
            (_, best), (_, second) = there.logprobs[at][1]
            parted[index] = best - second
    with capsys.disabled():
        print(f"\nfloat32: {len(JOBS) - len(parted)} of {len(JOBS)} requests equal; near ties: {parted}")  # noqa: T201 - meant to be read
    assert all(gap < NEAR_TIE for gap in parted.values()), parted
    assert len(parted) <= 3


def test_bfloat16_logits_are_near_float32s() -> None:
    """As near as the CPU's bfloat16 has to be."""
    on_gpu = judged(load(dtype=torch.bfloat16, device="cuda").decoder)
    outputs, _ = exact()
    assert sum(map(len, outputs)) > 100
    assert on_gpu.divergence < 0.002
    assert 1e-3 < on_gpu.distance < 0.2


def test_the_workload_runs_and_its_speed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """bfloat16, all 64 requests at once, three times after a warm-up; a speed is reported, never asserted."""
    model = load(dtype=torch.bfloat16, device="cuda")
    run(model, JOBS[:8])
    speeds = []
    for _ in range(3):
        began = perf_counter()
        completions = run(model)
        speeds.append(sum(len(completion.tokens) for completion in completions) / (perf_counter() - began))
    with capsys.disabled():
        name = torch.cuda.get_device_name()
        print(f"\nbfloat16, {name}, torch {torch.__version__}: {', '.join(f'{s:.0f}' for s in speeds)} output tok/s")  # noqa: T201 - meant to be read
    assert [len(completion.tokens) for completion in completions] == [job.num_output for job in JOBS]
