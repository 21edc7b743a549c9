"""Reads the files of a Hugging Face directory: JSON, and safetensors in one file or in shards.

Every file is held against the size that its header claims before the first weight is read, and an index cannot point
outside its directory. Nothing that could execute is ever read: no pickles.
"""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel

_STORED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BrokenWeights where there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenWeights(f"reading {path}", str(error), "fetch the file again") from error
    if not isinstance(value, dict):
        raise BrokenWeights(f"reading {path}", f"it holds a {type(value).__name__}, not an object", "fetch it again")
    return value


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

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The named tensor in `dtype`. Raises UnsupportedModel where it is not stored as floats."""
        tensor = self._reader_of_name[name](name)
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
    """The files named by the index, or else every safetensors file; each exists."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        if outside := [name for name in names if Path(name).name != name]:
            fact = f"it points outside its directory: {outside[0]}"
            raise BrokenWeights(f"reading {index}", fact, "fetch the index again")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        names = sorted({shard for name in names for shard in _all_shards(name)})
    if not names:
        raise _no_weights(path)
    if missing := [name for name in names if not (path / name).is_file()]:
        fact = f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing)}"
        raise BrokenWeights(f"loading {path}", fact, "fetch the missing files")
    return [path / name for name in names]


def _all_shards(name: str) -> list[str]:
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
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BrokenWeights(asked, f"its header is not valid: {error}", "fetch the file again") from error
    if num_bytes < end:
        fact = f"its tensors need {end:,} bytes but the file has {num_bytes:,}"
        raise BrokenWeights(asked, fact, "the file is truncated: fetch it again")
    return shapes
