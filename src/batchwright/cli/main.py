"""The command line: one small file per command, imported only when that command is called.

Exit codes: 0 done; 1 the command could not do what was asked (the message says what, why and what to do);
2 the command line itself is wrong; 130 interrupted.
"""

import sys
from typing import NoReturn

from cyclopts import App, CycloptsError
from rich.console import Console

from batchwright import __version__
from batchwright.errors import BatchwrightError

app = App(
    name="batchwright",
    help="Sizes, forms, schedules and runs batches for PyTorch, and backs every choice with a measurement.",
    version=__version__,
    help_format="plaintext",
)
app.command("batchwright.cli.compare:compare", name="compare")


def main() -> NoReturn:
    """Run the command named on the command line."""
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=True)
    except CycloptsError:
        sys.exit(2)
    except BatchwrightError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error[/]: {error}", markup=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
