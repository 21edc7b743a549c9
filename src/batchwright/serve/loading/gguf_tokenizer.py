"""Rebuilds a tokenizer from the vocabulary, merges and token types in a GGUF file's metadata.

The file names its rules for splitting a text into words but does not hold them; they are here for byte-level BPE as
SmolLM, GPT-2, Llama 3, Qwen and Mistral use it, and for sentencepiece's pieces. Any other kind is refused: wrong rules
would give wrong ids without a sign. Pieces come without merges: any two that make a third may merge, the likeliest
first, which is how sentencepiece applies them (its `bpe_model.cc`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Core

from batchwright.errors import BrokenWeights, UnsupportedModel
from batchwright.serve.loading.tokenizer import Tokenizer, default_template

_ASKED = "building the tokenizer of a GGUF file"
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF: specials such as BOS, and words somebody added
_NEVER_JOINED = (2, _CONTROL, 6)  # nor are the unknown, and bytes
_SPACE = "\u2581"  # how pieces spell a space


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Raises UnsupportedModel for kinds and rules that we do not know, BrokenWeights where parts contradict others."""
    kind, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    rules = _RULES.get(name) if isinstance(name, str) else None
    if kind == "llama" and _all_strings(tokens):
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        core, adds_bos = _of_pieces(metadata, tokens), True
    elif kind == "gpt2" and rules and _all_strings(tokens) and _all_strings(merges):
        core, adds_bos = _of_bytes(tokens, merges, rules), rules.adds_bos
    else:
        fact = f"it is of kind {kind!r} with split rules {name!r}; supported are 'llama', and 'gpt2' with "
        remedy = "pass token ids, or load the safetensors checkpoint with its tokenizer.json"
        raise UnsupportedModel(_ASKED, fact + ", ".join(_RULES), remedy)
    types = _one_each(metadata, "token_type", tokens)
    core.add_special_tokens(_added_tokens(tokens, types, _CONTROL))
    core.add_tokens(_added_tokens(tokens, types, _USER_DEFINED))
    special = _special_tokens(metadata, tokens)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    _frame(core, special, add_bos=add_bos, add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token")))
    return Tokenizer(core, special, default_template(metadata.get("tokenizer.chat_template"), _ASKED))


def _one_each(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> list[Any]:
    """One value for each token; zeros where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{key}", [0] * len(tokens))
    if not isinstance(values, list) or len(values) != len(tokens):
        fact = f"tokenizer.ggml.{key} is not a list of {len(tokens):,} values, one for each token"
        raise BrokenWeights(_ASKED, fact, "fetch the file again")
    return values


def _of_bytes(tokens: Sequence[str], merges: Sequence[str], rules: "_Rules") -> Core:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    core = _core(tokens, pairs, ignore_merges=rules.ignores_merges)
    if rules.composes:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = rules.split()
    core.decoder = decoders.ByteLevel()
    return core


def _of_pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Core:
    """Of Gemma's the earlier are the likelier, whatever their scores say."""
    types, scores = _one_each(metadata, "token_type", tokens), _one_each(metadata, "scores", tokens)
    if str(metadata.get("general.architecture")).startswith("gemma"):
        scores = [-i for i in range(len(tokens))]
    joinable = [i for i, kind in enumerate(types) if kind not in _NEVER_JOINED]
    pairs = [pair for _, _, pair in sorted(_possible_merges(tokens, scores, joinable), reverse=True)]
    unknown = _special_tokens(metadata, tokens).get("unk_token")
    core = _core(tokens, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    begins = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaced = normalizers.Replace(" ", _SPACE)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaced]) if begins else spaced
    joined: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)] if begins else joined)
    return core


def _possible_merges(
    tokens: Sequence[str], scores: Sequence[float], joinable: Sequence[int]
) -> Iterator[tuple[float, int, tuple[str, str]]]:
    """Score of the whole, length of the left part, both parts: the largest is to be applied first."""
    known = set(tokens)
    for i in joinable:
        token = tokens[i]
        for middle in range(1, len(token)):
            if token[:middle] in known and token[middle:] in known:
                yield scores[i], middle, (token[:middle], token[middle:])


def _core(tokens: Sequence[str], pairs: list[tuple[str, str]], **options: Any) -> Core:
    try:
        return Core(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, **options))
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


class _Rules(NamedTuple):
    """`composes`: letters with their marks. `ignores_merges`: a word that is a token is that token."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    adds_bos: bool = False
    composes: bool = False
    ignores_merges: bool = False


def _split_digits() -> pre_tokenizers.PreTokenizer:
    """Every digit by itself, then GPT-2's rules: SmolLM's tokenizer.json."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def split() -> pre_tokenizers.PreTokenizer:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return split


# As the models' makers published them, in their tokenizer.json.
_ENDINGS, _LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|", r"[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3_SPLIT = rf"{_ENDINGS}{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN_SPLIT = rf"{_ENDINGS}{_LETTERS}\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN_SPLIT = (
    rf"{_LETTERS}{_UPPER}*{_LOWER}+|{_LETTERS}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Rules(_split_by(_LLAMA3_SPLIT), adds_bos=True, ignores_merges=True)
_RULES: dict[str, _Rules] = {
    "smollm": _Rules(_split_digits),
    "gpt-2": _Rules(_split_gpt2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "smaug-bpe": _LLAMA3._replace(adds_bos=False),  # SmolLM3
    "qwen2": _Rules(_split_by(_QWEN_SPLIT), composes=True),
    "tekken": _Rules(_split_by(_TEKKEN_SPLIT), adds_bos=True, ignores_merges=True),  # Mistral, from Nemo on
}
