"""Progress on a terminal: bars that move, and a Ctrl-C that ends the command at once."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("torch")

from batchwright.cli.progress import Watch
from tests.studies.tiny import write_checkpoint

PATIENCE = 120.0  # seconds; what is waited for takes a few


def test_ctrl_c_during_a_comparison_on_a_terminal_leaves_quietly(tmp_path: Path) -> None:
    """Bars are drawn until then; exit code 130, no traceback, no files, and the cursor is shown again."""
    model = write_checkpoint(tmp_path / "tiny")
    arguments = ["--model", model, "--dtype", "float32", "--num-pages", "64", "--num-requests", "3"]
    waits_for_minutes = ["--mean-prompt", "8", "--mean-output", "4", "--rate", "0.001", "--strategies", "continuous"]
    terminal, standard_error = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "batchwright", "compare", *arguments, *waits_for_minutes, "--json", tmp_path / "a.json"],
        stdin=standard_error,
        stdout=subprocess.PIPE,
        stderr=standard_error,
        env=os.environ | {"COLUMNS": "100", "TERM": "xterm", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        os.close(standard_error)
        seen = read_until(terminal, "arriving over time: continuous")
        process.send_signal(signal.SIGINT)
        asked = time.monotonic()
        seen += read_until(terminal, None)
        stdout, _ = process.communicate(timeout=PATIENCE)
        assert time.monotonic() - asked < 20  # the next request comes in a quarter of an hour
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert (process.returncode, stdout) == (130, b"")
    assert "all at once: continuous" in seen
    assert "━━━" in seen
    assert "Traceback" not in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def read_until(terminal: int, words: str | None) -> str:
    """What a terminal shows until it has shown `words`, or, for None, until its other end closes."""
    shown = b""
    deadline = time.monotonic() + PATIENCE
    while words is None or words not in shown.decode(errors="replace"):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{words!r} did not come: {shown.decode(errors='replace')[-500:]}"
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux's way to say that the other end has closed
            piece = b""
        shown += piece
        if not piece:
            assert words is None, f"closed before {words!r}: {shown.decode(errors='replace')[-500:]}"
            break
    return shown.decode(errors="replace")


def test_without_a_terminal_each_part_is_one_line_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """As long as its name needs, and with the brackets in it."""
    name = "loading /models/[/x] " + "long " * 40
    with Watch() as watch:
        watch.begin(name, 0)
        watch.advance(1)
        assert capsys.readouterr().err == ""
        watch.begin("second", 10)
        assert capsys.readouterr().err.rpartition(":")[0] == name
    out, err = capsys.readouterr()
    assert (out, err.rpartition(":")[0], err.count("\n")) == ("", "second", 1)


def test_a_part_that_fails_is_not_said_to_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed was done."""
    with pytest.raises(ZeroDivisionError):
        fail_in_the_second_part()
    err = capsys.readouterr().err
    assert err.startswith("first: ")
    assert err.count("\n") == 1


def fail_in_the_second_part() -> None:
    with Watch() as watch:
        watch.begin("first", 0)
        watch.begin("second", 1)
        raise ZeroDivisionError


def test_a_watch_that_saw_nothing_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A command may end before its first part."""
    with Watch():
        pass
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_names_are_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's path may hold brackets that would close a tag nobody opened."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert Console(stderr=True).is_terminal
    with Watch() as watch:
        watch.begin("loading [/x]", 0)
        watch.begin("counting", 8)
        watch.advance(3)
    assert "loading [/x]" in stream.getvalue()
    assert "8/8" in stream.getvalue()
