"""What a newcomer relies on: pins that cover every need, targets that exist, links that lead somewhere."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

from tests.contract.rules import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
RUFF = PROJECT["tool"]["ruff"]["lint"]


def tracked(*patterns: str) -> list[Path]:
    """The repository's own files, new ones included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in listed if (path := REPOSITORY / name).is_file()]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_torch_is_pinned_first_so_that_no_range_pulls_in_another() -> None:
    assert next(iter(pins())) == "torch"


def test_everything_we_need_is_pinned() -> None:
    needs = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        needs += extra
    names = {re.match(r"[\w-]+", need)[0] for need in needs} - {"batchwright"}
    assert names <= pins().keys()


def test_every_lint_rule_we_ignore_has_its_reason() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    ruff = text[text.index("[tool.ruff.lint]") : text.index("[tool.mypy]")]
    unexplained = [line for line in ruff.splitlines() if re.match(r'\s+"\w+",', line) and "#" not in line]
    assert not unexplained


def test_commented_out_code_and_todos_cannot_land() -> None:
    """ruff's ERA finds the first and FIX the second; neither may be switched off, as a whole or in a file."""
    switched_off = [*RUFF["ignore"], *(rule for rules in RUFF["per-file-ignores"].values() for rule in rules)]
    assert RUFF["select"] == ["ALL"]
    assert not [rule for rule in switched_off if rule.startswith(("ERA", "FIX"))]
    waived = re.compile(r"noqa:[^#]*\b(ERA|FIX)\d")
    assert not [path.name for path in tracked("*.py") if waived.search(path.read_text())]


def test_no_document_promises_to_be_finished_later() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|TBD)\b")
    assert not [path.name for path in tracked("*.md") if unfinished.search(path.read_text())]


def test_no_file_names_somebody_s_machine() -> None:
    home = re.compile(r"(?<![\w.<])/(home|root|Users)/\w")
    files = [path for path in tracked() if path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".html", ""}]
    assert not [str(path.relative_to(REPOSITORY)) for path in files if home.search(path.read_text())]


def test_links_between_documents_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
    broken = [
        f"{document.relative_to(REPOSITORY)} -> {target}"
        for document in tracked("*.md")
        for target in link.findall(document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_make_help_names_every_target() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split()
    assert sorted(phony) == sorted(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))


def test_the_ci_script_can_be_run() -> None:
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)
