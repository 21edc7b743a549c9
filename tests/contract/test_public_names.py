"""What users may import is listed once, documented, and changes only on purpose."""

import ast
import importlib
import inspect
from pathlib import Path

import batchwright
from tests.contract.rules import REPOSITORY, SOURCE
from tests.contract.snapshots import assert_unchanged

MODULES = sorted(SOURCE.rglob("*.py"))


def test_the_public_names_are_as_recorded() -> None:
    names = "".join(f"{name}\n" for name in batchwright.__all__)
    assert_unchanged(Path(__file__).parent / "public_names.txt", names)


def test_every_public_name_leads_to_something_documented() -> None:
    for name in batchwright.__all__:
        value = getattr(importlib.import_module("batchwright"), name)
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"batchwright.{name} has no docstring"


def test_every_module_says_what_it_decides() -> None:
    """An empty `__init__` has nothing to say."""
    silent = [
        str(path.relative_to(REPOSITORY))
        for path in MODULES
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"modules without a docstring: {', '.join(silent)}"
