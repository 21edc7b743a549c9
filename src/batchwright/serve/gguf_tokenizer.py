"""Rebuilds a tokenizer from the vocabulary, merges and token types in a GGUF file's metadata.

The file names its rules for splitting a text into words but does not hold them; they are here for byte-level BPE as
SmolLM, GPT-2 and Llama 3 use it. Any other kind is refused: wrong rules would give wrong ids without a sign.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.tokenizer import Tokenizer, default_template

_ASKED = "building the tokenizer of a GGUF file"
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF: specials such as BOS, and words somebody added
_LLAMA3_SPLIT = (  # published in Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds a byte-level BPE tokenizer. Raises UnsupportedModel for other kinds, and for rules we do not know.

    BrokenWeights where its parts contradict each other.
    """
    kind, rules = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    known_rules = isinstance(rules, str) and rules in _SPLITS
    if kind != "gpt2" or not known_rules or not _all_strings(tokens) or not _all_strings(merges):
        fact = f"it is of kind {kind!r} with split rules {rules!r}; supported are 'gpt2' with {', '.join(_SPLITS)}"
        remedy = "pass token ids, or load the safetensors checkpoint with its tokenizer.json"
        raise UnsupportedModel(_ASKED, fact, remedy)
    core = Core(_byte_pairs(tokens, merges, ignore_merges=rules in _LLAMA3))
    core.pre_tokenizer = _SPLITS[str(rules)]()
    core.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [0] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        fact = f"tokenizer.ggml.token_type is not a list of {len(tokens):,} types, one for each token"
        raise BrokenWeights(_ASKED, fact, "fetch the file again")
    core.add_special_tokens(_added_tokens(tokens, types, _CONTROL))
    core.add_tokens(_added_tokens(tokens, types, _USER_DEFINED))
    special = _special_tokens(metadata, tokens)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", rules in _LLAMA3))
    _frame(core, special, add_bos=add_bos, add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token")))
    return Tokenizer(core, special, default_template(metadata.get("tokenizer.chat_template"), _ASKED))


def _byte_pairs(tokens: Sequence[str], merges: Sequence[str], *, ignore_merges: bool) -> models.BPE:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=vocab, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception, say for merges of unknown tokens
        raise BrokenWeights(_ASKED, str(error), "fetch the file again") from error


def _frame(core: Core, special: Mapping[str, str], *, add_bos: bool, add_eos: bool) -> None:
    """Frames every text in BOS or EOS."""
    ends = [special.get("bos_token") if add_bos else None, special.get("eos_token") if add_eos else None]
    before, after = ([token] if token and core.token_to_id(token) is not None else [] for token in ends)
    core.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, core.token_to_id(token)) for token in dict.fromkeys(before + after)],
    )


def _all_strings(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _added_tokens(tokens: Sequence[str], types: Sequence[int], wanted: int) -> list[AddedToken]:
    special = wanted == _CONTROL
    chosen = (token for token, kind in zip(tokens, types, strict=True) if kind == wanted)
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
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
