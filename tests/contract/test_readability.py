"""One idea per file and per function: neither outgrows a sitting, and none hides behind a name that means nothing."""

import ast
import re
from collections.abc import Iterator

from tests.contract.rules import REPOSITORY, SOURCE

MODULES = sorted(SOURCE.rglob("*.py"))
KERNELS = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".cpp", ".h"))
MAX_LINES_OF_MODULE = 600
MAX_COLUMNS = 120  # ruff sees to Python's
MAX_LINES_OF_FUNCTION = 60  # its docstring not counted

LONG_FUNCTIONS: dict[str, int] = {}
"""`path:name` -> lines, for a function that is one straight thought. Entries shrink or go; each has a reason."""

EMPTY_NAMES = re.compile(r"(?i)(utils?|helpers?|managers?|handlers?|impl|misc|common)$")


def functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines, without the docstring, of every function in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def empty_names(source: str) -> list[str]:
    """Classes named for no idea."""
    classes = (node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    return [name for name in classes if EMPTY_NAMES.search(name)]


def test_no_module_outgrows_a_sitting() -> None:
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in MODULES + KERNELS}
    assert not {path: length for path, length in lengths.items() if length > MAX_LINES_OF_MODULE}


def test_no_line_of_a_kernel_is_too_long() -> None:
    lines = [
        (path.name, number, line) for path in KERNELS for number, line in enumerate(path.read_text().splitlines(), 1)
    ]
    assert lines and not [(name, number) for name, number, line in lines if len(line) > MAX_COLUMNS]


def test_no_function_outgrows_a_screen() -> None:
    long = {
        f"{path.relative_to(REPOSITORY)}:{name}": length
        for path in MODULES
        for name, length in functions(path.read_text())
        if length > MAX_LINES_OF_FUNCTION
    }
    assert long == LONG_FUNCTIONS


def test_files_and_classes_are_named_for_an_idea() -> None:
    files = [path.name for path in MODULES if EMPTY_NAMES.search(path.stem)]
    classes = [name for path in MODULES for name in empty_names(path.read_text())]
    assert not files + classes


def test_a_docstring_does_not_make_a_function_long() -> None:
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    assert list(functions(source)) == [("f", 2)]


def test_names_without_an_idea_are_found_at_the_end_of_a_name_only() -> None:
    source = "class PageManager: ...\nclass RequestHandler: ...\nclass ManagerialAccount: ...\nclass Pages: ..."
    assert empty_names(source) == ["PageManager", "RequestHandler"]
