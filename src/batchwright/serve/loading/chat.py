"""Renders chat templates, which come with the weights and are therefore foreign code, in Jinja's immutable sandbox.

A template sees what Hugging Face's renderer shows it, and nothing of Python. Its worst bombs (`range`, `*`, `**`) are
limited, but a template can still waste time, so serve models whose templates you have read.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, Undefined, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchwright.errors import BatchwrightError, RequestError, UnsupportedModel

Message = Mapping[str, Any]

_MAX_REPEATED = 100_000
_MAX_POWER = 64


class ChatTemplate:
    """One template's source, compiled when it is first rendered."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        special: Mapping[str, str],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt as text. `special` holds the special tokens by name.

        Raises RequestError where the template rejects the messages, UnsupportedModel where it does not compile or the
        sandbox refuses it.
        """
        asked = "rendering the chat template"
        _check_are_listed(messages, asked)
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special,
            )
        except BatchwrightError:
            raise
        except (SecurityError, OverflowError, RecursionError, MemoryError) as refusal:
            remedy = "review the template, or pass text or token ids instead of messages"
            raise UnsupportedModel(asked, f"the sandbox refuses it: {_told(refusal)}", remedy) from refusal
        except Exception as rejection:  # a template is foreign code: it can divide by zero, or fail in any other way
            fact = f"the template rejects these {len(messages)} messages: {_told(rejection)}"
            raise RequestError(asked, fact, "check the roles, their order and the contents") from rejection

    @cached_property
    def _template(self) -> Template:
        try:
            return _Sandbox().from_string(self._source)
        except Exception as error:  # Jinja compiles to Python, which has limits and errors of its own
            remedy = "repair the template, or pass text or token ids instead of messages"
            raise UnsupportedModel("compiling the chat template", _told(error), remedy) from error


def _check_are_listed(messages: object, asked: str) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        fact = f"the messages are a {type(messages).__name__}, not a list"
        raise RequestError(asked, fact, "give a list of messages, each with its role and content")


def _told(error: Exception) -> str:
    """Some errors have a name only, say MemoryError."""
    return str(error) or type(error).__name__


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for those who train it; here its text is text like any other."""

    tags = {"generation"}  # noqa: RUF012 -- as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates see what Hugging Face's see, and nothing of Python. `*` and `**` are limited, as `range` already is."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _local_time}

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


def _local_time(form: str) -> str:
    """Local time: a template tells the model what day it is where it runs."""
    return datetime.now().astimezone().strftime(form)


def _to_json(value: Any, *, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
