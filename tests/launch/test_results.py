"""What a host sends as a run folder is stored completely or not at all, and only in the run folder."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import IO_ERROR, CpuftError, Interrupted
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.transport import SshTransport
from cpuft.launch import results
from cpuft.launch.results import NotStoredError, fetch_and_clean_up, fetch_results, plan_results
from cpuft.launch.state import StateWriter, write_state
from cpuft.plan import RunPlan, Step
from tests.launch.test_inputs import AWAY
from tests.records import make_state


def member(name: str, text: str = "", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> bytes:
    """One member of an archive, without the archive's end."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname, info.mode, info.mtime = len(text), kind, link, mode, 1000
    info.uid = info.gid = 4711
    return info.tobuf() + text.encode() + bytes(-len(text) % 512)


END = bytes(1024)


def send(tmp_path: Path, *members: bytes, end: bytes = END, code: int = 0) -> tuple[str, ...]:
    """A command that sends this archive."""
    path = tmp_path / "sent.tar"
    path.write_bytes(b"".join(members) + end)
    return ("sh", "-c", f"cat {shlex.quote(str(path))}; exit {code}")


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder and its text."""
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "run"


def test_plain_files_and_folders_get_safe_modes_and_their_times(tmp_path: Path, run: Path) -> None:
    files = member("./logs/", kind=tarfile.DIRTYPE, mode=0o7777), member("./logs/a", "text", mode=0o6777)
    assert results.fetch(run, send(tmp_path, *files, member("./secret", mode=0o600))) == []
    assert tree(run) == {"logs/a": "text", "secret": ""}
    modes = {name: (run / name).stat().st_mode & 0o7777 for name in ("logs", "logs/a", "secret")}
    assert modes == {"logs": 0o755, "logs/a": 0o755, "secret": 0o600}
    assert {path.stat().st_uid for path in run.rglob("*")} == {os.geteuid()}
    assert (run / "logs/a").stat().st_mtime == 1000
    assert list(run.parent.iterdir()) == [run]


@pytest.mark.parametrize("is_there", [False, True])
def test_links_from_a_host_are_not_followed(tmp_path: Path, run: Path, is_there: bool) -> None:
    """Links in the archive, and links in the folder where it is unpacked."""
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    if is_there:
        run.mkdir(parents=True)
        (run / "out").symlink_to(outside)
        (run / "kept").symlink_to(outside / "kept")
        (run.parent / "run.part").symlink_to(outside)
    links = member("out", kind=tarfile.SYMTYPE, link=str(outside)), member("hard", kind=tarfile.LNKTYPE, link="kept")
    files = member("out/planted", "theirs"), member("kept", "theirs"), member("null", kind=tarfile.CHRTYPE)
    told = results.fetch(run, send(tmp_path, *links, *files))
    assert told == ["out (symbolic link)", "hard (hard link)", "null (device)"]
    assert tree(outside) == {"kept": "mine"}
    assert (run / "out/planted").read_text() == (run / "kept").read_text() == "theirs"
    assert not (run / "out").is_symlink()


@pytest.mark.parametrize("name", ["/tmp/planted", "../planted", "logs/../../planted"])
def test_a_name_outside_the_run_folder_is_refused(tmp_path: Path, run: Path, name: str) -> None:
    with pytest.raises(NotStoredError, match="is outside the run folder"):
        results.fetch(run, send(tmp_path, member("record.jsonl"), member(name, "theirs")))
    assert list(run.parent.iterdir()) == []


BROKEN: Mapping[str, tuple[tuple[bytes, ...], bytes]] = {
    "no end": ((member("a", "text"),), b""),
    "half a file": ((member("a", "x" * 1500)[:-600],), b""),
    "no archive": ((b"Welcome to this host!\n" * 50,), END),
    "nothing": ((), b""),
    "the same file twice": ((member("a"), member("a")), END),
    "a file that is a folder": ((member("a"), member("a/b")), END),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_archive_changes_nothing(tmp_path: Path, run: Path, case: str) -> None:
    run.mkdir(parents=True)
    (run / "a").write_text("older")
    members, end = BROKEN[case]
    with pytest.raises(NotStoredError):
        results.fetch(run, send(tmp_path, *members, end=end))
    assert tree(run.parent) == {"run/a": "older"}


@pytest.mark.parametrize("end", [END, b""])
def test_a_failed_sender_is_not_reported_as_an_error_of_this_disk(tmp_path: Path, run: Path, end: bytes) -> None:
    with pytest.raises(CpuftError, match="exit code 255") as raised:
        results.fetch(run, send(tmp_path, member("a", "x" * 600)[:-512], end=end, code=255))
    assert not isinstance(raised.value, NotStoredError)
    assert not run.exists()


def test_a_resumed_run_is_merged_and_conflicting_files_are_renamed(tmp_path: Path, run: Path) -> None:
    for name in ("logs/rank-0.out", "logs-1/rank-0.out", "only-here", "out", "model/weights"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("older")
    names = ("logs/rank-0.out", "logs-1/rank-0.out", "out/file", "model")
    results.fetch(run, send(tmp_path, *(member(name, "newer") for name in names)))
    assert tree(run) == {
        **dict.fromkeys(("logs/rank-0.out", "logs-3/rank-0.out", "out/file", "model"), "newer"),
        **dict.fromkeys(("logs-1/rank-0.out", "logs-2/rank-0.out", "only-here"), "older"),
        **dict.fromkeys(("out.old-1", "model.old-1/weights"), "older"),
    }


def test_a_run_whose_folder_the_user_put_on_another_disk_is_merged_there(tmp_path: Path, run: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        run.parent.mkdir()
        run.symlink_to(disk)
        results.fetch(run, send(tmp_path, member("a", "text")))
        assert tree(Path(disk)) == tree(run) == {"a": "text"}
        assert run.is_symlink()
        assert os.listdir(disk) == ["a"]


def test_what_a_killed_fetch_left_is_removed_and_a_fetch_that_runs_is_not_disturbed(tmp_path: Path, run: Path) -> None:
    leftover = run.parent / f"{results._PREFIX}old"
    (leftover / "run").mkdir(parents=True)
    (leftover / "run" / "evil").symlink_to("/")
    ready = tmp_path / "ready"
    slow = ("sh", "-c", f"touch {ready}; read line <{tmp_path}/go; tar -cf - -T /dev/null")
    os.mkfifo(tmp_path / "go")
    words = [sys.executable, "-m", "cpuft.launch.results", str(run.parent / "other"), *slow]
    with subprocess.Popen(words) as other:
        while not ready.exists():
            assert other.poll() is None
        assert not leftover.exists()
        results.fetch(run, send(tmp_path, member("a", "text")))
        (tmp_path / "go").write_text("\n")
    assert other.returncode == 0
    assert [path.name for path in run.parent.iterdir()] == ["run"]


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
    fetch_results(plan, str(run), cluster, os.environ, lambda line: None)
    assert tree(run) == {"out/answer": "42", "out.old-1": "older"}


def test_a_fetch_that_takes_long_says_so(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.execute._REMIND_SECONDS", 0.01)
    cluster, plan, _ = planned(tmp_path, run)
    told = list[str]()
    fetch_results(plan, str(run), cluster, os.environ, told.append)
    assert told[0] == "cpuft: fetch the run from a: not finished after 0 s"
    assert tree(run) == {"out/answer": "42"}


def test_results_that_cannot_be_stored_stay_on_the_host(tmp_path: Path, run: Path) -> None:
    cluster, plan, work = planned(tmp_path, run)
    run.parent.write_text("a file where the folder is to be")
    with pytest.raises(NotStoredError) as raised:
        fetch_results(plan, str(run), cluster, os.environ, lambda line: None)
    assert raised.value.exit_code == IO_ERROR == 74
    assert str(raised.value).startswith(
        f"the results of the run could not be stored in {run} ({run.parent}: File exists)"
    )
    assert tree(work) == {"out/answer": "42"}
    with pytest.raises(CpuftError, match="could not send the run"):
        fetch_results(planned_without_host(plan), str(run), cluster, os.environ, lambda line: None)


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
    fetch_and_clean_up(plan, str(run), AWAY, os.environ, True, said.append)
    assert said == [f"cpuft: c did not answer at the end of the run: {results.FILES_LEFT}"]


def slowly(tmp_path: Path, pause: float) -> tuple[str, ...]:
    """A command that sends the answer in two parts."""
    path = send(tmp_path, member("answer", "42"))[-1].split()[1].rstrip(";")
    return ("sh", "-c", f"head -c 700 {path}; sleep {pause}; tail -c +701 {path}")


def test_a_fetch_may_take_long_while_bytes_arrive_and_is_given_up_when_none_do(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(results, "_FETCH_SECONDS")
    results.fetch(run, slowly(tmp_path, 0.5))
    monkeypatch.setattr(results, "_STALLED_SECONDS", 0.2)
    with pytest.raises(CpuftError, match="the host has sent nothing for 0 s"):
        results.fetch(run, slowly(tmp_path, 60))
    assert tree(run.parent) == {"run/answer": "42"}


class Unsteady(SshTransport):
    """A head host that answers."""

    def find_unresponsive(self, names: Sequence[str], seconds: float = 0.0) -> set[str]:
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
    assert fetch_and_clean_up(plan, str(run), cluster, os.environ, True, said.append)
    assert pauses == [2, 5, 10]
    why = "the results of the run could not be fetched from a (the connection broke)"
    assert said[0] == f"cpuft: the run has finished, and its results are fetched again in 2 s: {why}"
    assert (run / "out/answer").read_text() == "42"


def test_a_finished_run_that_cannot_be_fetched_stays_and_the_command_that_fetches_it_is_named(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, plan, work = planned(tmp_path, run)
    cluster = replace(cluster, access=replace(cluster.access, transport=Unsteady(), cluster="lab"))
    pauses = break_fetches(monkeypatch, 100)
    with pytest.raises(NotStoredError) as raised:
        fetch_and_clean_up(plan, str(run), cluster, os.environ, True, lambda line: None)
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
        fetch_and_clean_up(plan, str(run), cluster, os.environ, True, said.append)
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
    assert fetch_and_clean_up(plan, str(run), cluster, os.environ, False, lambda line: None) == (code == 0)
