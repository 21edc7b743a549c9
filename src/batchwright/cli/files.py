"""Files that a command writes: refused before the work begins, and whole or not there at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from batchwright.errors import InputError


def check_writable(*files: Path | None) -> None:
    """Raises InputError for the first of `files` that is named twice, or whose folder is missing or closed."""
    seen: set[Path] = set()
    for file in files:
        if file is None:
            continue
        asked = f"write {file!s:.200}"
        try:
            if file.is_dir() or not file.parent.is_dir():
                fact = "it is a folder" if file.is_dir() else f"there is no folder {file.parent}"
                raise InputError(asked, fact, "name a file in a folder that exists")
            if not _may_write(file):
                raise InputError(asked, "it may not be written", "name another file, or change its permissions")
            target = file.resolve()
        except (OSError, RuntimeError) as error:  # a name too long, a loop of links
            raise InputError(asked, str(error), "name another file") from error
        if target in seen:
            raise InputError(asked, "two outputs have that name", "name a file for each")
        seen.add(target)


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """A path to write instead of `file`, whose place it takes once all is written. Raises InputError.

    On failure `file` stays as it was. What is no regular file, such as a pipe, is written directly.
    """
    target = file if is_special(file) else file.resolve()
    partial = target if is_special(file) else target.with_name(f".{token_hex(8)}.partial")
    try:
        yield partial
        if partial != target:
            partial.replace(target)
    except OSError as error:
        raise InputError(f"write {file}", str(error.strerror), "make room, or name another file") from error
    finally:
        if partial != target:
            partial.unlink(missing_ok=True)


def is_special(file: Path) -> bool:
    """Whether it is a device, a pipe or the like: nothing to replace, or to put other files beside."""
    return file.exists() and not file.is_file()


def _may_write(file: Path) -> bool:
    """What exists must be writable, and so must be its folder, where the new one is made before it takes its place."""
    if file.exists() and not os.access(file, os.W_OK):
        return False
    return is_special(file) or os.access(file.resolve().parent, os.W_OK)
