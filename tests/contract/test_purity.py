"""Decisions are pure: policy reaches no clock, no randomness, no file, no thread, and can't by accident."""

import ast
from collections.abc import Iterator

import pytest

from tests.contract.rules import PACKAGE, POLICY_EXTRAS, REPOSITORY, SOURCE, imports_of, module_name

PURE = {
    *("abc", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq", "itertools"),
    *("math", "numbers", "operator", "statistics", "types", "typing", "__future__"),
}
"""The whole of the standard library that policy may import. Another module joins if it can't reach the world either."""

IMPURE_CALLS = {
    **dict.fromkeys(("open", "input", "print", "breakpoint"), "reaches the world"),
    **dict.fromkeys(("exec", "eval", "compile", "__import__"), "runs code that this test can't read"),
    **dict.fromkeys(("hash", "id"), "differs from one process to the next"),
}
WORLDLY_NUMPY = {"random", "load", "save", "fromfile", "memmap", "datetime64"}


def impurities(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and complaint for everything in `source` that could make equal events give different plans."""
    allowed = PURE | {PACKAGE} | set(POLICY_EXTRAS.get(module.rpartition(".")[2], ()))
    for found in imports_of(source, module, is_package=module.count(".") == 1):
        if found.name.partition(".")[0] not in allowed:
            yield found.line, f"imports {found.name}; pure are {', '.join(sorted(PURE))}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
            yield node.lineno, f"calls {node.func.id}(), which {IMPURE_CALLS[node.func.id]}"
        elif isinstance(node, ast.Global):
            yield node.lineno, "changes module state; state belongs to an object"
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await):
            yield node.lineno, "is asynchronous; drivers wait, policies answer"
        elif (
            isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in {"np", "numpy"}
            and node.attr in WORLDLY_NUMPY
        ):
            yield node.lineno, f"uses numpy.{node.attr}; take the numbers as an argument"


def test_policy_is_pure() -> None:
    modules = sorted((SOURCE / "policy").rglob("*.py"))
    assert modules
    broken = [
        f"{path.relative_to(REPOSITORY)}:{line}: {complaint}"
        for path in modules
        for line, complaint in impurities(path.read_text(), module_name(path))
    ]
    assert not broken, "\n" + "\n".join(broken)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import random",
        "import logging",
        "import threading",
        "import asyncio",
        "import os",
        "from io import StringIO",
        "from pathlib import Path",
        "import numpy",
        "def plan():\n    from time import monotonic",
        "key = hash(request)",
        "print(plan)",
        "def count():\n    global total",
        "async def plan(): ...",
    ],
)
def test_every_impurity_is_reported(source: str) -> None:
    assert list(impurities(source, "batchwright.policy.static"))


def test_packing_may_use_numpy_but_not_its_randomness() -> None:
    source = "import numpy as np\nx = np.zeros(3)\ny = np.random.default_rng()\n"
    assert [line for line, _ in impurities(source, "batchwright.policy.packing")] == [3]


def test_pure_code_passes() -> None:
    source = "import heapq\nfrom dataclasses import dataclass\nfrom .types import Request\nkey = request.id\n"
    assert not list(impurities(source, "batchwright.policy.static"))
