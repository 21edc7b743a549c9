"""Files that a command will write: refused before the work begins, not after."""

import os
from pathlib import Path

from batchwright.errors import InputError


def check_writable(*files: Path | None) -> None:
    """Raises InputError for the first of `files` whose folder is missing or cannot be written."""
    for file in files:
        if file is None:
            continue
        folder = file.parent
        if file.is_dir() or not folder.is_dir():
            fact = "it is a folder" if file.is_dir() else f"there is no folder {folder}"
            raise InputError(f"write {file}", fact, "name a file in a folder that exists")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise InputError(f"write {file}", "it may not be written", "name another file, or change its permissions")
