"""Text to token ids and back: encoding by the `tokenizers` library, and decoding of a stream one token at a time.

A `StreamDecoder` turns ids into text in constant time per token and never emits half a character: its pieces joined
are exactly `decode` of all ids. Where a decoder treats tokens as bytes that is UTF-8 decoding; for any other kind the
last settled token is decoded again with the new ones, and the growth is emitted.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Core

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading.chat import ChatTemplate, Message
from batchwright.serve.loading.checkpoint import read_json, read_text


@dataclass(frozen=True)
class Tokenizer:
    """A model's tokenizer and chat template.

    `core` is the library's. `special` holds the tokens a template may write, by name (`bos_token`, `eos_token`, ...).
    """

    core: Core
    special: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` puts BOS or EOS where the model wants them: leave it on for plain text, off for the output
        of a chat template, which writes its own.
        """
        ids: list[int] = self.core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD."""
        return str(self.core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A new decoder for one request's output."""
        hidden = self._special_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return _ByteLevelStream(self.core, hidden)
        return _WindowStream(self.core, hidden)

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt as text; encode it with `add_special_tokens=False`.

        Raises RequestError where the template rejects the messages, UnsupportedModel where there is no template or the
        sandbox refuses it.
        """
        if self._template is None:
            remedy = "use a chat model, or pass text or token ids instead of messages"
            raise UnsupportedModel("rendering the chat template", "the model has none", remedy)
        return self._template.render(messages, tools, self.special, add_generation_prompt=add_generation_prompt)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self.core.token_to_id(token)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        return isinstance(self.core.decoder, decoders.ByteLevel)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)


class StreamDecoder(Protocol):
    """Ids in, text out. All pieces and the last `finish` joined are the decoded text."""

    def push(self, token_id: int) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is left: replacement characters for bytes that never became one."""
        ...


class _ByteLevelStream:
    """Each token is some bytes, so decoding is UTF-8 decoding, one token at a time."""

    def __init__(self, core: Core, hidden: frozenset[int]) -> None:
        self._core, self._hidden = core, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._core.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """For any other decoder, say sentencepiece's: decodes the last settled token with the new ones, emits the growth.

    Only a run of byte tokens (`<0xF0>`) is held back, until it ends: whether it is text depends on the whole of it.
    """

    def __init__(self, core: Core, hidden: frozenset[int]) -> None:
        self._core, self._hidden = core, hidden
        self._settled: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        token = None if token_id in self._hidden else self._core.id_to_token(token_id)
        if token is None:
            return ""
        self._pending.append(token_id)
        return "" if _is_byte_token(token) else self.finish()

    def finish(self) -> str:
        if not self._pending:
            return ""
        before = self._core.decode(self._settled, skip_special_tokens=False)
        after = self._core.decode(self._settled + self._pending, skip_special_tokens=False)
        self._settled, self._pending = self._pending[-1:], []
        return str(after[len(before) :])


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the others are characters 256 and up."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


@lru_cache(maxsize=1 << 18)
def token_bytes(token: str) -> bytes:
    """The bytes that a token spells; one outside the alphabet (some added tokens) stands for its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face checkpoint, or None where it has no `tokenizer.json`.

    That file alone says which tokens frame a text: as in transformers 5, `add_bos_token` in tokenizer_config.json has
    no say. Nor is a text cut or padded, whatever lengths the file keeps from its training.
    """
    if not (path / "tokenizer.json").is_file():
        return None
    try:
        core = Core.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise BrokenWeights(f"reading {path / 'tokenizer.json'}", str(error), "fetch the file again") from error
    core.no_truncation()
    core.no_padding()
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    special = _special_tokens(_with_older_file(path, config))
    core.add_special_tokens(_to_be_special(core, special.values()))
    file = path / "chat_template.jinja"
    asked = f"reading {path / 'tokenizer_config.json'}"
    template = read_text(file) if file.is_file() else default_template(config.get("chat_template"), asked)
    return Tokenizer(core, special, template)


def _with_older_file(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """special_tokens_map.json has the last word where the config is older than the list of added tokens in it."""
    older = path / "special_tokens_map.json"
    return {**config, **read_json(older)} if "added_tokens_decoder" not in config and older.is_file() else config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, written as a string or as an object with its `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _to_be_special(core: Core, tokens: Iterable[str]) -> list[AddedToken]:
    """Those of `tokens` that tokenizer.json does not hold as special ones, which their names make them."""
    added = {token.content: token for token in core.get_added_tokens_decoder().values()}
    wanted = [added.get(token, AddedToken(token, normalized=False)) for token in dict.fromkeys(tokens)]
    return [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=True,
        )
        for token in wanted
        if not token.special
    ]


def default_template(value: Any, asked: str) -> str | None:
    """A template, or of a list of named ones the default. Raises BrokenWeights for what is neither."""
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    if value is None or isinstance(value, str):
        return value
    fact = f"its chat template is a {type(value).__name__}, neither text nor a list of named templates"
    raise BrokenWeights(asked, fact, "correct the chat template, or leave it out")
