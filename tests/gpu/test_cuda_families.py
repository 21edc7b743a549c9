"""Every family on a CUDA device computes what transformers computes on the CPU."""

import pytest
import torch

from tests.serve.decoders.test_families import TOLERANCE, VARIANTS, loaded, worst_of_all

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_computes_the_same_on_cuda(variant: str) -> None:
    """Its attention is another kernel there, and experts gather and add in parallel."""
    torch.backends.cuda.matmul.allow_tf32 = False
    assert worst_of_all(variant, loaded(variant, device="cuda"), 8) < TOLERANCE
