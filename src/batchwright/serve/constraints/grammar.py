"""Writes a constraint as a grammar in llguidance's language; refuses what would be passed over or break our promises.

Promises: the output's text is in the language, whatever tokens spell it. So no grammar names tokens, and nothing is
forced: a token is ruled out only if no text of the language could go on with it. JSON may be written with one space, or
a line break and some indentation, wherever it may have whitespace: no model can fill its reply with blanks.
Everything here is as long as the constraint, and runs in the process that vets it (`vetting.py`).
"""

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from batchwright.errors import RequestError
from batchwright.serve.constraints.constraint import Constraint, Kind
from batchwright.serve.constraints.schema_rules import check_schema

WHITESPACE = r" |\n[ \t]{0,20}"
"""Between two parts of a JSON text, where there is any."""
ESCAPES = 'nrbtf\\"'
"""Every character has one spelling: by \\u0061 a free property could take the name of one that is not free."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_TOKEN = re.compile(r'(%json\s*)|"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)
_REFUSED = (
    (re.compile("<"), "it names tokens by <...>", "write the text itself, in quotes"),
    (
        re.compile(r"\[[^\]]*\b(max_tokens|temperature|stop|stop_capture|capture)\b"),
        "it sets an attribute that has no effect here",
        "leave max_tokens, temperature, stop and capture out; lazy and suffix are possible",
    ),
    (re.compile(r"%llguidance\s*\{[^}]*[^}\s]"), "it sets options of llguidance", "leave %llguidance out"),
)


def grammar_of(constraint: Constraint, *, after_space: bool) -> str:
    """What llguidance compiles; `after_space`: a space comes first, which decoding will drop.

    Raises RequestError for what is not of the constraint's kind, or refused.
    """
    try:
        body = _BODIES[constraint.kind](constraint.text)
    except RecursionError as error:
        fact = "it is nested deeper than can be read"
        raise RequestError(constraint.asked, fact, "give its inner parts names of their own") from error
    if not after_space:
        return body + _OPTIONS
    inner = {"name": "output", "lark_grammar": body}
    return json.dumps({"grammars": [{"lark_grammar": f'start: " " @output{_OPTIONS}'}, inner]})


def _of_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        fact = f"it is not JSON: {error}"
        raise RequestError("constraining output by a json schema", fact, "correct it") from error
    return f"start: %json {_with_options(schema)}"


def _with_options(schema: Any) -> str:
    check_schema(schema)
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}}
    return json.dumps(schema)


def _of_any_object(_: str) -> str:
    return f"start: %json {_with_options({'type': 'object'})}"


def _of_regex(pattern: str) -> str:
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        fact = "it ends with a backslash that escapes nothing"
        raise RequestError("constraining output by a regex", fact, "write two of them for a backslash")
    return f"start: /{regex_to_lark(pattern, 'dw')}/"


def _of_choice(text: str) -> str:
    escaped = ("".join(map(_escaped, option)) for option in json.loads(text))
    return f"start: /{'|'.join(escaped)}/"


def _escaped(character: str) -> str:
    return character if character.isalnum() or ord(character) > 127 else f"\\x{ord(character):02x}"


def _of_grammar(text: str) -> str:
    asked = "constraining output by a grammar"
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter raises bare Exception for every kind of bad grammar
        fact = f"it has no Lark rule start, and as GBNF it cannot be read: {str(error)[:200]}"
        raise RequestError(asked, fact, "correct it") from error
    written, code, at = [], [], 0
    while found := _TOKEN.search(lark, at):
        code.append(lark[at : found.start()])
        written += [code[-1], found[0]]
        at = found.end()
        if found[1]:
            schema, at = _schema_at(lark, at)
            written.append(schema)
    code.append(lark[at:])
    for pattern, fact, remedy in _REFUSED:
        if pattern.search(" ".join(code)):
            raise RequestError(asked, fact, remedy)
    return "".join([*written, code[-1]])


def _schema_at(lark: str, at: int) -> tuple[str, int]:
    """A JSON schema within a grammar, held to our rules, and where it ends."""
    try:
        schema, end = json.JSONDecoder().raw_decode(lark, at)
    except ValueError as error:
        fact = f"what follows %json is not JSON: {error}"
        raise RequestError("constraining output by a grammar", fact, "correct it") from error
    return _with_options(schema), end


_BODIES: Mapping[Kind, Callable[[str], str]] = MappingProxyType(
    {
        "json_schema": _of_schema,
        "json_object": _of_any_object,
        "regex": _of_regex,
        "grammar": _of_grammar,
        "choice": _of_choice,
    }
)
