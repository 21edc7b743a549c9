"""Text to token ids and back: encoding, streaming decoding, and chat templates.

Encoding is the `tokenizers` library's, from a `tokenizer.json` or rebuilt from a GGUF file's vocabulary. A
`StreamDecoder` turns ids into text one at a time, in constant time per token, and never emits half a character: its
pieces joined are exactly `decode` of all ids. Chat templates come with the weights and are therefore foreign code: they
are rendered in Jinja's immutable sandbox. Its worst bombs (`range`, `*`, `**`) are limited, but a template can still
waste time, so serve models whose templates you have read.
"""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from jinja2 import Template, TemplateError, Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from batchwright.errors import BrokenWeights, RequestError, UnsupportedModel

Message = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_LLAMA3_SPLIT = (  # published in Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_REPEATED = 100_000
_MAX_POWER = 64


@dataclass(frozen=True)
class Tokenizer:
    """`special` names the tokens a template may write (`bos_token`, `eos_token`, ...)."""

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
        return str(self.core.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def stream(self, *, skip_special_tokens: bool = False) -> "StreamDecoder":
        """A fresh decoder for one request's output."""
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
        asked = "rendering the chat template"
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except (SecurityError, OverflowError) as refusal:
            remedy = "review the template, or pass text or token ids instead of messages"
            raise UnsupportedModel(asked, f"the sandbox refuses it: {refusal}", remedy) from refusal
        except (TemplateError, TypeError, ValueError, LookupError) as rejection:
            fact = f"the template rejects these {len(messages)} messages: {rejection}"
            raise RequestError(asked, fact, "check the roles, their order and the contents") from rejection

    @property
    def num_tokens(self) -> int:
        return int(self.core.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int | None:
        return self.core.token_to_id(token)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _is_byte_level(self) -> bool:
        return isinstance(self.core.decoder, decoders.ByteLevel)

    @cached_property
    def _template(self) -> Template:
        if self.chat_template is None:
            remedy = "use a chat model, or pass text or token ids instead of messages"
            raise UnsupportedModel("rendering the chat template", "the model has none", remedy)
        try:
            return _Sandbox().from_string(self.chat_template)
        except TemplateError as error:
            remedy = "repair the template, or pass text or token ids instead of messages"
            raise UnsupportedModel("compiling the chat template", str(error), remedy) from error


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
        return "" if token is None else self._utf8.decode(_token_bytes(token))

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


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """A token that is not spelled in the alphabet (some added tokens) stands for its own text."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates see what Hugging Face's see, and nothing of Python. `*` and `**` are limited, as `range` already is."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """At once, where Jinja's own waits until the value is used."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*" and isinstance(left, Sequence) != isinstance(right, Sequence):
            items, times = (left, right) if isinstance(left, Sequence) else (right, left)
            if isinstance(times, int) and len(items) * times > _MAX_REPEATED:
                raise OverflowError(f"it repeats {len(items):,} items {times:,} times, over {_MAX_REPEATED:,} in all")
        if operator == "**" and isinstance(right, int | float) and right > _MAX_POWER:
            raise OverflowError(f"it raises to the power {right:,}, over {_MAX_POWER}")
        return super().call_binop(context, operator, left, right)


def _now(form: str) -> str:
    """Local time: a template tells the model what day it is where it runs."""
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def from_directory(path: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face checkpoint, or None where it has no `tokenizer.json`.

    That file alone says which tokens frame a text: as in transformers 5, `add_bos_token` in tokenizer_config.json has
    no say.
    """
    if not (path / "tokenizer.json").is_file():
        return None
    try:
        core = Core.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise BrokenWeights(f"reading {path / 'tokenizer.json'}", str(error), "fetch the file again") from error
    config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    file = path / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else _default_template(config.get("chat_template"))
    return Tokenizer(core, _special_tokens(config), template)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or BrokenWeights."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BrokenWeights(f"reading {path}", str(error), "fetch the file again") from error
    if not isinstance(value, dict):
        raise BrokenWeights(f"reading {path}", f"it holds a {type(value).__name__}, not an object", "fetch it again")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, written as a string or as an object with its `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _default_template(value: Any) -> str | None:
    """A template, or of a list of named ones the default."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer. Raises UnsupportedModel for other kinds, and for rules we do not know."""
    kind, rules = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if kind != "gpt2" or rules not in _SPLITS or not _all_strings(tokens) or not _all_strings(merges):
        fact = f"it is of kind {kind!r} with split rules {rules!r}; supported are 'gpt2' with {', '.join(_SPLITS)}"
        remedy = "pass token ids, or load the safetensors checkpoint with its tokenizer.json"
        raise UnsupportedModel("building the tokenizer of a GGUF file", fact, remedy)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = Core(models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules in _LLAMA3))
    core.pre_tokenizer = _SPLITS[rules]()
    core.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", ())
    core.add_special_tokens(_added(tokens, types, _CONTROL))
    core.add_tokens(_added(tokens, types, _USER_DEFINED))
    special = _special_of_gguf(metadata, tokens)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", rules in _LLAMA3))
    _wrap(core, special, add_bos=add_bos, add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token")))
    return Tokenizer(core, special, metadata.get("tokenizer.chat_template"))


def _wrap(core: Core, special: Mapping[str, str], *, add_bos: bool, add_eos: bool) -> None:
    """Frames every text in BOS or EOS."""
    ends = [special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None]
    before, after = ([token] if token and core.token_to_id(token) is not None else [] for token in ends)
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, core.token_to_id(token)) for token in dict.fromkeys(before + after)],
    )


def _all_strings(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _added(tokens: Sequence[str], types: Sequence[int], wanted: int) -> list[AddedToken]:
    special = wanted == _CONTROL
    chosen = (token for token, kind in zip(tokens, types, strict=False) if kind == wanted)
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _special_of_gguf(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _split_digits() -> pre_tokenizers.PreTokenizer:
    """Every digit by itself, then GPT-2's rules: SmolLM's tokenizer.json."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS = {"smollm": _split_digits, "gpt-2": _split_gpt2} | dict.fromkeys(_LLAMA3, _split_llama3)
