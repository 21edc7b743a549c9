"""Reads the files of a Hugging Face directory: JSON and typed values out of it, safetensors in one file or in shards.

Every file is held against the size that its header claims before the first weight is read, and an index cannot point
outside its directory. What a file claims is held against what is there before work is done for it, so a claim alone
costs nothing. Nothing that could execute is ever read: no pickles.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""How names of files end that can run code when they are read."""

_MOST = {
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 24,
}
"""More than this no model has; something is made for each of them before any tensor is looked at."""

_STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NUM_NAMED = 8  # of the files that are missing; the others are counted


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json holds, once its sizes can be believed. Raises BrokenWeights."""
    if not (folder / "config.json").is_file():
        remedy = "point at the directory that holds config.json and the safetensors files"
        raise BrokenWeights(f"loading {folder}", "there is no config.json in it", remedy)
    config = read_json(folder / "config.json")
    check_claims(config, folder)
    return config


def check_claims(config: Mapping[str, Any], path: Path) -> None:
    """Raise BrokenWeights for sizes that no model has, so that a claim alone costs nothing."""
    for key, most in _MOST.items():
        value = config.get(key)
        if isinstance(value, int) and value > most:
            fact = f"its {key} is more than {most:,}, which no model has"
            raise BrokenWeights(f"loading {path}", fact, "use the config that belongs to these weights")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BrokenWeights where there is none."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BrokenWeights(f"reading {path}", str(error), "fetch the file again") from error
    if not isinstance(value, dict):
        raise BrokenWeights(f"reading {path}", f"it holds a {type(value).__name__}, not an object", "fetch it again")
    return value


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises BrokenWeights where it is none, or cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeError) as error:
        raise BrokenWeights(f"reading {path}", str(error), "make it readable, or fetch the file again") from error


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object that a config holds under `key`; absent and `null` are empty. Raises BrokenWeights for other kinds."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BrokenWeights("reading a model's config", f"{key} is {value!r}, not an object", f"correct {key}")
    return value


def positive(key: str, value: Any) -> float:
    """`value`, which a config holds under `key`, as a positive number that float32 holds too, or BrokenWeights."""
    limits = torch.finfo(torch.float32)
    if not isinstance(value, int | float) or isinstance(value, bool) or not limits.tiny <= value <= limits.max:
        fact = f"{key} is {value!r}, not a positive number that 32 bits can hold"
        raise BrokenWeights("reading a model's config", fact, f"correct {key}, or fetch the file again")
    return float(value)


class SafetensorsSource:
    """Tensors of one `*.safetensors` file, or of the shards that an index lists. `shapes` by name.

    It may be used while `open_files` is open.
    """

    in_pair_order = False

    def __init__(self, path: Path, open_files: ExitStack) -> None:
        headers = {file: _read_header(file) for file in _weight_files(path)}
        self.shapes = {name: shape for header in headers.values() for name, shape in header.items()}
        readers = {file: _reader_of(file, open_files) for file in headers}
        self._reader_of_name = {name: readers[file] for file, header in headers.items() for name in header}

    def stored(self, name: str) -> Tensor:
        """The named tensor as it is stored."""
        try:
            return self._reader_of_name[name](name)
        except SafetensorError as error:
            remedy = "fetch the file again, or use the unquantised checkpoint"
            raise BrokenWeights(f"reading tensor {name}", str(error), remedy) from error

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named tensor in `dtype`. Raises UnsupportedModel where it is not stored as floats."""
        tensor = self.stored(name)
        if tensor.dtype not in _STORED_DTYPES:
            fact = f"tensor {name} is stored as {tensor.dtype}; supported are 16, 32 and 64 bit floats"
            raise UnsupportedModel("loading safetensors", fact, "use the unquantised checkpoint, or a GGUF file")
        return tensor.to(dtype)


def _reader_of(file: Path, open_files: ExitStack) -> Callable[[str], Tensor]:
    try:
        handle = open_files.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise BrokenWeights(f"reading {file}", str(error), "fetch the file again") from error
    get: Callable[[str], Tensor] = handle.get_tensor
    return get


def _weight_files(path: Path) -> list[Path]:
    """The files named by the index, or else every safetensors file; each exists. A file is itself."""
    if path.is_file():
        return [path]
    index = path / INDEX
    names = files_in_index(index) if index.is_file() else sorted(file.name for file in path.glob("*.safetensors"))
    if not names:
        raise _no_weights(path)
    present = {file.name for file in path.iterdir() if file.is_file()}
    if missing := [name for name in names if name not in present]:
        raise _missing(path, len(missing), len(names), missing)
    if not index.is_file():
        _check_shards(path, present)
    return [path / name for name in names]


def files_in_index(index: Path) -> list[str]:
    """The safetensors files that an index lists, each in its own directory."""
    files = section(read_json(index), "weight_map").values()
    if odd := [file for file in files if not _is_beside(file)]:
        fact = f"it points outside its directory, or at no safetensors file: {odd[0]!r}"
        raise BrokenWeights(f"reading {index}", fact, "fetch the index again")
    return sorted(set(files))


def _is_beside(file: object) -> bool:
    return isinstance(file, str) and file.endswith(".safetensors") and not {"/", "\\"} & set(file)


def _check_shards(path: Path, present: set[str]) -> None:
    """`model-00001-of-00003.safetensors` implies the other two. Costs what is present, however many a name claims."""
    found: dict[tuple[str, int, str], set[int]] = {}
    for name in present:
        if part := re.fullmatch(r"(.+)-([0-9]+)-of-([0-9]+)\.safetensors", name):
            found.setdefault((part[1], len(part[2]), part[3]), set()).add(int(part[2]))
    for (stem, width, total), numbers in sorted(found.items()):
        num_all = int(total)
        num_missing = num_all - sum(1 <= number <= num_all for number in numbers)
        if num_missing > 0:
            lacking = (i for i in range(1, num_all + 1) if i not in numbers)
            missing = (f"{stem}-{i:0{width}}-of-{total}.safetensors" for i in lacking)
            raise _missing(path, num_missing, num_all, missing)


def _missing(path: Path, num_missing: int, num_all: int, names: Iterable[str]) -> BrokenWeights:
    listed = ", ".join(islice(names, _NUM_NAMED)) + (", ..." if num_missing > _NUM_NAMED else "")
    fact = f"{num_missing:,} of {num_all:,} shards are missing: {listed}"
    return BrokenWeights(f"loading {path}", fact, "fetch the missing files")


def _no_weights(path: Path) -> UnsupportedModel | BrokenWeights:
    pickles = sorted(file.name for file in path.iterdir() if file.name.endswith(PICKLES))
    if pickles:
        remedy = "give safetensors or gguf only; pickles are never read, since they can run code"
        return UnsupportedModel(f"loading {path}", f"its weights are pickles ({pickles[0]})", remedy)
    return BrokenWeights(f"loading {path}", "there is no .safetensors file in it", "fetch the weights")


def _read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes, once the file is known to hold all that its header (8 bytes of length, then JSON) claims."""
    num_bytes = file.stat().st_size
    asked = f"reading {file}"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if num_bytes < 8 + length:
            fact = f"its header needs {8 + length:,} bytes but the file has {num_bytes:,}"
            raise BrokenWeights(asked, fact, "it is truncated or no safetensors file: fetch it again")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise BrokenWeights(asked, f"its header is not valid: {error}", "fetch the file again") from error
    if num_bytes < end:
        fact = f"its tensors need {end:,} bytes but the file has {num_bytes:,}"
        raise BrokenWeights(asked, fact, "the file is truncated: fetch it again")
    return shapes
