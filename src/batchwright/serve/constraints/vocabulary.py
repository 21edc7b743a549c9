"""A tokenizer's tokens as the bytes that they add to a text: what a grammar over text says of tokens rests on it.

The bytes are those of our own decoding (`tokenizer.py`); for byte-level tokenizers they come from the same function.
Tokens without text (special ones, rows of the embedding that the tokenizer has no token for) have none, so that no
grammar over text ever allows them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Core

from batchwright.errors import UnsupportedModel
from batchwright.serve.constraints.guidance import Vocabulary
from batchwright.serve.loading.tokenizer import Tokenizer, token_bytes

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary_of(tokenizer: Tokenizer, num_vocab: int, end_ids: Sequence[int]) -> Vocabulary:
    """For a model over `num_vocab` tokens. Raises UnsupportedModel where decoding is not made of tokens' bytes."""
    core = tokenizer.core
    bytes_of, strips_space = _reader(core)
    silent = {i for i, token in core.get_added_tokens_decoder().items() if token.special} | set(end_ids)
    token_bytes = [b""] * num_vocab
    for token, index in core.get_vocab(with_added_tokens=True).items():
        if index < num_vocab and index not in silent:
            token_bytes[index] = bytes_of(token)
    return Vocabulary(token_bytes, sorted(i for i in set(end_ids) if i < num_vocab), strips_space)


def _reader(core: Core) -> tuple[Callable[[str], bytes], bool]:
    """What makes bytes of a token's name, and whether a text loses its leading space."""
    decoder: Mapping[str, Any] = {} if core.decoder is None else json.loads(core.decoder.__getstate__())
    steps: Sequence[Mapping[str, Any]] = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return token_bytes, False
    if kinds == ["Metaspace"]:
        space = str(steps[0]["replacement"])
        return lambda token: token.replace(space, " ").encode(), steps[0].get("prepend_scheme") != "never"
    spaces = [
        step["pattern"].get("String") for step in steps if step.get("type") == "Replace" and step["content"] == " "
    ]
    if (
        "ByteFallback" not in kinds
        or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        or len(spaces) != 1
    ):
        fact = (
            f"its tokenizer decodes by {', '.join(map(str, kinds)) or 'nothing'}, where a token has no bytes of its own"
        )
        raise UnsupportedModel(
            "constraining a model's output", fact, "use a model with a byte-level or byte-fallback BPE"
        )
    stripped = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
    return lambda token: _or_byte(token, spaces[0]), stripped == [(" ", 1, 0)]


def _or_byte(token: str, space: str) -> bytes:
    if byte := _BYTE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(space, " ").encode()
