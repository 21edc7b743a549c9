"""The form that an output takes: a JSON schema's, any JSON object, a regular expression's, a grammar's, or a choice.

A `Constraint` is what a client asked for, as text: hashable, so that what was compiled for it is found again, and of
bounded size. Whether it can be fulfilled, and how, is `compiler.py`'s business.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from batchwright.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]

MAX_CHARACTERS: Mapping[Kind, int] = MappingProxyType(
    {"json_schema": 1 << 16, "json_object": 0, "regex": 1 << 13, "grammar": 1 << 14, "choice": 1 << 16}
)
"""Of its text. What a text of this size costs at most is bounded elsewhere; this keeps refusals cheap."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Made by one of its class methods, which raise RequestError for what is too large or of the wrong type.

    `text`: the schema or the list of choices as JSON, the regular expression, or the grammar.
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in MAX_CHARACTERS:
            kinds = ", ".join(MAX_CHARACTERS)
            raise RequestError(f"constraining output by a {self.kind!r:.80}", f"there are {kinds}", "use one of these")
        if not isinstance(self.text, str):
            raise RequestError(self.asked, f"{self.text!r:.80} is no text", "use the class method of that name")
        most = MAX_CHARACTERS[self.kind]
        if len(self.text) > most:
            fact = f"it has {len(self.text):,} characters, and at most {most:,} are taken"
            raise RequestError(self.asked, fact, "make it shorter")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(self.asked, f"it is not Unicode text: {error}", "leave lone surrogates out") from error

    @property
    def asked(self) -> str:
        """How errors name it."""
        return f"constraining output by a {self.kind.replace('_', ' ')}"

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Constraint":
        """JSON that the schema (Draft 2020-12; a string is its text) allows, with its properties in the given order."""
        return cls("json_schema", schema if isinstance(schema, str) else _as_json("json_schema", schema))

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        r"""Text that the pattern matches as a whole. Rust's syntax; \d and \w are ASCII; no look-around."""
        return cls("regex", _checked("regex", pattern))

    @classmethod
    def grammar(cls, grammar: str) -> "Constraint":
        """Text of a context-free grammar: in llguidance's variant of Lark, or llama.cpp's GBNF."""
        return cls("grammar", _checked("grammar", grammar))

    @classmethod
    def choice(cls, options: Iterable[str]) -> "Constraint":
        """One of `options`."""
        if isinstance(options, str) or not isinstance(options, Iterable):
            raise RequestError(
                "constraining output by a choice", f"{options!r:.80} is no list", "give a list of strings"
            )
        listed = [_checked("choice", option) for option in options]
        if not listed:
            raise RequestError("constraining output by a choice", "there are no options", "give at least one")
        return cls("choice", _as_json("choice", listed))


def _checked(kind: Kind, text: object) -> str:
    if isinstance(text, str) and text:
        return text
    raise RequestError(f"constraining output by a {kind}", f"{text!r} is no text", "give a string that is not empty")


def _as_json(kind: Kind, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        asked = f"constraining output by a {kind.replace('_', ' ')}"
        raise RequestError(asked, f"it is not JSON: {error}", "give what JSON can hold") from error
