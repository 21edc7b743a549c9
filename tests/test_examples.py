"""Every script in examples/ runs, as a reader would run it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_says_something(script: Path) -> None:
    """It exits with 0, prints, and warns of nothing."""
    run = subprocess.run(
        [sys.executable, "-W", "error", script], capture_output=True, text=True, timeout=120, check=False
    )

    assert run.returncode == 0, run.stderr
    assert run.stdout
