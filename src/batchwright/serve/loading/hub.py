"""Fetches a model from a Hugging Face hub, through `huggingface_hub`: its cache, its token, its environment variables.

Only what loading reads is fetched: settings first, so that a model we cannot run costs no download, then safetensors,
or one GGUF file. Never a pickle, never code. What is in the cache loads without a network, and whatever goes wrong is
told in three parts of our own words, in which no token and no signed address can stand.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from batchwright.errors import BatchwrightError, BrokenWeights, InputError, UnsupportedModel
from batchwright.serve.loading.checkpoint import INDEX, PICKLES, files_in_index

_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
)
_LEFT_OUT = ("*/*", "consolidated*", "adapter_*")  # folders, the same weights in their maker's layout, adapters
_NUM_NAMED = 8  # of a repository's files
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<file>.+\.gguf))?(?:@(?P<revision>\w[\w./-]*))?")
_TRANSPORT_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]
"""What the HTTP library raises that this release of the client builds on; each major release had another one."""

_FAILURES = (
    _TRANSPORT_ERROR, errors.XetDownloadError, OSError, ValueError, RuntimeError, LookupError, TypeError,
    AttributeError, AssertionError,
)  # fmt: skip
"""What the client raises; the last of them where an answer is none that a hub gives."""


class HubName(NamedTuple):
    """`org/name`, `org/name@revision`, or `org/name/file.gguf`. `revision`: a branch, a tag or a commit."""

    repository: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, source: str) -> "HubName | None":
        """None for what is no model's name, such as `/models/x`, `./x`, `x` and `models/x.gguf`."""
        found = _NAME.fullmatch(source)
        if not found or found["repository"].endswith(".gguf") or ".." in source:
            return None
        return cls(found["repository"], found["file"], found["revision"])

    def __str__(self) -> str:
        file, revision = f"/{self.file}" if self.file else "", f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{file}{revision}"


def fetch(name: HubName, check: Callable[[Path], object]) -> Path:
    """The model's directory in the cache, or its GGUF file.

    `check` is given the directory before any weights are fetched, and raises for a config that cannot be run. Raises
    InputError where the name or the hub gives nothing, UnsupportedModel where there are no safetensors, BrokenWeights
    for a download that did not arrive whole.
    """
    if name.file:
        with _asking(name):
            return Path(hf_hub_download(name.repository, name.file, revision=name.revision))
    folder = _fetched(name, name.revision, _SETTINGS)
    if (folder / "config.json").is_file():
        check(folder)
        index = folder / INDEX
        names = [escape(file) for file in files_in_index(index)] if index.is_file() else ["*.safetensors"]
        folder = _fetched(name, folder.name, names)
        if any(folder.glob("*.safetensors")):
            return folder
    with _asking(name):
        files = HfApi().list_repo_files(name.repository, revision=folder.name)
    raise _nothing_to_load(name, files)


def _fetched(name: HubName, revision: str | None, patterns: Sequence[str]) -> Path:
    """The folder named for the revision's commit, once all files that match are in it."""
    wanted, left_out = list(patterns), list(_LEFT_OUT)
    with _asking(name):
        return Path(
            snapshot_download(name.repository, revision=revision, allow_patterns=wanted, ignore_patterns=left_out)
        )


@contextmanager
def _asking(name: HubName) -> Iterator[None]:
    """Whatever the client raises becomes one of our errors."""
    try:
        with _bars():
            yield
    except _FAILURES as error:
        raise _error(name, error) from error


@contextmanager
def _bars() -> Iterator[None]:
    """The client's own progress bars on a terminal, none elsewhere; its environment variable has the last word."""
    is_decided = "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ or are_progress_bars_disabled()
    if is_decided or sys.stderr.isatty():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _error(name: HubName, error: Exception) -> BatchwrightError:
    """In our own words: the client's may quote an address with a signature in it."""
    asked, hub = f"loading {name}", constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        remedy = f"ask for access at {hub}/{name.repository}, and say who you are: hf auth login, or HF_TOKEN"
        return InputError(asked, f"it is gated at {hub}, and who asked may not read it", remedy)
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        fact = f"there is no such file or directory, and no such model at {hub}, or it is private"
        return InputError(asked, fact, "check the name; for a private model, run hf auth login, or set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        fact = f"{name.repository} has no branch, tag or commit {name.revision or constants.DEFAULT_REVISION!r}"
        return InputError(asked, fact, f"choose one that {hub}/{name.repository}/tree/main offers")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return InputError(asked, f"{name.repository} has no such file", f"see {hub}/{name.repository}/tree/main")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return _not_cached(name, error)
    if isinstance(error, errors.HfHubHTTPError):
        return InputError(asked, _answer(error), "try again later, or give a model directory")
    if isinstance(error, OSError) and error.strerror:
        fact = f"the cache in {constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
        return InputError(asked, fact, "make room there, or set HF_HUB_CACHE to another directory")
    fact = (
        f"the connection to {hub} failed, or brought less than, or not what, a hub announces ({type(error).__name__})"
    )
    return BrokenWeights(asked, fact, "try again: files that arrived whole are kept")


def _not_cached(name: HubName, error: Exception) -> InputError:
    """Why nothing, or not all, could be fetched: switched off, an answer that helps nobody, or no connection."""
    cause = error.__cause__
    cache = f"and the cache in {constants.HF_HUB_CACHE} does not hold all of it"
    revision = f" --revision {name.revision}" if name.revision else ""
    command = f"run hf download {name.repository}{' ' + name.file if name.file else ''}{revision}"
    if constants.HF_HUB_OFFLINE:
        fact = f"HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids asking {constants.ENDPOINT}, {cache}"
        remedy = f"unset these, or {command} where it may be asked"
    elif isinstance(cause, errors.HfHubHTTPError):
        fact, remedy = f"{_answer(cause)}, {cache}", "try again later, or give a model directory"
    else:
        fact = f"{constants.ENDPOINT} cannot be reached ({type(cause or error).__name__}), {cache}"
        remedy = f"{command} where there is a network, or give a model directory"
    return InputError(f"loading {name}", f"there is no such file or directory, {fact}", remedy)


def _answer(error: errors.HfHubHTTPError) -> str:
    return f"{constants.ENDPOINT} answered {error.response.status_code}"


def _nothing_to_load(name: HubName, files: Sequence[str]) -> UnsupportedModel:
    """Says what there is instead."""
    asked = f"loading {name}"
    quantised = sorted(file for file in files if file.endswith(".gguf"))
    if quantised:
        fact = f"it holds no safetensors of a model but GGUF files: {_listed(quantised)}"
        return UnsupportedModel(asked, fact, f"name one of them: {name._replace(file=quantised[0])}")
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    if pickles:
        fact = f"its weights are pickles: {_listed(pickles)}"
        remedy = "choose a model in safetensors or GGUF; pickles are never read, since they can run code"
        return UnsupportedModel(asked, fact, remedy)
    fact = f"it holds no config.json with safetensors, but {_listed(sorted(files)) or 'nothing'}"
    return UnsupportedModel(asked, fact, "choose a repository that holds a transformers model, or a GGUF file")


def _listed(files: Sequence[str]) -> str:
    more = f" and {len(files) - _NUM_NAMED:,} more" if len(files) > _NUM_NAMED else ""
    return ", ".join(files[:_NUM_NAMED]) + more
