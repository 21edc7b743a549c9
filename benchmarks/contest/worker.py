"""The driver's side of a worker: it runs only while it is asked, and stands still in between.

A worker that waits is stopped by a signal, threads and children included, so none can take time from the one that
runs, be it by spinning. One that dies, or doesn't answer in time, leaves the contest: `Absent`, with its last words.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Timer
from typing import Any

from .environments import last_words
from .places import LOGS, Absent

LIMIT = 3600.0
"""Seconds for one answer, the one that comes after loading, compiling and trying settings included."""


class Worker:
    """A process that speaks peers/protocol.py, in a session of its own. Close it."""

    def __init__(self, name: str, command: Sequence[str], threads: int) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._log = LOGS / f"{name}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )

    def ask(self, message: Mapping[str, Any], limit: float = LIMIT) -> Any:
        """Its answer; it runs until then. Raises Absent."""
        assert self._process.stdin
        assert self._process.stdout
        self._signal(signal.SIGCONT)
        timer = Timer(limit, self._signal, [signal.SIGKILL])
        timer.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise Absent(f"its process ended with {self._process.wait()}: {last_words(self._log)}")
        self._signal(signal.SIGSTOP)
        return json.loads(line)

    def close(self) -> None:
        """End it, whatever it does."""
        with suppress(BrokenPipeError), self._process:  # which closes the pipes, and waits
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
