"""What a host sends as a run folder is stored completely or not at all, and only in the run folder."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft import transfer
from cpuft.errors import IO_ERROR, CpuftError, Interrupted
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.hosts.transport import SshTransport
from cpuft.launch import results
from cpuft.launch.results import NotStoredError, fetch_and_clean_up, fetch_results, plan_results
from cpuft.launch.run_state import StateWriter, read_state, write_state
from cpuft.plans import RunPlan, Step
from cpuft.transfer import FROM_STREAM
from tests.launch.test_inputs import AWAY
from tests.records import make_state


def serve(work: Path, before: str = "") -> tuple[str, ...]:
    """A command that sends a run folder, after the lines of a shell."""
    words = (sys.executable, "-IS", "-c", FROM_STREAM, "send-run", str(work), "checkpoints")
    return ("sh", "-c", f'{before} exec "$@"', "sh", *words)


def make_run(tmp_path: Path, *names: str) -> Path:
    """The run folder on a host, with these files."""
    work = tmp_path / "there" / "run"
    for name in names:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("newer")
    return work


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder and its text."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def test_plain_files_and_folders_get_safe_modes_and_their_times(tmp_path: Path, run: Path) -> None:
    work = make_run(tmp_path, "logs/a", "secret", "checkpoints/000000001.0/state", "deep/checkpoints")
    (work / "logs").chmod(0o7777)
    (work / "logs/a").chmod(0o6777)
    (work / "secret").chmod(0o600)
    os.utime(work / "logs/a", (1000, 1000))
    if os.geteuid() == 0:
        os.chown(work / "logs/a", 4711, 4711)
        (work / "logs/a").chmod(0o6777)
    assert results.fetch(run, serve(work, "echo Welcome;")) == []
    assert tree(run) == dict.fromkeys(("logs/a", "secret", "deep/checkpoints"), "newer")
    modes = {name: (run / name).stat().st_mode & 0o7777 for name in ("logs", "logs/a", "secret")}
    assert modes == {"logs": 0o755, "logs/a": 0o755, "secret": 0o600}
    assert {path.stat().st_uid for path in run.rglob("*")} == {os.geteuid()}
    assert (run / "logs/a").stat().st_mtime == 1000
    assert list(run.parent.iterdir()) == [run]


@pytest.mark.parametrize("is_there", [False, True])
def test_links_from_a_host_are_not_followed(tmp_path: Path, run: Path, is_there: bool) -> None:
    """Links there, and links in the folder where the files are stored."""
    outside, work = tmp_path / "home", make_run(tmp_path, "kept", "out/planted")
    outside.mkdir()
    (outside / "kept").write_text("mine")
    if is_there:
        run.mkdir(parents=True)
        (run / "out").symlink_to(outside)
        (run / "kept").symlink_to(outside / "kept")
        (run / "link").symlink_to(outside)
    (work / "link").symlink_to(outside)
    os.mkfifo(work / "pipe")
    assert results.fetch(run, serve(work)) == ["link (symbolic link)", "pipe (pipe)"]
    assert tree(outside) == {"kept": "mine"}
    assert (run / "out/planted").read_text() == (run / "kept").read_text() == "newer"
    assert not (run / "out").is_symlink()


def test_a_list_that_leads_out_of_the_folder_changes_nothing(tmp_path: Path, run: Path) -> None:
    run.mkdir(parents=True)
    (run / "a").write_text("older")
    text = json.dumps([["a", "file", 0, 0o644, 0], ["../planted", "file", 0, 0o644, 0]])
    sent = (transfer._MAGIC + transfer._LENGTH.pack(len(text)) + text.encode() + bytes(4)).decode()
    program = f"import sys; print({sent!r}, end='', flush=True); sys.stdin.read()"
    with pytest.raises(NotStoredError, match="is outside the folder"):
        results.fetch(run, (sys.executable, "-c", program))
    assert tree(run.parent) == {"run/a": "older"}


@pytest.mark.parametrize("lock", ["", "active"])
def test_a_failed_sender_is_not_reported_as_an_error_of_this_disk(
    tmp_path: Path, run: Path, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, program = make_run(tmp_path, "a"), tmp_path / "transfer.py"
    text = Path(transfer.__file__).read_text()
    program.write_text(text.replace("\n_LOCK_SECONDS = 15.0\n", "\n_LOCK_SECONDS = 1.0\n"))
    monkeypatch.setattr(transfer, "__file__", str(program))
    monkeypatch.setattr(transfer, "_END_SECONDS", 30)
    with open(f"{work}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CpuftError) as raised:
            results.fetch(run, serve(work) if lock else ("sh", "-c", "exit 255"))
    assert f"exit code {1 if lock else 255}" in str(raised.value)
    assert not isinstance(raised.value, NotStoredError)
    assert not run.exists()


CUT = """import os, sys
left = int(sys.argv[1])
while left and (block := os.read(0, min(left, 65536))):
    left -= os.write(1, block)
"""


def cut_after(nbytes: int, words: Sequence[str]) -> tuple[str, ...]:
    """A command whose connection breaks after so many bytes."""
    return ("bash", "-c", f'"${{@:3}}" | {sys.executable} -c "$1" "$2"; exit 255', "bash", CUT, str(nbytes), *words)


def test_a_broken_fetch_goes_on_where_it_stopped(tmp_path: Path, run: Path) -> None:
    work = make_run(tmp_path, "a")
    (work / "model").write_bytes(os.urandom(10 << 20))
    run.mkdir(parents=True)
    (run / "a").write_text("older")
    for _ in range(3):
        with pytest.raises(CpuftError, match="exit code 255"):
            results.fetch(run, cut_after(3 << 20, serve(work)))
        assert (run / "a").read_text() == "older"
    rest = ("bash", "-c", f"{shlex.join(cut_after(5 << 20, serve(work)))}; exit 0")
    results.fetch(run, rest)
    assert (run / "model").read_bytes() == (work / "model").read_bytes()
    assert sorted(os.listdir(run)) == ["a", "model"]


def test_a_resumed_run_is_merged_and_conflicting_files_are_renamed(tmp_path: Path, run: Path) -> None:
    for name in ("logs/rank-0.out", "logs-1/rank-0.out", "only-here", "out", "model/weights"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("older")
    names = ("logs/rank-0.out", "logs-1/rank-0.out", "out/file", "model")
    results.fetch(run, serve(make_run(tmp_path, *names)))
    assert tree(run) == {
        **dict.fromkeys(("logs/rank-0.out", "logs-3/rank-0.out", "out/file", "model"), "newer"),
        **dict.fromkeys(("logs-1/rank-0.out", "logs-2/rank-0.out", "only-here"), "older"),
        **dict.fromkeys(("out.old-1", "model.old-1/weights"), "older"),
    }


def test_a_run_whose_folder_the_user_put_on_another_disk_is_merged_there(tmp_path: Path, run: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        run.parent.mkdir()
        run.symlink_to(disk)
        results.fetch(run, serve(make_run(tmp_path, "a")))
        assert tree(Path(disk)) == tree(run) == {"a": "newer"}
        assert run.is_symlink()
        assert os.listdir(disk) == ["a"]


def planned(tmp_path: Path, run: Path) -> tuple[Cluster, RunPlan, Path]:
    """The plan of a run whose head host is this machine, and its run folder there."""
    work = tmp_path / "there" / "run"
    (work / "out").mkdir(parents=True)
    (work / "out" / "answer").write_text("42")
    cluster = replace(AWAY, command_prefixes={})
    return cluster, RunPlan(results=plan_results(cluster, str(work), str(run))), work


def test_a_file_that_became_a_folder_loses_nothing(tmp_path: Path, run: Path) -> None:
    cluster, plan, _ = planned(tmp_path, run)
    run.mkdir(parents=True)
    (run / "out").write_text("older")
    fetch_results(plan, str(run), cluster, lambda line: None)
    assert tree(run) == {"out/answer": "42", "out.old-1": "older"}


def test_a_fetch_that_takes_long_says_so(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.execute._REMIND_SECONDS", 0.01)
    cluster, plan, _ = planned(tmp_path, run)
    told = list[str]()
    fetch_results(plan, str(run), cluster, told.append)
    assert told[0] == "cpuft: fetch the run from a: not finished after 0 s"
    assert tree(run) == {"out/answer": "42"}


def test_results_that_cannot_be_stored_stay_on_the_host(tmp_path: Path, run: Path) -> None:
    cluster, plan, work = planned(tmp_path, run)
    run.parent.write_text("a file where the folder is to be")
    with pytest.raises(NotStoredError) as raised:
        fetch_results(plan, str(run), cluster, lambda line: None)
    assert raised.value.exit_code == IO_ERROR == 74
    assert re.match(rf"the results of the run could not be stored in {run} \(.*: Not a directory\)", str(raised.value))
    assert tree(work) == {"out/answer": "42"}
    with pytest.raises(CpuftError, match="could not send the run"):
        fetch_results(planned_without_host(plan), str(run), cluster, lambda line: None)


def planned_without_host(plan: RunPlan) -> RunPlan:
    """The same plan, with a host that does not answer."""
    (fetch_step,), *others = plan.results
    words = fetch_step.command[: fetch_step.command.index("sh")]
    run = str(Path(words[-1]).parents[1] / "other")
    return replace(plan, results=((replace(fetch_step, command=(*words[:-1], run, "sh", "-c", "exit 255")),), *others))


def test_a_host_that_is_lost_while_results_are_fetched_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's files stay there, of which nobody was told."""
    monkeypatch.setattr(results, "fetch_results", lambda *rest: run.mkdir(parents=True))
    steps = tuple(
        Step("remove the run", ("sh", "-c", f"exit {code}"), host=host) for host, code in (("b", 0), ("c", 255))
    )
    plan, said = RunPlan(results=((Step("fetch", ("true",), host="b"),), steps)), list[str]()
    fetch_and_clean_up(plan, str(run), AWAY, True, said.append)
    assert said == [results.describe_left(["c"])]


def test_a_fetch_is_given_up_when_no_bytes_arrive(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALLED_SECONDS", 0.2)
    monkeypatch.setattr(transfer, "_END_SECONDS", 0.2)
    with pytest.raises(CpuftError, match="the other side has sent nothing for 0 s"):
        results.fetch(run, ("sleep", "60"))
    assert not run.exists()


class Unsteady(SshTransport):
    """A head host that answers."""

    def find_unreachable(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
        return set()


def break_fetches(monkeypatch: pytest.MonkeyPatch, number: int) -> list[float]:
    """Let the first fetches fail, and return the list that gets the pauses before the others."""
    pauses, tries, fetch_once = list[float](), list[int](), fetch_results

    def fetch_or_fail(*given: Any) -> None:
        tries.append(1)
        if len(tries) <= number:
            raise CpuftError("the results of the run could not be fetched from a (the connection broke)")
        fetch_once(*given)

    monkeypatch.setattr(results, "fetch_results", fetch_or_fail)
    own = {float(pause) for pause in results._FETCH_PAUSES}
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pauses.append(seconds) if seconds in own else sleep(seconds))
    return pauses


def test_fetching_a_finished_run_is_tried_again(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, plan, _ = planned(tmp_path, run)
    cluster, said = replace(cluster, access=replace(cluster.access, transport=Unsteady())), list[str]()
    pauses = break_fetches(monkeypatch, 3)
    plan = replace(plan, results=(plan.results[0], ()))
    assert fetch_and_clean_up(plan, str(run), cluster, True, said.append)
    assert pauses == [2, 5, 10]
    why = "the results of the run could not be fetched from a (the connection broke)"
    assert said[0] == f"cpuft: the run has finished, and its results are fetched again in 2 s: {why}"
    assert (run / "out/answer").read_text() == "42"


def test_a_finished_run_that_cannot_be_fetched_stays_and_the_command_that_fetches_it_is_named(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, plan, work = planned(tmp_path, run)
    cluster = replace(
        cluster, access=replace(cluster.access, transport=Unsteady(), entry=replace(NO_CLUSTER, name="lab"))
    )
    pauses = break_fetches(monkeypatch, 100)
    with pytest.raises(NotStoredError) as raised:
        fetch_and_clean_up(plan, str(run), cluster, True, lambda line: None)
    assert sum(pauses) > 600
    said = str(raised.value)
    assert said.startswith("the run has finished, but the results of the run could not be fetched from a (")
    place = f"Its results are in {cluster.work_dir(str(run))} on a"
    assert said.endswith(f"{place}, and cpuft launch --resume {run} --cluster lab fetches them")
    assert tree(work) == {"out/answer": "42"}


def test_a_signal_while_a_finished_run_is_fetched_says_where_it_is(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*given: object) -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(results, "fetch_results", interrupt)
    (cluster, plan, _), said = planned(tmp_path, run), list[str]()
    with pytest.raises(SystemExit) as ended:
        fetch_and_clean_up(plan, str(run), cluster, True, said.append)
    assert ended.value.code == 130
    assert said[0].startswith("cpuft: stopped by SIGINT: the run has finished. Its results are in ")


@pytest.mark.parametrize("code", [0, 75])
def test_a_run_whose_state_says_that_it_finished_is_finished(code: int, tmp_path: Path, run: Path) -> None:
    """The connection to the supervisor broke when the last rank had ended."""
    cluster, plan, work = planned(tmp_path, run)
    run.mkdir(parents=True)
    write_state(str(run), make_state())  # as the launcher made it
    StateWriter(str(work), make_state("a")).end(code)
    plan = replace(plan, results=(plan.results[0], ()))
    assert fetch_and_clean_up(plan, str(run), cluster, False, lambda line: None) == (code == 0)


@pytest.mark.parametrize(
    ("there", "is_taken"),
    [({"owner": 2, "sequence": 3}, True), ({"owner": 1, "sequence": 9}, False), ({"owner": 2, "id": "b" * 12}, False)],
)
def test_a_state_of_an_earlier_start_or_of_another_run_replaces_none(
    there: dict[str, Any], is_taken: bool, tmp_path: Path, run: Path
) -> None:
    """The head host of the earlier start may come back after a later one was begun elsewhere."""
    work = make_run(tmp_path, "record.jsonl")
    run.mkdir(parents=True)
    write_state(str(run), make_state(owner=2))
    write_state(str(work), make_state(**there))
    results.fetch(run, serve(work))
    assert (run / "record.jsonl").exists()
    found = read_state(str(run))
    assert found == make_state(**there if is_taken else {"owner": 2})


def test_a_detached_run_that_was_started_again_here_keeps_what_is_here(tmp_path: Path, run: Path) -> None:
    work = make_run(tmp_path, "record.jsonl")
    (run / "record.jsonl").parent.mkdir(parents=True)
    (run / "record.jsonl").write_text("of the later start")
    write_state(str(run), make_state(owner=2))
    write_state(str(work), make_state(owner=1))
    with pytest.raises(NotStoredError, match=r"was started again in .*/run since, and what is there stays: give ano"):
        results.fetch(run, serve(work), refuses_earlier=True)
    assert tree(run).keys() == {"record.jsonl", "state.json"}
    assert (run / "record.jsonl").read_text() == "of the later start"


def test_a_state_that_is_damaged_here_is_replaced(tmp_path: Path, run: Path) -> None:
    work = make_run(tmp_path, "record.jsonl")
    run.mkdir(parents=True)
    write_state(str(run), make_state())
    (run / "state.json").write_text((run / "state.json").read_text().replace('"owner": 1', '"owner": 7'))
    write_state(str(work), make_state(sequence=1))
    results.fetch(run, serve(work))
    assert read_state(str(run)) == make_state(sequence=1)


def test_a_damaged_state_replaces_none(tmp_path: Path, run: Path) -> None:
    work = make_run(tmp_path, "record.jsonl")
    run.mkdir(parents=True)
    write_state(str(run), make_state())
    write_state(str(work), make_state(sequence=1))
    with (work / "state.json").open("a") as file:
        file.write("}")
    results.fetch(run, serve(work))
    assert read_state(str(run)) == make_state()
