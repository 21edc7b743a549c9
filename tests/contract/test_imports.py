"""The layout holds: who imports whom is DESIGN, not accident, and the checker that says so can itself say no."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contract.rules import (
    ALLOWED,
    REPOSITORY,
    SOURCE,
    TORCH_AT_WILL,
    imports_of,
    module_name,
    part_of,
    violations,
)

MODULES = sorted(SOURCE.rglob("*.py"))


def check(module: str, source: str) -> list[str]:
    return violations(source, f"batchwright.{module}", f"{module}.py")


def test_every_module_imports_only_what_its_part_may() -> None:
    assert MODULES, f"no module was found under {SOURCE}"
    broken = [
        line
        for path in MODULES
        for line in violations(
            path.read_text(), module_name(path), path.relative_to(REPOSITORY), is_package=path.stem == "__init__"
        )
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_the_base_install_imports_everything_that_does_not_run_a_model() -> None:
    """With every optional package hidden, all parts but those that may use torch can still be imported."""
    names = [module_name(path) for path in MODULES if path.stem != "__main__"]
    names = [name for name in names if part_of(name) not in TORCH_AT_WILL]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','): sys.modules[name] = None\n"
        "for name in sys.argv[2:]: importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", program, ",".join(optional_packages()), *names]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def optional_packages() -> set[str]:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {
        need.partition(">")[0] for name, needs in extras.items() if name not in {"all", "dev"} for need in needs
    } | {
        "scipy",
        "transformers",
    }


# The checker on sources made up for it


def test_a_forbidden_import_is_reported_with_its_line_its_rule_and_what_is_allowed() -> None:
    assert check("policy.pages", "import math\n\nfrom batchwright.serve import engine\n") == [
        "policy.pages.py:3: imports batchwright.serve.engine, but policy may import only errors"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import batchwright.serve",
        "import batchwright.serve.engine as engine",
        "from batchwright import serve",
        "from batchwright.serve.engine import Engine",
        "from .. import serve",
        "from ..serve import engine",
        "from ..serve.engine import Engine",
        "def plan():\n    from ..serve import engine",
        "if TYPE_CHECKING:\n    from batchwright.serve.engine import Engine",
        "try:\n    import batchwright.serve\nexcept ImportError:\n    pass",
        "import importlib\nserve = importlib.import_module('batchwright.serve')",
        "serve = import_module('..serve', __package__)",
        "serve = __import__('batchwright.serve')",
    ],
)
def test_no_way_of_writing_an_import_escapes(source: str) -> None:
    assert len(check("policy.pages", source)) == 1
    assert len(check("plan.simulate", source)) == 1
    assert check("studies.compare", source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "policy.static",
            "from .types import StepPlan\nfrom . import budget\nfrom batchwright.errors import ConfigError",
        ),
        ("policy.packing", "import numpy as np\nfrom scipy.optimize import milp"),
        ("serve.engine", "import torch\nfrom ..policy.types import StepPlan\nfrom batchwright import records, traffic"),
        ("plan.simulate", "from batchwright.policy.continuous import Continuous\nfrom batchwright import __version__"),
        ("studies.compare", "import torch\nfrom batchwright import plan, report, serve"),
        ("cli.compare", "def compare():\n    from batchwright.studies import compare"),
        ("testing", "def tiny_model():\n    import torch"),
    ],
)
def test_what_the_rules_allow_passes(module: str, source: str) -> None:
    assert check(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("policy.static", "import torch"),
        ("policy.static", "import numpy"),
        ("policy.static", "import msgspec"),
        ("policy.static", "from batchwright.records import StepRecord"),
        ("policy.static", "from batchwright import Engine"),
        ("facts.shape", "import torch"),
        ("facts.shape", "from batchwright.policy import types"),
        ("plan.simulate", "def run():\n    import torch"),
        ("plan.simulate", "from batchwright.serve import engine"),
        ("serve.engine", "from batchwright.train import fit"),
        ("report.html", "from batchwright.policy.types import StepPlan"),
        ("bench.load", "from batchwright.serve import protocol"),
        ("studies.compare", "from batchwright.cli import main"),
        ("cli.compare", "def compare():\n    import torch"),
        ("report.html", "from safetensors import torch"),
        ("plan.cost", "import transformers.models"),
        ("testing", "import torch"),
        ("testing", "from batchwright.studies import compare"),
        ("errors", "from batchwright import units"),
    ],
)
def test_what_the_rules_forbid_is_reported(module: str, source: str) -> None:
    assert len(check(module, source)) == 1


def test_a_part_without_a_rule_is_reported() -> None:
    assert check("extras.thing", "import math") == [
        "extras.thing.py:1: extras is a part without a rule; add it to ALLOWED in tests/contract/rules.py"
    ]


def test_the_four_executing_and_planning_parts_are_strangers() -> None:
    strangers = {"data", "train", "serve", "plan"}
    assert all(not ALLOWED[part] & strangers for part in strangers)


def test_an_import_inside_a_function_is_lazy_and_one_in_its_default_is_not() -> None:
    source = "import a\ndef f(x=__import__('b')):\n    import c\nclass K:\n    import d\ng = lambda: __import__('e')\n"
    found = {each.name: each.lazy for each in imports_of(source, "batchwright.testing")}
    assert found == {"a": False, "b": False, "c": True, "d": False, "e": True}


def test_relative_imports_of_a_package_start_at_the_package_itself() -> None:
    (found,) = imports_of("from .types import Request", "batchwright.policy", is_package=True)
    assert found.name == "batchwright.policy.types.Request"


def test_a_path_names_its_module() -> None:
    root = Path("src/batchwright")
    assert module_name(root / "policy" / "pages.py", root) == "batchwright.policy.pages"
    assert module_name(root / "policy" / "__init__.py", root) == "batchwright.policy"
    assert module_name(root / "__init__.py", root) == "batchwright"
