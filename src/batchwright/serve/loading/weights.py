"""Loads a model: from a Hugging Face directory of safetensors or a GGUF file, wherever `locate` finds it.

Whatever the files hold, a model comes of them or one of our errors, and nothing that could execute is ever read: no
pickles, no code. Files are mapped, so peak memory is the model plus one layer.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from batchwright.errors import BrokenWeights, ConfigError, UnsupportedModel
from batchwright.policy.pages import Memory
from batchwright.serve.decoders.backend import Backend, Quantization, Target, not_deterministic
from batchwright.serve.decoders.foreign import ForeignDecoder
from batchwright.serve.decoders.model import Decoder, supported_shape
from batchwright.serve.executor import Executor, TorchExecutor
from batchwright.serve.loading.build import build
from batchwright.serve.loading.checkpoint import SafetensorsSource, check_claims, read_config, read_json
from batchwright.serve.loading.foreign_load import is_foreign, load_foreign
from batchwright.serve.loading.gguf_config import config_of_gguf
from batchwright.serve.loading.gguf_file import GgufFile
from batchwright.serve.loading.gguf_model import GgufSource
from batchwright.serve.loading.gguf_tokenizer import from_gguf
from batchwright.serve.loading.locate import DEFAULT, Located, locate
from batchwright.serve.loading.packed import dequantised, without_quantization
from batchwright.serve.loading.tokenizer import Tokenizer, from_directory
from batchwright.serve.openvino_executor import PAGE_SIZE, OpenVinoDecoder, OpenVinoExecutor, check_installed

DTYPES = (torch.float32, torch.bfloat16)
"""What a model can be run in."""

_PAGE_SIZE = 16
_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError, OSError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with what is needed to run it and to talk to it.

    `decoder`: a `model.Decoder`, one that transformers runs (`foreign`), or an `openvino_executor.OpenVinoDecoder`.
    `tokenizer` is None where the files have none that we can build, and `no_tokenizer` then says why. `eos_ids` end a
    reply. `config` is as in `config.json`, also for a GGUF file.
    """

    name: str
    decoder: Decoder | ForeignDecoder | OpenVinoDecoder
    tokenizer: Tokenizer | None
    no_tokenizer: str
    eos_ids: tuple[int, ...]
    config: Mapping[str, Any]

    @property
    def page_size(self) -> int:
        """Tokens per page that its executor likes best; OpenVINO's takes no other."""
        return PAGE_SIZE if isinstance(self.decoder, OpenVinoDecoder) else _PAGE_SIZE

    def make_executor(self, memory: Memory, *, deterministic: bool = False) -> Executor:
        """What runs plans with it, over pages laid out by `memory`.

        `deterministic`: requests do not affect each other, bit for bit; one position at a time where the operators
        need that. Raises ConfigError where OpenVINO is asked for that, or for pages of another size.
        """
        if not isinstance(self.decoder, OpenVinoDecoder):
            is_slow = deterministic and not self.decoder.ops.invariant
            return TorchExecutor(self.decoder, memory, one_at_a_time=is_slow)
        if deterministic:
            raise not_deterministic()
        return OpenVinoExecutor(self.decoder, memory)


class LoadOptions(TypedDict, total=False):
    """What an engine passes on to `load`."""

    dtype: torch.dtype | str
    device: str | torch.device
    backend: Backend
    quantization: Quantization | None


def load(
    source: str | Path = DEFAULT,
    dtype: torch.dtype | str = torch.bfloat16,
    device: str | torch.device = "cpu",
    *,
    backend: Backend = "auto",
    quantization: Quantization | None = None,
    deterministic: bool = False,
) -> LoadedModel:
    """`source`: a directory with config.json and safetensors, a .gguf file, "smollm2", or a name on Hugging Face.

    A name is `org/name`, `org/name@revision` or `org/name/file.gguf`; what is not in the cache is downloaded. What is
    on the disk wins over a name.

    `backend`: "native" (our kernels for a CPU), "openvino" (its kernels for a CPU, with pages of 32 tokens; needs the
    extra of that name), "torch", or "auto", which takes the first of these that is faster here and can be had.
    `quantization`: "int8" holds the projections' weights in half the memory and rounds their inputs to int8 as well.
    `deterministic`: prefer operators under which requests do not affect each other, for `Engine(deterministic=True)`.

    Raises UnsupportedModel, BrokenWeights, MissingDependency (no embedded model, no OpenVINO), InputError (nothing by
    that name), and ConfigError for a dtype, device, backend or quantization that is not there.
    """
    known = _known_dtype(dtype)
    target = Target(known, _checked(device), backend, quantization, deterministic)
    if backend == "openvino":
        check_installed()
    try:
        found = locate(source)
        return _load_gguf(found, target) if found.path.is_file() else _load_directory(found, target)
    except _MALFORMED as error:
        # The files are foreign: where a number is expected they can hold anything, and each may be unreadable. What
        # matters is checked by name where it is read; this boundary is for the rest, so that no file ends a program.
        fact = f"its files cannot be read as a model: {type(error).__name__}: {error}"
        remedy = "check that they are readable and complete, or fetch them again"
        raise BrokenWeights(f"loading {source}", fact, remedy) from error


def _checked(device: str | torch.device) -> torch.device:
    """The device, once something was put on it."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        fact = str(error).partition("\n")[0]
        raise ConfigError(f"loading onto device {device}", fact, 'use "cpu", or a device that torch sees') from error
    return torch.device(device)


def _known_dtype(dtype: torch.dtype | str) -> torch.dtype:
    for known in DTYPES:
        if dtype in (known, str(known), str(known).removeprefix("torch.")):
            return known
    names = " and ".join(str(known) for known in DTYPES)
    raise ConfigError(f"loading a model in {dtype}", f"supported are {names}", "choose one of these")


def _load_directory(found: Located, target: Target) -> LoadedModel:
    path = found.path
    config = read_config(path)
    decoder = load_foreign(path, config, target) if is_foreign(config) else _load_ours(path, config, target)
    tokenizer = from_directory(path)
    why = "" if tokenizer else f"there is no tokenizer.json in {path}"
    eos_ids = _checked_text(path, decoder, tokenizer, _eos_of_directory(path, config, tokenizer))
    return LoadedModel(found.name, decoder, tokenizer, why, eos_ids, config)


def _load_ours(path: Path, config: Mapping[str, Any], target: Target) -> Decoder | OpenVinoDecoder:
    plain = without_quantization(config)
    supported_shape(plain)
    with ExitStack() as open_files:
        return build(path, plain, dequantised(SafetensorsSource(path, open_files), config), target)


def _load_gguf(found: Located, target: Target) -> LoadedModel:
    path = found.path
    if path.suffix != ".gguf":
        fact = f"{path.name} is neither a directory of safetensors nor a .gguf file"
        raise UnsupportedModel(f"loading {path}", fact, "give safetensors or gguf only; pickles are never read")
    file = GgufFile(path)
    config = config_of_gguf(file)
    check_claims(config, path)
    source = GgufSource(file, config)
    decoder = build(path, config, source, target, source.scaled_frequencies())
    tokenizer, why = None, ""
    try:
        tokenizer = from_gguf(file.metadata)
    except UnsupportedModel as gap:
        why = str(gap)
    ends = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    eos_ids = _checked_text(path, decoder, tokenizer, [i for i in ends if i is not None])
    return LoadedModel(found.name, decoder, tokenizer, why, eos_ids, config)


def _eos_of_directory(path: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> Any:
    """What generation_config.json says, or else config.json, or else the tokenizer."""
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    if value is None and tokenizer and "eos_token" in tokenizer.special:
        value = tokenizer.token_id(tokenizer.special["eos_token"])
    return value


def _checked_text(
    path: Path, decoder: Decoder | ForeignDecoder | OpenVinoDecoder, tokenizer: Tokenizer | None, eos: Any
) -> tuple[int, ...]:
    """The ids that end a reply, an id or a list of them in `eos`, once these and the tokenizer's words fit the model.

    Tokens that were added to a vocabulary may lie beyond the embedding, as an image's does in Gemma 3: a prompt that
    holds one is then refused.
    """
    num_rows = decoder.shape.vocab
    if tokenizer and (num_words := tokenizer.core.get_vocab_size(with_added_tokens=False)) > num_rows:
        fact = f"its tokenizer has a vocabulary of {num_words:,} tokens but its embedding has {num_rows:,} rows"
        raise BrokenWeights(f"loading {path}", fact, "use the tokenizer that belongs to these weights")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if odd := [i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < num_rows]:
        fact = f"its eos_token_id holds {odd[0]!r}, which is no token id of {num_rows:,}"
        raise BrokenWeights(f"loading {path}", fact, "correct it in generation_config.json or config.json")
    return tuple(dict.fromkeys(ids))
