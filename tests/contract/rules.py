"""Who may import whom, as data, and the reader of syntax trees that holds source files to it.

Every import counts: at the top, inside a function, relative, under TYPE_CHECKING, or by a constant name given to
`import_module`. Parts are the first names below `batchwright`: packages such as `policy`, modules such as `errors`.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "batchwright"
REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = REPOSITORY / "src" / PACKAGE

RECORDED = frozenset({"records", "traffic", "units", "errors"})
SHARED = RECORDED | {"policy", "facts", "planfile"}
STRANGERS = frozenset({"data", "train", "serve", "plan"})  # to each other
BELOW_STUDIES = SHARED | STRANGERS | {"report", "bench", "testing"}

ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "units": frozenset({"errors"}),
    "records": frozenset({"policy", "units", "errors"}),  # a step is recorded as it was planned
    "traffic": frozenset({"policy", "records", "units", "errors"}),
    "planfile": frozenset({"records", "units", "errors"}),
    "facts": frozenset({"units", "errors"}),
    "policy": frozenset({"errors"}),
    **dict.fromkeys(STRANGERS, SHARED),
    "report": RECORDED,
    "bench": RECORDED,  # reaches serve over HTTP only
    "testing": SHARED | STRANGERS,
    "studies": BELOW_STUDIES,
    "cli": BELOW_STUDIES | {"studies", PACKAGE},
    "__main__": frozenset({"cli"}),
    PACKAGE: BELOW_STUDIES | {"studies"},
}
"""What each part may import, besides itself. `batchwright` is the package's own `__init__`."""

TORCH = ("torch", "torchvision", "torchaudio", "transformers", "safetensors.torch")
TORCH_AT_WILL = frozenset({"data", "train", "serve", "studies"})
TORCH_LAZILY = frozenset({"testing"})

POLICY_EXTRAS = {"packing": ("numpy", "scipy")}
"""Module of policy -> what it may import that is neither ours nor in the standard library."""


@dataclass(frozen=True, slots=True)
class Import:
    """One name that one line imports. `lazy`: it does not happen when the module is loaded."""

    line: int
    name: str
    lazy: bool


def module_name(path: Path, root: Path = SOURCE) -> str:
    """`.../batchwright/policy/pages.py` -> `batchwright.policy.pages`; an `__init__` is its package."""
    parts = (PACKAGE, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    """`batchwright.policy.pages.Pool` -> `policy`; what is no part of its own belongs to the package's `__init__`."""
    _, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if part in ALLOWED else PACKAGE


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every name that `source`, the text of `module`, imports, in the order of its lines."""
    package = module if is_package else module.rpartition(".")[0]
    yield from sorted(_walk(ast.parse(source), package, lazy=False), key=lambda found: (found.line, found.name))


def _walk(node: ast.AST, package: str, *, lazy: bool) -> Iterator[Import]:
    for name in _names(node, package):
        yield Import(node.lineno, name, lazy)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, lazy=lazy or _defers(node, child))


def _defers(node: ast.AST, child: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return child in node.body
    if isinstance(node, ast.If):
        return ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING" and child in node.body
    return isinstance(node, ast.Lambda)


def _names(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        origin = _absolute("." * node.level + (node.module or ""), package)
        yield from (f"{origin}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _imports_by_name(node):
        yield _absolute(str(node.args[0].value), package)


def _imports_by_name(node: ast.Call) -> bool:
    function = ast.unparse(node.func).rpartition(".")[2]
    return function in {"import_module", "__import__"} and bool(node.args) and isinstance(node.args[0], ast.Constant)


def _absolute(name: str, package: str) -> str:
    """`..errors` seen from package `batchwright.policy` -> `batchwright.errors`."""
    stem = name.lstrip(".")
    level = len(name) - len(stem)
    if not level:
        return stem
    base = package.split(".")[: len(package.split(".")) - level + 1]
    return ".".join([*base, stem] if stem else base)


def violations(source: str, module: str, path: Path | str, *, is_package: bool = False) -> list[str]:
    """Each broken rule of one module as `file:line: what it does, but what it may`."""
    part = PACKAGE if module == PACKAGE else module.split(".")[1]
    if part not in ALLOWED:
        return [f"{path}:1: {part} is a part without a rule; add it to ALLOWED in tests/contract/rules.py"]
    return [
        f"{path}:{found.line}: imports {found.name}, but {complaint}"
        for found in imports_of(source, module, is_package=is_package)
        if (complaint := _complaint(found, module, part))
    ]


def _complaint(found: Import, module: str, part: str) -> str | None:
    if found.name.partition(".")[0] == PACKAGE:
        return _internal_complaint(part_of(found.name), found.name, part)
    if _is_torch(found.name) and part not in TORCH_AT_WILL and not (part in TORCH_LAZILY and found.lazy):
        where = f"only in {_listed(TORCH_AT_WILL)}, or inside a function in {_listed(TORCH_LAZILY)}"
        return f"torch and what brings it may be imported {where}"
    if part == "policy":
        return _policy_complaint(found.name.partition(".")[0], module.rpartition(".")[2])
    return None


def _internal_complaint(target: str, name: str, part: str) -> str | None:
    if target in ALLOWED[part] | {part} or name == f"{PACKAGE}.__version__":
        return None
    return f"{part} may import only {_listed(ALLOWED[part]) or 'itself'}"


def _policy_complaint(library: str, stem: str) -> str | None:
    if library in sys.stdlib_module_names or library in POLICY_EXTRAS.get(stem, ()):
        return None
    extras = "; ".join(f"in {name} also {_listed(libraries)}" for name, libraries in POLICY_EXTRAS.items())
    return f"policy may import only {_listed(ALLOWED['policy'])} and the standard library ({extras})"


def _is_torch(name: str) -> bool:
    return any(name == library or name.startswith(f"{library}.") for library in TORCH)


def _listed(names: frozenset[str] | tuple[str, ...]) -> str:
    return ", ".join(sorted(names))
