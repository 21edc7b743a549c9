"""One virtual environment for each peer, made when it is first needed from its list of exact versions in peers/.

The lists are complete, so nothing is resolved: what a list does not name is not installed. A list that changes has
its environment made again. Making one takes minutes and, for vLLM, gigabytes; llama.cpp is compiled.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from .places import ENVIRONMENTS, LOGS, PEERS, Absent


def interpreter(name: str | None) -> Path:
    """The Python of the environment of that name; None is the one that runs now. Raises Absent."""
    if name is None:
        return Path(sys.executable)
    wanted = (PEERS / f"{name}.txt").read_text()
    python = ENVIRONMENTS / name / "bin" / "python"
    if _installed(name) != wanted:
        _make(name)
        _stamp(name).write_text(wanted)
    return python


def is_made(name: str | None) -> bool:
    """Whether `interpreter` would answer at once."""
    return name is None or _installed(name) == (PEERS / f"{name}.txt").read_text()


def run_in(name: str, script: str, *arguments: str) -> None:
    """Run a script of peers/ to its end in an environment. Raises Absent."""
    _run([str(interpreter(name)), str(PEERS / script), *arguments], f"{name}-{script.removesuffix('.py')}")


def last_words(log: Path) -> str:
    """The last line of a log that says something, for a one-line reason."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'it said nothing'} ({log.relative_to(LOGS.parents[1])})"


def _make(name: str) -> None:
    folder = ENVIRONMENTS / name
    print(f"making the environment of {name}: minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], f"{name}-venv")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--requirement"]
    _run([*pip, str(PEERS / f"{name}.txt")], f"{name}-pip")


def _run(command: list[str], name: str) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    with log.open("w") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False).returncode
    if code:
        raise Absent(f"{name} failed: {last_words(log)}")


def _stamp(name: str) -> Path:
    return ENVIRONMENTS / name / "installed.txt"


def _installed(name: str) -> str | None:
    """The list that the environment was made from; None if it is not there, or not whole."""
    return _stamp(name).read_text() if _stamp(name).exists() else None
