"""How GGUF stores numbers: plain, or quantised in blocks that share scales, and what each block means in float32.

A value is d*q, and with a minimum d*q + m or d*q - m, each operation rounded to float32, as ggml's reference rows are.
In the kinds that end in K a block of 256 has a scale for each 32 or 16 of its values, itself of 6 or 8 bits.
Layouts: the block structs of ggml-common.h.

Shapes: B blocks, of as many bytes or values as their kind has.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One storage type: `values` numbers take `bytes` bytes, and `decode` turns (blocks, bytes) into float32 rows."""

    name: str
    values: int
    bytes: int
    decode: Callable[[Tensor], Tensor]


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: _reinterpret(blocks, dtype).float()


def _reinterpret(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as `dtype`; copied, since blocks lie at any alignment in the file."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def _q8_0(blocks: Tensor) -> Tensor:
    """f16 d, then 32 int8 q: d*q."""
    scale = _reinterpret(blocks[:, :2], torch.float16).float()
    return _reinterpret(blocks[:, 2:], torch.int8).float().mul_(scale)


def _q4_0(blocks: Tensor) -> Tensor:
    """f16 d, then 16 bytes with q of value j in the low and of value j+16 in the high nibble: d*(q - 8)."""
    scale = _reinterpret(blocks[:, :2], torch.float16).float()
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(scale)


def _q4_1(blocks: Tensor) -> Tensor:
    """f16 d, f16 m, then nibbles as in Q4_0: d*q + m."""
    scales = _reinterpret(blocks[:, :4], torch.float16).float()
    return _nibbles(blocks[:, 4:]).float().mul_(scales[:, :1]).add_(scales[:, 1:])


def _q4_k(blocks: Tensor) -> Tensor:
    """f16 d, f16 m, 12 bytes of scales and minima, then four times 32 bytes with nibbles as in Q4_0: d*s*q - m*t."""
    scale_B8, least_B8 = _scales_and_minima(blocks[:, :16])
    stored = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32).float()
    return stored.mul_(scale_B8[..., None]).sub_(least_B8[..., None]).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, but for 32 bytes before the nibbles: bit j of byte i is the fifth of value i of the j-th 32."""
    scale_B8, least_B8 = _scales_and_minima(blocks[:, :16])
    fifth = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    stored = (_nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32) | fifth << 4).float()
    return stored.mul_(scale_B8[..., None]).sub_(least_B8[..., None]).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of nibbles, 64 of two bits more, 16 int8 s, f16 d: d*s*(q - 32).

    Each half of the values has 64 bytes whose low nibbles come first, and 32 bytes whose lowest pairs of bits do.
    """
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 2, 4, 32)
    pairs = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> pairs) & 3
    scale = _reinterpret(blocks[:, 208:], torch.float16).float() * _reinterpret(blocks[:, 192:208], torch.int8).float()
    stored: Tensor = (low | high << 4).float()
    return stored.sub_(32).view(-1, 16, 16).mul_(scale[..., None]).flatten(1)


def _nibbles(packed: Tensor) -> Tensor:
    """The low ones along the last dimension, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _scales_and_minima(head: Tensor) -> tuple[Tensor, Tensor]:
    """Eight of each: the first four of 6 bits a byte, and what is left of these bytes joins nibbles for the others."""
    factors = _reinterpret(head[:, :4], torch.float16).float()
    scales, minima, nibbles = head[:, 4:8], head[:, 8:12], head[:, 12:]
    scale_B8 = torch.cat((scales & 63, (nibbles & 15) | scales >> 6 << 4), dim=1)
    least_B8 = torch.cat((minima & 63, (nibbles >> 4) | minima >> 6 << 4), dim=1)
    return factors[:, :1] * scale_B8.float(), factors[:, 1:] * least_B8.float()


BLOCK_KINDS = {
    0: BlockKind("F32", 1, 4, _plain(torch.float32)),
    1: BlockKind("F16", 1, 2, _plain(torch.float16)),
    2: BlockKind("Q4_0", 32, 18, _q4_0),
    3: BlockKind("Q4_1", 32, 20, _q4_1),
    8: BlockKind("Q8_0", 32, 34, _q8_0),
    12: BlockKind("Q4_K", 256, 144, _q4_k),
    13: BlockKind("Q5_K", 256, 176, _q5_k),
    14: BlockKind("Q6_K", 256, 210, _q6_k),
    30: BlockKind("BF16", 1, 2, _plain(torch.bfloat16)),
}
"""By the number that files write."""

UNSUPPORTED_KINDS = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 20: "IQ4_NL", 23: "IQ4_XS"}
"""Of the others, those one may meet."""
