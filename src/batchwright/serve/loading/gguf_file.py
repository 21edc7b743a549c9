"""Reads a GGUF file: its metadata, its tensor table, and any tensor dequantised to float32.

The file is mapped, never copied whole; a tensor is dequantised when asked for. Everything the file claims about itself
(counts, lengths, offsets) is held against its real size first, so a truncated or hostile file raises `BrokenWeights`.
Nothing is cached: a float32 copy is several times as large as the file (docs/decisions/0003 has the argument).

Format: ggml docs/gguf.md (versions 2 and 3, little endian).
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading.gguf_blocks import BLOCK_KINDS, UNSUPPORTED_KINDS, BlockKind

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_NUM_DECODED_AT_ONCE = 32_000
"""Values. Temporaries then stay in cache, and torch runs each operation on the calling thread, since it splits from
32,768 values: thousands of parallel regions are slow where something else uses the cores."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies; `shape` is in torch's order (rows first), `start` counts from the start of the file."""

    shape: tuple[int, ...]
    kind: BlockKind
    start: int

    @property
    def num_bytes(self) -> int:
        """What the tensor takes in the file."""
        return prod(self.shape) // self.kind.values * self.kind.bytes


class GgufFile:
    """`metadata` by key (arrays as lists) and `tensors` by name. Raises BrokenWeights or UnsupportedModel when made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if not (num_bytes := path.stat().st_size):
                raise BrokenWeights(f"reading {path}", "the file is empty", "fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                self.metadata, self.tensors = _read_header(_Cursor(view, path), path)
        end = max((info.start + info.num_bytes for info in self.tensors.values()), default=0)
        if end > num_bytes:
            fact = f"its tensors need {end:,} bytes but the file has {num_bytes:,}"
            raise BrokenWeights(f"reading {path}", fact, "the file is truncated: fetch it again")
        self._bytes = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32, part: int | None = None) -> Tensor:
        """The named tensor dequantised in float32, rounded once to `dtype`, in a new buffer.

        `part`: of a tensor of more than two dimensions, what lies there along the first of them.
        """
        info = self.tensors[name]
        if part is not None:
            whole, shape = info, info.shape[1:]
            info = TensorInfo(shape, whole.kind, whole.start + part * whole.num_bytes // whole.shape[0])
        blocks = self._bytes[info.start : info.start + info.num_bytes].view(-1, info.kind.bytes)
        values = torch.empty(len(blocks), info.kind.values, dtype=dtype)
        rows = _NUM_DECODED_AT_ONCE // info.kind.values
        for start in range(0, len(blocks), rows):
            values[start : start + rows] = info.kind.decode(blocks[start : start + rows])
        return values.view(info.shape)


class _Cursor:
    """Reads little-endian values one after another and refuses to run past the end of the file."""

    def __init__(self, view: mmap.mmap, path: Path) -> None:
        self._view, self._path, self._size, self.at = view, path, len(view), 0

    def require(self, num_bytes: int) -> None:
        """Raise BrokenWeights unless so many bytes follow."""
        if self.at + num_bytes > self._size:
            fact = f"its header needs {self.at + num_bytes:,} bytes but the file has {self._size:,}"
            raise BrokenWeights(f"reading {self._path}", fact, "the file is truncated: fetch it again")

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        self.require(count * struct.calcsize(code))
        layout = struct.Struct(f"<{count}{code}")
        start, self.at = self.at, self.at + layout.size
        return layout.unpack_from(self._view, start)

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """A tight loop: a vocabulary and its merges are 100,000 strings."""
        self.require(8 * count)
        view, at, length_at, found = self._view, self.at, struct.Struct("<Q").unpack_from, []
        last = self._size - 8
        for _ in range(count):
            start = at + 8
            at = start + length_at(view, at)[0] if at <= last else self._size + 1
            if at > self._size:
                self.at = at
                self.require(0)
            found.append(str(view[start:at], "utf-8", "replace"))
        self.at = at
        return found


def _read_header(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic, version = bytes(cursor.scalars("B", 4)), cursor.scalar("I")
    if magic != b"GGUF" or version not in (2, 3):
        fact = f"it starts with {magic!r} and version {version}, not with b'GGUF' and version 2 or 3"
        raise UnsupportedModel(f"reading {path}", fact, "give a little-endian GGUF file of version 2 or 3")
    num_tensors, num_entries = cursor.scalars("Q", 2)
    metadata = {cursor.string(): _read_value(cursor, cursor.scalar("I"), path) for _ in range(num_entries)}
    table = [_read_tensor_row(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise BrokenWeights(f"reading {path}", f"general.alignment is {alignment!r}", "fetch the file again")
    data_start = -(-cursor.at // alignment) * alignment
    return metadata, {name: TensorInfo(shape, kind, data_start + offset) for name, shape, kind, offset in table}


def _read_value(cursor: _Cursor, kind: int, path: Path, depth: int = 0) -> Any:
    if kind in _SCALARS:
        return cursor.scalar(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string()
    if kind != _ARRAY or depth == _MAX_NESTING:
        raise BrokenWeights(f"reading {path}", f"a metadata value has type {kind}", "fetch the file again")
    item_kind, count = cursor.scalar("I"), cursor.scalar("Q")
    if item_kind in _SCALARS:
        return list(cursor.scalars(_SCALARS[item_kind], count))
    if item_kind == _STRING:
        return cursor.strings(count)
    return [_read_value(cursor, item_kind, path, depth + 1) for _ in range(count)]


def _read_tensor_row(cursor: _Cursor, path: Path) -> tuple[str, tuple[int, ...], BlockKind, int]:
    """Name, shape, storage type, and offset from the start of the tensors' data."""
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if num_dims > 4:
        raise BrokenWeights(f"reading {path}", f"tensor {name} claims {num_dims} dimensions", "fetch the file again")
    shape = tuple(reversed(cursor.scalars("Q", num_dims)))
    code, offset = cursor.scalar("I"), cursor.scalar("Q")
    if code not in BLOCK_KINDS:
        known = ", ".join(kind.name for kind in BLOCK_KINDS.values())
        fact = f"tensor {name} has quantisation type {UNSUPPORTED_KINDS.get(code, code)}; supported are {known}"
        raise UnsupportedModel(f"reading {path}", fact, "convert the file to one of these, or load safetensors")
    kind = BLOCK_KINDS[code]
    if not shape or not all(shape) or shape[-1] % kind.values:
        fact = f"tensor {name} has shape {list(shape)}, not whole {kind.name} blocks of {kind.values}"
        raise BrokenWeights(f"reading {path}", fact, "fetch the file again")
    return name, shape, kind, offset
