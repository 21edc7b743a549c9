"""The command line: one small file per command, imported only when that command is called; its help is therefore here.

Exit codes: 0 done; 1 the command could not do what was asked (the message says what, why and what to do);
2 the command line itself is wrong; 130 interrupted.
"""

import re
import sys
from io import TextIOWrapper
from typing import NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.text import Text

from batchwright import __version__
from batchwright.errors import BatchwrightError


def _shown(default: object) -> object:
    """A default as one would type it; a flag that is not given has none."""
    if default is False:
        return None
    return " ".join(map(str, default)) if isinstance(default, tuple) else default


app = App(
    name="batchwright",
    help="Sizes, forms, schedules and runs batches for PyTorch, and backs every choice with a measurement.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=(), consume_multiple=True, show_default=_shown),
)
app.command(
    "batchwright.cli.compare:compare",
    name="compare",
    help="""Run the same requests one by one, in static and dynamic batches and under continuous batching.

Two scenes, one engine: all requests at once (throughput), then arriving over time (latency).

Example: batchwright compare --html compare.html --json compare.json""",
)


def _as_typed(message: str, arguments: list[str]) -> str:
    """`message` with the command's settings named as its options: `num_pages` as `--num-pages`.

    A name of one word is also a plain word, and stands for the setting only where a value follows: `rate=0`.
    """
    _, (*_, command), _ = app.parse_commands(arguments)
    for argument in command.assemble_argument_collection():
        name = argument.name.removeprefix("--").replace("-", "_")
        value = "" if "_" in name else "(?==)"
        message = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w/.-]){value}", argument.name, message)
    return message


def main() -> NoReturn:
    """Run the command named on the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a dash must not cost a run its result
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=True)
    except CycloptsError:
        sys.exit(2)
    except BatchwrightError as error:
        message = Text.assemble(("error", "bold red"), f": {_as_typed(str(error), sys.argv[1:])}")
        Console(stderr=True, highlight=False, soft_wrap=True).print(message)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
