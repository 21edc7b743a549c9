"""The contest of benchmarks/offline.py, with workers that are a few lines long: no peer is installed or run here."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from batchwright.serve.decoders.rope import interleave
from benchmarks.contest import environments, race, table, worker
from benchmarks.contest.contestants import BASE, CONTESTANTS, Contestant, ours
from benchmarks.contest.models import in_halves
from benchmarks.contest.places import PEERS, Absent

JOBS = [([5, 6, 7], 4), ([8], 2)]
COUNTING = """
import os, sys, time
from protocol import Made, work

def prepare(setup, settings):
    print("a library says something")
    time.sleep(settings.get("slowness", 0.0))
    def run(jobs):
        os.write(1, b"and its C++ part too\\n")
        time.sleep(settings.get("delay", 0.0))
        extra = settings.get("extra", 0)
        return Made([[job.prompt[0]] * (job.num_output + extra) for job in jobs], {"threads": setup.threads})
    return run

work(prepare, [])
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a contestant of a script that sits beside a copy of the protocol."""
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "protocol.py").write_text((PEERS / "protocol.py").read_text())
    monkeypatch.setattr(race, "PEERS", tmp_path / "peers")
    monkeypatch.setattr(environments, "LOGS", tmp_path / "cache" / "logs")
    monkeypatch.setattr(worker, "LOGS", tmp_path / "cache" / "logs")
    monkeypatch.setattr(race, "model", lambda form, dtype: tmp_path)

    def make(*tries, script=COUNTING):
        name = f"worker{len(list(tmp_path.glob('peers/*')))}.py"
        (tmp_path / "peers" / name).write_text(script)
        return Contestant(worker=name, environment=None, form="file", tries=tries or ({},))

    return make


def run(**contestants):
    return race.race(contestants, JOBS, dtype="bfloat16", threads=1, repeats=2)


def test_contestants_run_in_turn_whatever_they_print(fake, capsys):
    outcome = run(first=fake(), second=fake())

    told = [line.partition(", ")[2].partition(":")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert told == ["first", "second", "first", "second"]
    assert outcome.outputs["first"] == [[[5] * 4, [8] * 2]]
    assert [len(runs) for runs in outcome.runs.values()] == [2, 2]
    assert outcome.runs["first"][0]["threads"] == 1


def test_the_fastest_of_several_settings_is_kept(fake):
    outcome = run(one=fake({"delay": 0.05}, {"delay": 0.0}))

    tried = outcome.entries["one"]["tried"]
    assert [entry["settings"]["delay"] for entry in tried] == [0.0, 0.05]
    assert all(each["seconds"] < 0.05 for each in outcome.runs["one"])


def test_who_makes_too_many_tokens_is_absent_and_the_others_go_on(fake):
    outcome = run(wrong=fake({"extra": 1}), right=fake())

    assert outcome.absent == {"wrong": "it made 5 tokens for request 0, which was to get 4"}
    assert list(outcome.runs) == ["right"]


def test_who_cannot_start_is_absent_with_its_last_words(fake):
    outcome = run(broken=fake(script="raise SystemExit('no such library')"), right=fake())

    assert "no such library" in outcome.absent["broken"]
    assert list(outcome.runs) == ["right"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for a process's state")
def test_a_worker_that_waits_stands_still(fake):
    contestant = fake()
    waiting = worker.Worker("waiting", [sys.executable, str(race.PEERS / contestant.worker)], threads=1)
    try:
        waiting.ask({"jobs": JOBS, "model": "", "dtype": "", "threads": 1, "tries": [{}]})
        process = waiting._process.pid
        deadline = time.monotonic() + 10
        while state(process) != "T" and time.monotonic() < deadline:
            os.sched_yield()
        assert state(process) == "T"
        assert waiting.ask({"run": True})["outputs"] == [[5] * 4, [8] * 2]
    finally:
        waiting.close()
    assert waiting._process.returncode == -signal.SIGKILL


def state(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_worker_that_does_not_answer_in_time_is_ended(fake):
    contestant = fake()
    slow = worker.Worker("slow", [sys.executable, str(race.PEERS / contestant.worker)], threads=1)
    try:
        with pytest.raises(Absent):
            slow.ask({"jobs": JOBS, "model": "", "dtype": "", "threads": 1, "tries": [{"slowness": 60}]}, limit=0.1)
    finally:
        slow.close()


def result(**runs):
    """A result as it is written, with one run for each number of seconds."""
    return {
        "runs": {
            name: [{"seconds": each, "tokens_per_second": 100 / each} for each in its] for name, its in runs.items()
        },
        "useful_flops": 1e9,
        "peak_flops": 1e10,
        "bandwidth": 1e9,
        "weight_bytes": 1e8,
        "notes": {},
        "contestants": {name: {"tried": [{"settings": {}}]} for name in runs},
        "reads_plain_weights": [],
        "absent": {},
    }


def test_ratios_are_taken_within_each_repeat():
    """The machine was three times slower in the second repeat, for both: the ratio is 2 all the same."""
    lines = list(table.table(result(**{BASE: [2.0, 6.0, 2.0], "fast": [1.0, 3.0, 1.0]})))

    assert lines[2].split() == ["fast", "100.0", "33.3", "100.0", "66.7%", "2.00", "10.0%"]


def test_without_the_base_there_are_no_ratios():
    assert list(table.table(result(fast=[1.0])))[1].split()[5] == "-"


def test_the_table_says_who_is_absent_and_what_outputs_are_worth():
    content = result(fast=[1.0]) | {"absent": {"gone": "no compiler"}, "nll": {"fast": 0.5}}

    assert list(table.table(content))[1].endswith("   0.5000")
    assert list(table.table(content))[-1] == "gone is absent: no compiler"


def test_the_table_says_which_of_several_settings_ran_and_what_to_know_of_it():
    content = result(peer=[1.0]) | {"notes": {"peer": "4-bit weights"}}
    content["contestants"]["peer"]["tried"] = [{"settings": {"slots": 8}}, {"settings": {"slots": 4}}]

    assert list(table.table(content))[1].endswith("  4-bit weights  slots=8")


def test_a_row_alone_is_held_against_the_bandwidth_only_where_it_reads_plain_weights():
    content = result(plain=[1.0], packed=[1.0]) | {"reads_plain_weights": ["plain"]}
    for runs in content["runs"].values():
        runs[0]["decode_alone"] = 0.2
    lines = list(table.table(content))

    assert lines[3] == (
        "plain: a row alone decodes 5.0 tok/s; 100.0 MB of weights at 1.0 GB/s, as measured, allow 10.0: 50%"
    )
    assert lines[4] == "packed: a row alone decodes 5.0 tok/s"


def test_every_worker_and_environment_that_is_named_is_there():
    for contestant in CONTESTANTS.values():
        assert (PEERS / contestant.worker).exists()
        assert contestant.environment is None or (PEERS / f"{contestant.environment}.txt").exists()


def test_versions_of_peers_are_exact():
    for requirements in PEERS.glob("*.txt"):
        lines = [line for line in requirements.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all("==" in line for line in lines)


def test_contestants_of_ours_are_declared_by_keyword_arguments():
    contestant = ours(load={"backend": "openvino"}, engine={"deterministic": True})

    assert json.loads(json.dumps(contestant.tries)) == [
        {"policy": "continuous", "rows": None, "load": {"backend": "openvino"}, "engine": {"deterministic": True}}
    ]


def test_rows_go_back_to_where_they_were_before_they_lay_in_pairs():
    rows_NK = torch.arange(4 * 8 * 3).view(32, 3)
    assert torch.equal(in_halves(interleave(rows_NK, 8), 8), rows_NK)
