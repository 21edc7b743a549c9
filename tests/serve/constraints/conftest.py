"""SmolLM2's tokenizer, and a compiler of constraints for it."""

import pytest

from batchwright.serve.constraints.compiler import Compiler
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_tokenizer import from_gguf
from batchwright.serve.loading.locate import default_path
from batchwright.serve.loading.tokenizer import Tokenizer
from tests.serve.constrained import END, NUM_VOCAB


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return from_gguf(GgufFile(default_path()).metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Compiler:
    return Compiler(tokenizer, NUM_VOCAB, [END])
