"""Requests from files, traces and Python's own text: what they become, and what is refused with which words."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from batchwright.errors import BatchwrightError, ConfigError, InputError
from batchwright.serve.loading.weights import LoadedModel, load
from batchwright.studies.workload import MAX_LINE_BYTES, make_requests, read_requests, replay_trace
from tests.contract.rules import REPOSITORY
from tests.studies.tiny import CONTEXT, write_checkpoint

DATA = REPOSITORY / "tests" / "data"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"), torch.float32)


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_checkpoint(tmp_path_factory.mktemp("models") / "wordless", with_tokenizer=False), torch.float32)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def write(file: Path, *lines: dict[str, Any]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_a_line_is_a_prompt_or_ids_with_a_limit_and_an_arrival(model: LoadedModel, file: Path) -> None:
    """Text is encoded by the model's tokenizer, ids are taken as they are, and what is left out has its default."""
    read = read_requests(
        write(
            file,
            {"prompt": "Hé", "max_tokens": 3, "arrival": 0.0, "ignore_eos": True},
            {"ids": [5, 6], "arrival": 2.5},
        ),
        model,
    )
    assert [one.prompt for one in read.work] == [tuple(model.tokenizer.encode("Hé")), (5, 6)]
    assert read.arrivals == [0.0, 2.5]
    assert [one.params.max_tokens for one in read.work] == [3, 128]
    assert [one.params.ignore_eos for one in read.work] == [True, False]


def test_blank_lines_and_a_byte_order_mark_are_skipped(model: LoadedModel, file: Path) -> None:
    """Ids keep the numbers of the lines, so that an error leads to its line in an editor."""
    file.write_bytes(b'\xef\xbb\xbf{"ids": [1]}\r\n\r\n  \n{"ids": [2]}')
    assert [one.id for one in read_requests(file, model).work] == ["line-1", "line-4"]


def test_requests_are_sorted_by_arrival_on_a_clock_that_starts_with_the_first(model: LoadedModel, file: Path) -> None:
    """Timestamps of any clock do: nobody waits for 1970 to pass."""
    start = 1.7e9
    read = read_requests(write(file, *({"ids": [i], "arrival": start + t} for i, t in [(1, 2.0), (2, 0.5)])), model)
    assert ([one.id for one in read.work], read.arrivals) == (["line-2", "line-1"], [0.0, 1.5])


def test_requests_without_arrivals_keep_their_order(model: LoadedModel, file: Path) -> None:
    """Nothing is invented for them."""
    read = read_requests(write(file, *({"ids": [i]} for i in range(5))), model)
    assert ([one.prompt for one in read.work], read.arrivals) == ([(i,) for i in range(5)], None)


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (b"{", "truncated"),
        (b"not json", "malformed"),
        (b"[1, 2]", "Expected `object`"),
        (b'{"ids": [1], "temperature": 1}', "unknown field `temperature`"),
        (b"{}", "exactly one of prompt and ids"),
        (b'{"ids": [1], "prompt": "x"}', "exactly one of prompt and ids"),
        (b'{"prompt": null, "ids": null}', "exactly one of prompt and ids"),
        (b'{"prompt": ""}', "its prompt is empty"),
        (b'{"ids": []}', "its prompt is empty"),
        (b'{"ids": [1.5]}', "Expected `int`"),
        (b'{"ids": [true]}', "Expected `int`"),
        (b'{"ids": ["x"]}', "Expected `int`"),
        (b'{"prompt": 7}', "Expected `str"),
        (b'{"ids": [1], "max_tokens": 0}', "max_tokens=0"),
        (b'{"ids": [1], "max_tokens": -3}', "max_tokens=-3"),
        (b'{"ids": [1], "max_tokens": 2.5}', "Expected `int`"),
        (b'{"ids": [1], "arrival": -0.1}', "its arrival is -0.1"),
        (b'{"ids": [1], "arrival": NaN}', "malformed"),
        (b'{"ids": [1], "arrival": Infinity}', "malformed"),
        (b'{"ids": [1], "arrival": 1e999}', "out of range"),
        (b'{"ids": [1], "arrival": "soon"}', "Expected `float"),
        (b'{"ids": [1], "ignore_eos": 1}', "Expected `bool`"),
        (b'{"prompt": "\xff\xfe"}', "UTF-8"),
        (b'{"prompt": "half \\ud800 of a pair"}', "surrogate"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(model: LoadedModel, file: Path, line: bytes, fact: str) -> None:
    """The error names the file and the line, says what is wrong with it and what to give instead."""
    file.write_bytes(b'{"ids": [1]}\n' + line + b"\n")
    with pytest.raises(InputError) as caught:
        read_requests(file, model)
    assert caught.value.asked == f"read {file}, line 2"
    assert fact in caught.value.fact
    assert caught.value.remedy.startswith("give ")


def test_a_line_beyond_the_limit_is_refused_unread(model: LoadedModel, file: Path) -> None:
    """A file of another kind may be one endless line."""
    file.write_bytes(b'{"ids": [1]}\n{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}\n')
    with pytest.raises(InputError, match=r"line 2: it is longer than 8,388,608 bytes"):
        read_requests(file, model)


@pytest.mark.parametrize("content", [b"", b"\n \n\n"])
def test_a_file_without_requests_is_refused(model: LoadedModel, file: Path, content: bytes) -> None:
    """Zero bytes, or blank lines only."""
    file.write_bytes(content)
    with pytest.raises(InputError, match="it holds none; give at least one line"):
        read_requests(file, model)


def test_missing_files_and_folders_are_refused(model: LoadedModel, tmp_path: Path) -> None:
    """In words, without an errno."""
    with pytest.raises(InputError, match=r"nothing.jsonl: No such file or directory; give a readable"):
        read_requests(tmp_path / "nothing.jsonl", model)
    with pytest.raises(InputError, match="Is a directory"):
        read_requests(tmp_path, model)


def test_arrivals_for_some_requests_only_are_refused(model: LoadedModel, file: Path) -> None:
    """When should the others come?"""
    with pytest.raises(InputError, match="1 of 2 lines have an arrival; give all of them one, or none"):
        read_requests(write(file, {"ids": [1], "arrival": 0.0}, {"ids": [2]}), model)


def test_text_for_a_model_without_a_tokenizer_is_refused(wordless: LoadedModel, file: Path) -> None:
    """The error says why there is none, and that ids would do; they do."""
    with pytest.raises(InputError, match=r"has no tokenizer: there is no tokenizer.json in .*; give ids"):
        read_requests(write(file, {"prompt": "x"}), wordless)
    assert read_requests(write(file, {"ids": [299]}), wordless).work[0].prompt == (299,)


# ---- traces


@pytest.mark.parametrize("name", ["azure_code.csv", "azure_conv.csv", "mooncake_synthetic.jsonl"])
def test_a_trace_keeps_its_lengths_and_its_gaps(model: LoadedModel, name: str) -> None:
    """As recorded, with forced output lengths and the first arrival at zero."""
    replayed = replay_trace(DATA / name, model, 50, max_context=None, seed=0)
    work = replayed.work
    assert len(work) == len(replayed.arrivals) == 50
    assert replayed.arrivals[0] == 0.0
    assert all(a <= b for a, b in pairwise(replayed.arrivals))
    assert all(one.params.ignore_eos for one in work)
    assert all(0 <= token < 300 for one in work for token in one.prompt)
    first = {"azure_code.csv": (4808, 10), "azure_conv.csv": (374, 44), "mooncake_synthetic.jsonl": (40160, 6)}[name]
    assert (len(work[0].prompt), work[0].params.max_tokens) == first


def test_a_trace_scaled_to_a_context_fits_it(model: LoadedModel) -> None:
    """Prompt and output together, and the longest nearly fills it."""
    work = replay_trace(DATA / "mooncake_synthetic.jsonl", model, 200, max_context=CONTEXT, seed=0).work
    totals = [len(one.prompt) + one.params.max_tokens for one in work]
    assert CONTEXT - 2 <= max(totals) <= CONTEXT


@pytest.mark.parametrize("max_context", [None, CONTEXT])
def test_equal_blocks_of_a_trace_get_equal_text(model: LoadedModel, max_context: int | None) -> None:
    """Requests that share the first k keys share the text of k blocks, and differ soon after."""
    lines = [json.loads(line) for line in (DATA / "mooncake_synthetic.jsonl").read_text().splitlines()]
    work = replay_trace(DATA / "mooncake_synthetic.jsonl", model, 200, max_context=max_context, seed=0).work
    longest = max(line["input_length"] + line["output_length"] for line in lines)
    block = 512 if max_context is None else 512 * max_context // longest
    pairs = [
        (a, b, same)
        for a in range(0, 200, 7)
        for b in range(a)
        if (same := common(lines[a]["hash_ids"], lines[b]["hash_ids"]))
    ]
    assert pairs
    for a, b, same in pairs:
        shared = common(work[a].prompt, work[b].prompt)
        assert shared >= min(same * block, len(work[a].prompt), len(work[b].prompt))


def common(one: Any, other: Any) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_fewer_requests_than_asked_for_are_all_there_are(model: LoadedModel) -> None:
    """A trace of 199 requests has no 500."""
    assert len(replay_trace(DATA / "azure_conv.csv", model, 500, max_context=None, seed=0).work) == 199


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "it holds no requests"),
        ("", "neither Azure's header nor a Mooncake record"),
        ("time,in,out\n1,2,3\n", "neither Azure's header nor a Mooncake record"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374\n", "line 2 is no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,4\n", "line 2 is no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,4\n", "line 2 is no request"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n', "line 1 is no request"),
        ('{"hash_ids": \n', "line 1 is no request"),
    ],
)
def test_a_malformed_trace_is_refused(model: LoadedModel, tmp_path: Path, content: str, fact: str) -> None:
    """With the line, or with the formats there are."""
    (tmp_path / "trace").write_text(content)
    with pytest.raises(InputError) as caught:
        replay_trace(tmp_path / "trace", model, 10, max_context=None, seed=0)
    assert fact in caught.value.fact


# ---- made requests


def test_made_requests_are_seeded_and_as_long_as_asked(model: LoadedModel) -> None:
    """The same seed gives the same work, another one other lengths and other text; means are met roughly."""
    one, same, other = (make_requests(model, 400, 40, 20, seed) for seed in (1, 1, 2))
    assert one == same != other
    assert sum(len(work.prompt) for work in one) / 400 == pytest.approx(40, rel=0.2)
    assert sum(work.params.max_tokens for work in one) / 400 == pytest.approx(20, rel=0.2)
    assert max(len(work.prompt) for work in one) <= CONTEXT // 2
    assert all(work.params.ignore_eos for work in one)


def test_made_prompts_are_real_text(model: LoadedModel) -> None:
    """Of Python's help, in pieces that follow each other."""
    first, second = make_requests(model, 2, 60, 4, 0)
    text = model.tokenizer.decode(first.prompt + second.prompt)
    assert text.isprintable() or "\n" in text
    assert len(set(text.split())) > 5


def test_a_model_without_a_tokenizer_still_gets_prompts(wordless: LoadedModel) -> None:
    """Any tokens of its vocabulary."""
    (work,) = make_requests(wordless, 1, 100, 4, 3)
    assert all(0 <= token < 300 for token in work.prompt)
    assert len(set(work.prompt)) > 10


@pytest.mark.parametrize(("mean_prompt", "mean_output"), [(1, 1), (2, 3), (256, 256)])
def test_the_shortest_and_longest_means_work(model: LoadedModel, mean_prompt: int, mean_output: int) -> None:
    """One token is a prompt; half the context is the other end."""
    assert all(one.prompt for one in make_requests(model, 20, mean_prompt, mean_output, 0))


@pytest.mark.parametrize("name", ["mean_prompt", "mean_output"])
def test_means_beyond_half_the_context_are_refused(model: LoadedModel, name: str) -> None:
    """By the setting's name, with the model's number."""
    lengths = {"mean_prompt": 8, "mean_output": 8, name: 257}
    with pytest.raises(ConfigError, match=rf"{name}=257: tiny has a context of 512.*use at most 256"):
        make_requests(model, 3, **lengths, seed=0)


def test_every_refusal_is_ours(model: LoadedModel, tmp_path: Path) -> None:
    """Bytes that are no text at all: one exception tree for what users cause."""
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    for read in (read_requests, lambda path, model: replay_trace(path, model, 3, max_context=None, seed=0)):
        with pytest.raises(BatchwrightError):
            read(tmp_path / "noise", model)


def test_a_prompt_of_900_million_tokens_is_refused_before_it_is_made(tmp_path: Path, model: LoadedModel) -> None:
    """A trace can claim anything; the memory is not spent on finding out."""
    file = tmp_path / "huge.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,900000000,5\n")
    with pytest.raises(InputError, match="the limit is 4,000,000"):
        replay_trace(file, model, 1, max_context=None, seed=0)
