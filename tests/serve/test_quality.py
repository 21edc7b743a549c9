"""How far narrower arithmetic moves the embedded model (a Q4_1 file): judged beside float32, token by token.

Two sound engines in bfloat16 agree on half of the requests at most, so tokens are not compared. What is: the negative
log-likelihood per token of what float32 would write, and how far the distribution of every next token moves.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from batchwright.policy.pages import Memory
from batchwright.serve.decoders import native
from batchwright.serve.decoders.attention import RowSpan
from batchwright.serve.decoders.model import Decoder
from batchwright.serve.engine import Engine
from batchwright.serve.kv import PagedKV
from batchwright.serve.loading.weights import load
from tests.serve.scripted import forced, workload64

JOBS = workload64()[::8]
PAGE_SIZE = 16


class Judged(NamedTuple):
    """Over all output tokens: NLL per token, KL divergence from float32 per token, RMS difference of logits."""

    nll: float
    divergence: float
    distance: float


def logits_of(decoder: Decoder, prompt: list[int], output: tuple[int, ...]) -> Tensor:
    """Before each token of `output`, in one pass."""
    tokens = [*prompt, *output]
    row = RowSpan(0, len(tokens), tuple(range(-(-len(tokens) // PAGE_SIZE))))
    kv = PagedKV(decoder.shape, Memory(len(row.table), PAGE_SIZE, 8192), decoder.dtype, decoder.device)
    layout = decoder.ops.layout([row], kv, decoder.attention)
    rows_R = torch.arange(len(prompt) - 1, len(tokens) - 1, device=decoder.device)
    return decoder.forward(torch.tensor(tokens, device=decoder.device), layout.attend, rows_R).cpu()


@cache
def exact() -> tuple[list[tuple[int, ...]], Tensor]:
    """What float32 writes, and its logits, on torch's operators."""
    model = load(dtype=torch.float32, backend="torch")
    completions = Engine(model).generate([job.prompt for job in JOBS], [forced(job.num_output) for job in JOBS])
    outputs = [completion.tokens for completion in completions]
    return outputs, torch.cat(
        [logits_of(model.decoder, job.prompt, out) for job, out in zip(JOBS, outputs, strict=True)]
    )


def judged(decoder: Decoder) -> Judged:
    outputs, exact_RV = exact()
    logits_RV = torch.cat([logits_of(decoder, job.prompt, out) for job, out in zip(JOBS, outputs, strict=True)])
    tokens_R = torch.tensor([token for output in outputs for token in output])
    scores_RV = logits_RV.log_softmax(-1)
    return Judged(
        nll=float(-scores_RV.gather(1, tokens_R[:, None]).mean()),
        divergence=float(kl_div(scores_RV, exact_RV.log_softmax(-1), log_target=True, reduction="batchmean")),
        distance=float((logits_RV - exact_RV).square().mean().sqrt()),
    )


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("quantization", "nll", "divergence", "distance"), [(None, 0.01, 0.002, 0.2), ("int8", 0.03, 0.02, 0.7)]
)
def test_narrower_arithmetic_stays_near_float32(
    quantization: str | None, nll: float, divergence: float, distance: float, backend: str
) -> None:
    """bfloat16, and int8 weights with inputs rounded to int8 in groups of 64, beside the float32 model."""
    if backend == "native" and (reason := native.why_not(torch.bfloat16, torch.device("cpu"))):
        pytest.skip(f"no kernels here: {reason}")
    base = judged(load(dtype=torch.float32, backend="torch").decoder)
    mine = judged(load(dtype=torch.bfloat16, backend=backend, quantization=quantization).decoder)
    assert base.divergence < 1e-6
    assert abs(mine.nll - base.nll) < nll
    assert mine.divergence < divergence
    assert 1e-3 < mine.distance < distance  # that it is not 0 shows that something narrower ran
