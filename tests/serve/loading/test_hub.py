"""Models by name: the real client fetches from a hub on loopback what loading needs, once, and says what is wrong."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import BatchwrightError, BrokenWeights, InputError, UnsupportedModel
from batchwright.serve.loading import weights
from batchwright.serve.loading.hub import HubName, fetch
from tests.serve.conftest import DenseCache, MakeCheckpoint
from tests.serve.loading.test_gguf import write_tiny

TOKEN = "hf_secretsecretsecretsecretsecretsecr"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
LLAMA = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"weights"}


class Hub:
    """Answers as a hub does. `repositories`: by name and revision, what each file holds.

    `refused`: status and error code by name. `instead`: what it answers whoever asks. `short`: files that arrive with
    the end missing, as from a broken proxy.
    `asked`: files that were sent. `secrets`: authorizations that the storage behind the hub was shown.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.short: set[str] = set()
        self.instead: bytes | None = None
        self.asked: list[str] = []
        self.secrets: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Answer, self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Answer(BaseHTTPRequestHandler):
    """One request."""

    def __init__(self, hub: Hub, *address: object) -> None:
        self.hub = hub
        super().__init__(*address)

    def do_GET(self) -> None:
        if self.hub.instead is not None:
            return self.send(200, content=self.hub.instead)
        path = unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[0] == "storage":
            self.hub.secrets += filter(None, [self.headers["Authorization"]])
            return self.send_content("/".join(path[4:]), self.hub.repositories["/".join(path[1:3])][path[3]])
        is_api = path[:2] == ["api", "models"]
        name, rest = "/".join(path[2:4] if is_api else path[:2]), path[4:] if is_api else path[2:]
        if name in self.hub.refused:
            return self.send(*self.hub.refused[name])
        if name not in self.hub.repositories:
            return self.send(404, "RepoNotFound")
        revision = next((key for key, commit in COMMITS.items() if rest[1:2] in ([key], [commit])), None)
        revision = revision if rest else "main"
        if revision not in self.hub.repositories[name]:
            return self.send(404, "RevisionNotFound")
        files = self.hub.repositories[name][revision]
        if is_api and rest[:1] == ["tree"]:
            listed = [{"type": "file", "path": key, "size": len(files[key]), "oid": "0" * 40} for key in files]
            return self.send(200, content=json.dumps(listed).encode())
        if is_api:
            return self.send(200, content=json.dumps({"id": name, "sha": COMMITS[revision], "siblings": []}).encode())
        return self.resolve(name, revision, "/".join(rest[2:]), files)

    do_HEAD = do_GET

    def resolve(self, name: str, revision: str, file: str, files: dict[str, bytes]) -> None:
        """Large files lie elsewhere, under another host name."""
        if file not in files:
            return self.send(404, "EntryNotFound")
        etag = hashlib.sha256(files[file]).hexdigest()
        headers = {"X-Repo-Commit": COMMITS[revision], "ETag": f'"{etag}"'}
        if not file.endswith((".safetensors", ".gguf")):
            return self.send_content(file, files, **headers)
        there = f"http://localhost:{self.hub.port}/storage/{name}/{revision}/{file}?signature=abc"
        linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(files[file])), "Location": there}
        return self.send(302, **headers, **linked)

    def send_content(self, file: str, files: dict[str, bytes], **headers: str) -> None:
        if self.command == "GET":
            self.hub.asked.append(file)
        content = files[file][: -10 if file in self.hub.short and self.command == "GET" else None]
        self.send(200, content=content, **headers)

    def send(self, status: int, code: str = "", content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        told = {"X-Error-Code": code, "X-Error-Message": f"you are {self.headers['Authorization']}"} if code else {}
        for key, value in (headers | told | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Not on stderr."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process takes for the one and only, with an empty cache, asked by somebody with a token."""
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.port}")
    template = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    huggingface_hub.close_session()
    hub.stop()


def fetched(name: str, check: Callable[[Path], object] = lambda _: None) -> Path:
    return fetch(HubName.parse(name), check)


def named(*files: str) -> dict[str, bytes]:
    """Files that each hold their own name: what is the same is stored, and sent, once."""
    return {file: file.encode() for file in files}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refusal(name: str, kind: type[BatchwrightError] = InputError) -> BatchwrightError:
    with pytest.raises(kind) as caught:
        fetched(name)
    assert caught.value.asked == f"loading {name}" and caught.value.fact and caught.value.remedy
    return caught.value


def logits(source: str | Path) -> torch.Tensor:
    decoder = weights.load(source, torch.float32).decoder
    return decoder.forward(torch.arange(20), DenseCache(decoder), torch.arange(20))


def test_a_name_is_downloaded_once_and_then_needs_no_network(hub: Hub, make_checkpoint: MakeCheckpoint) -> None:
    """The model is the one that was uploaded, and is called by its name; what changed nothing is not sent again."""
    path = make_checkpoint(shard_size="60KB")
    hub.repositories["org/tiny"] = {"main": contents(path)}
    first, num_asked = logits("org/tiny"), len(hub.asked)
    assert torch.equal(first, logits(path)) and num_asked > 3
    assert weights.load("org/tiny").name == "org/tiny"
    assert len(hub.asked) == num_asked
    hub.stop()
    assert torch.equal(first, logits("org/tiny"))


def test_only_what_loading_reads_is_sent(hub: Hub, make_checkpoint: MakeCheckpoint) -> None:
    """No pickles, no code, no documents, no second copy of the weights, no adapters, nothing in folders."""
    wanted = contents(make_checkpoint()) | {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    others = ["README.md", "modeling_tiny.py", "pytorch_model.bin", "training_args.bin", "model.pt", "tf_model.h5"]
    others += ["consolidated.safetensors", "adapter_model.safetensors", "onnx/model.onnx", "original/x.safetensors"]
    hub.repositories["org/tiny"] = {"main": wanted | named(*others)}
    folder = fetched("org/tiny")
    assert sorted(hub.asked) == sorted(wanted)
    assert sorted(file.name for file in folder.iterdir()) == sorted(wanted)


def test_of_shards_only_those_in_the_index_are_sent(hub: Hub) -> None:
    """A repository may keep weights in another split beside them."""
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = named(*index["weight_map"].values(), "other.safetensors", "model[1].safetensors")
    config = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode()}
    hub.repositories["org/tiny"] = {"main": files | config}
    fetched("org/tiny")
    assert sorted(hub.asked) == sorted([*config, *index["weight_map"].values()])


def test_a_model_that_cannot_run_costs_no_download_of_weights(hub: Hub) -> None:
    """Its config is seen first."""
    hub.repositories["org/other"] = {"main": LLAMA | {"config.json": b'{"model_type": "mamba"}'}}
    with pytest.raises(UnsupportedModel, match="running a mamba model through transformers"):
        weights.load("org/other")
    assert hub.asked == ["config.json"]


def test_a_revision_is_a_branch_or_a_commit(hub: Hub) -> None:
    """Each has its own files; a model cached at one revision is not taken for another."""
    hub.repositories["org/tiny"] = {"main": LLAMA, "v2": LLAMA | {"model.safetensors": b"newer"}}
    for name, content in (("org/tiny", b"weights"), ("org/tiny@v2", b"newer"), ("org/tiny@" + "b" * 40, b"newer")):
        assert (fetched(name) / "model.safetensors").read_bytes() == content
    hub.stop()
    assert (fetched("org/tiny@v2") / "model.safetensors").read_bytes() == b"newer"


def test_a_gguf_file_has_a_name_too(hub: Hub, tmp_path: Path) -> None:
    """The file alone is fetched, and loads like one on the disk."""
    path = write_tiny(tmp_path / "tiny.gguf", "Q8_0")
    hub.repositories["org/tiny"] = {"main": {"q8/tiny.gguf": path.read_bytes(), "q4.gguf": b"x", "config.json": b"{}"}}
    assert torch.equal(logits("org/tiny/q8/tiny.gguf"), logits(path))
    assert hub.asked == ["q8/tiny.gguf"]
    assert "has no such file" in refusal("org/tiny/q9.gguf").fact
    hub.stop()
    assert torch.equal(logits("org/tiny/q8/tiny.gguf"), logits(path))


def test_what_is_on_the_disk_wins_over_a_name(
    hub: Hub, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same text, taken for a directory where there is one: nobody is asked."""
    path = make_checkpoint("tiny")
    hub.repositories["tiny/model"] = {"main": LLAMA}
    path.rename(tmp_path / "model")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "model").rename(tmp_path / "tiny" / "model")
    monkeypatch.chdir(tmp_path)
    assert weights.load("tiny/model").name == "model"
    assert not hub.asked


@pytest.mark.parametrize(
    ("refused", "fact", "remedy"),
    [
        ((404, "RepoNotFound"), "no such file or directory, and no such model at http", "hf auth login"),
        ((401, "RepoNotFound"), "or it is private", "hf auth login"),
        ((401, "GatedRepo"), "it is gated at http", "ask for access at http"),
        ((403, "GatedRepo"), "it is gated at http", "HF_TOKEN"),
        ((404, "RevisionNotFound"), "org/tiny has no branch, tag or commit 'main'", "/org/tiny/tree/main offers"),
        ((403, ""), "answered 403", "a model directory"),
        ((500, ""), "answered 500", "try again later"),
    ],
)
def test_a_hub_that_refuses_is_a_three_part_error(
    refused: tuple[int, str], fact: str, remedy: str, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown, private, gated, another revision, out of order: each says what to do, and shows nobody's token."""
    hub.refused["org/tiny"] = refused
    error = refusal("org/tiny")
    assert fact in error.fact and remedy in error.remedy
    assert TOKEN not in str(error) + caplog.text


def test_an_unknown_revision_is_named(hub: Hub) -> None:
    hub.repositories["org/tiny"] = {"main": LLAMA}
    assert "no branch, tag or commit 'v9'" in refusal("org/tiny@v9").fact


def test_without_a_connection_the_error_says_where_it_looked(hub: Hub) -> None:
    """The cache that was searched, and the command that fills it."""
    hub.stop()
    error = refusal("org/tiny@v2")
    assert "cannot be reached (ConnectError)" in error.fact and constants.HF_HUB_CACHE in error.fact
    assert "run hf download org/tiny --revision v2" in error.remedy


def test_switched_off_only_the_cache_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in it loads; what is not, or not whole, is told with the switch that forbids more."""
    hub.repositories["org/tiny"] = hub.repositories["org/other"] = {"main": LLAMA}
    folder = fetched("org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetched("org/tiny") == folder
    error = refusal("org/other")
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids" in error.fact and constants.HF_HUB_CACHE in error.fact
    assert "unset these, or run hf download org/other" in error.remedy
    assert "run hf download org/other q4.gguf" in refusal("org/other/q4.gguf").remedy
    (folder / "model.safetensors").unlink()
    assert "does not hold all of it" in refusal("org/tiny").fact


def test_the_clients_environment_variables_count(tmp_path: Path) -> None:
    """A process of its own is told where the cache is, and not to ask; nothing but its error is written."""
    program = "from batchwright.serve.loading.hub import *\nfetch(HubName.parse('org/tiny'), print)"
    clean = {key: value for key, value in os.environ.items() if not key.endswith("_OFFLINE")}
    environment = clean | {"TRANSFORMERS_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "here"), "HF_TOKEN": TOKEN}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert "forbids asking https://huggingface.co" in done.stderr
    assert f"the cache in {tmp_path / 'here'} does not hold all of it" in done.stderr
    assert TOKEN not in done.stderr and not done.stdout


def test_files_come_without_bars_where_nobody_watches(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    """In a log a bar is noise, and the client draws some of its own accord."""
    hub.repositories["org/tiny"] = {"main": LLAMA}
    fetched("org/tiny")
    assert capfd.readouterr() == ("", "")


def test_no_storage_behind_a_hub_sees_the_token(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """Weights come from another host, under an address that is signed, and which no error repeats."""
    hub.repositories["org/tiny"] = {"main": LLAMA}
    hub.short.add("model.safetensors")
    error = refusal("org/tiny", BrokenWeights)
    assert not hub.secrets
    assert "signature" not in str(error) and TOKEN not in "".join(traceback.format_exception(error)) + caplog.text


@pytest.mark.parametrize("answer", ["<html>please log in</html>", "[]", "{}", "null", '{"id": 3, "sha": null}'])
def test_a_server_that_is_no_hub_is_told(answer: str, hub: Hub) -> None:
    """A login page of a network, say."""
    hub.instead = answer.encode()
    assert "failed, or brought" in refusal("org/tiny", BrokenWeights).fact


def test_a_download_that_breaks_off_leaves_nothing_behind(hub: Hub) -> None:
    """A file that is shorter than announced is no file; the next try fetches it, and only it."""
    hub.repositories["org/tiny"] = {"main": LLAMA | {"model.safetensors": b"w" * 100}}
    hub.short.add("model.safetensors")
    assert "or brought less than" in refusal("org/tiny", BrokenWeights).fact
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
    hub.short.clear()
    hub.asked.clear()
    assert (fetched("org/tiny") / "model.safetensors").read_bytes() == b"w" * 100
    assert hub.asked == ["model.safetensors"]


def test_a_full_disk_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a cache that is no directory."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    hub.repositories["org/tiny"] = {"main": LLAMA}
    error = refusal("org/tiny")
    assert "cannot be written: Not a directory" in error.fact and "HF_HUB_CACHE" in error.remedy


@pytest.mark.parametrize(
    ("files", "fact", "remedy"),
    [
        (["config.json", "pytorch_model.bin"], "its weights are pickles: pytorch_model.bin", "never read"),
        (["config.json", "b.gguf", "a.gguf"], "but GGUF files: a.gguf, b.gguf", "name one of them: org/tiny/a.gguf"),
        (["a.gguf"], "but GGUF files: a.gguf", "org/tiny/a.gguf"),
        ([f"{i}.onnx" for i in range(10, 20)], "17.onnx and 2 more", "a transformers model"),
        ([], "but nothing", "a transformers model"),
    ],
)
def test_a_repository_without_safetensors_says_what_it_has(files: list[str], fact: str, remedy: str, hub: Hub) -> None:
    """And how to name a GGUF file, where that is what there is."""
    hub.repositories["org/tiny"] = {"main": named(*files)}
    error = refusal("org/tiny", UnsupportedModel)
    assert fact in error.fact and remedy in error.remedy
    assert set(hub.asked) <= {"config.json"}


@pytest.mark.parametrize("file", ["../../x.safetensors", "x/../../../x.safetensors", "/x.safetensors", "x.bin", "x.py"])
def test_an_index_cannot_name_what_is_not_to_be_fetched(file: str, hub: Hub) -> None:
    """A path that leads out of the folder, a pickle, code."""
    index = json.dumps({"weight_map": {"a": file}}).encode()
    hub.repositories["org/tiny"] = {"main": LLAMA | {"model.safetensors.index.json": index, file: b"x"}}
    with pytest.raises(BrokenWeights, match="outside its directory, or at no safetensors file"):
        fetched("org/tiny")
    assert "x" not in "".join(path.stem for path in Path(constants.HF_HUB_CACHE).rglob("*.*") if path.stem == "x")


@pytest.mark.parametrize(
    "file", ["../../../../escaped.safetensors", "/tmp/escaped.safetensors", "a/../../escaped.json"]
)
def test_a_listed_file_cannot_leave_the_cache(file: str, hub: Hub, tmp_path: Path) -> None:
    """The list of files is the server's word."""
    hub.repositories["org/tiny"] = {"main": LLAMA | {file: b"x"}}
    fetched("org/tiny")
    assert not list(tmp_path.rglob("escaped*")) and not Path("/tmp/escaped.safetensors").exists()


@given(
    repository=st.from_regex(r"[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*", fullmatch=True),
    file=st.none() | st.from_regex(r"(\w+/)?\w+\.gguf", fullmatch=True),
    revision=st.none() | st.from_regex(r"\w+(/\w+)?", fullmatch=True),
)
def test_names_are_read_as_they_are_written(repository: str, file: str | None, revision: str | None) -> None:
    name = HubName(repository, file, revision)
    if ".." not in repository and not repository.endswith(".gguf"):
        assert HubName.parse(str(name)) == name


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tiny",
        "./a/b",
        "../a/b",
        "/a/b",
        "~/a/b",
        "a/b/c",
        "a/b/",
        "a/b.gguf",
        "a/b@",
        "a/b@../c",
        "a/..",
        "a b/c",
        "a/b\n",
    ],
)
def test_paths_are_no_names(path: str) -> None:
    """A path that is not there must not make anybody ask a hub for it."""
    assert HubName.parse(path) is None
