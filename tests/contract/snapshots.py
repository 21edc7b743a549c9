"""Texts that users rely on, kept as files so that a change to one is seen in review."""

import os
from pathlib import Path

REMEDY = "if that is meant, run UPDATE_SNAPSHOTS=1 pytest tests/contract, and say it in CHANGELOG.md"


def assert_unchanged(path: Path, text: str) -> None:
    """`text` is what `path` holds. With UPDATE_SNAPSHOTS set, `path` is written instead."""
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path.name} is not recorded yet; {REMEDY}"
    assert text == path.read_text(), f"{path.name} changed; {REMEDY}"
