"""What `--help` says, for the program and for each command, changes only on purpose."""

import io
from collections.abc import Iterator
from pathlib import Path

import cyclopts
from rich.console import Console

from batchwright.cli.main import app
from tests.contract.snapshots import assert_unchanged

RECORDED = Path(__file__).parent / "cli_help"


def commands(program: cyclopts.App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The program itself, then every command and command of a command."""
    yield path
    flags = {*program.help_flags, *program.version_flags}
    for name in program:
        if name not in flags:
            yield from commands(program[name], (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    page = io.StringIO()
    app.help_print(list(path), console=Console(file=page, width=100, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in page.getvalue().splitlines()) + "\n"


def recording(path: tuple[str, ...]) -> Path:
    return RECORDED / f"{'-'.join(('batchwright', *path))}.txt"


def test_help_is_as_recorded() -> None:
    for path in commands(app):
        assert_unchanged(recording(path), help_of(path))


def test_every_recorded_command_still_exists() -> None:
    assert {file.name for file in RECORDED.iterdir()} == {recording(path).name for path in commands(app)}


def test_every_command_says_what_it_does() -> None:
    silent = [path for path in commands(app) if len(help_of(path).strip().splitlines()) < 3]
    assert not silent
