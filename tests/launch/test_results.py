"""What a host sends as a run folder is stored completely or not at all, and only in the run folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import IO_ERROR, CpuftError
from cpuft.hosts.cluster import Cluster
from cpuft.launch import results
from cpuft.launch.results import NotStoredError, fetch_and_clean_up, fetch_results, plan_results
from cpuft.plan import RunPlan, Step
from tests.launch.test_inputs import AWAY


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
    assert results.fetch(run, send(tmp_path, *files, member("./secret", mode=0o600)), False) == []
    assert tree(run) == {"logs/a": "text", "secret": ""}
    modes = {name: (run / name).stat().st_mode & 0o7777 for name in ("logs", "logs/a", "secret")}
    assert modes == {"logs": 0o755, "logs/a": 0o755, "secret": 0o600}
    assert {path.stat().st_uid for path in run.rglob("*")} == {os.geteuid()}
    assert (run / "logs/a").stat().st_mtime == 1000
    assert list(run.parent.iterdir()) == [run]


@pytest.mark.parametrize("merge", [False, True])
def test_links_from_a_host_are_not_followed(tmp_path: Path, run: Path, merge: bool) -> None:
    """Links in the archive, and links in the folder where it is unpacked."""
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "kept").write_text("mine")
    if merge:
        run.mkdir(parents=True)
        (run / "out").symlink_to(outside)
        (run / "kept").symlink_to(outside / "kept")
        (run.parent / "run.part").symlink_to(outside)
    links = member("out", kind=tarfile.SYMTYPE, link=str(outside)), member("hard", kind=tarfile.LNKTYPE, link="kept")
    files = member("out/planted", "theirs"), member("kept", "theirs"), member("null", kind=tarfile.CHRTYPE)
    told = results.fetch(run, send(tmp_path, *links, *files), merge)
    assert told == ["out (symbolic link)", "hard (hard link)", "null (device)"]
    assert tree(outside) == {"kept": "mine"}
    assert (run / "out/planted").read_text() == (run / "kept").read_text() == "theirs"
    assert not (run / "out").is_symlink()


@pytest.mark.parametrize("name", ["/tmp/planted", "../planted", "logs/../../planted"])
def test_a_name_outside_the_run_folder_is_refused(tmp_path: Path, run: Path, name: str) -> None:
    with pytest.raises(NotStoredError, match="is outside the run folder"):
        results.fetch(run, send(tmp_path, member("record.jsonl"), member(name, "theirs")), False)
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
        results.fetch(run, send(tmp_path, *members, end=end), True)
    assert tree(run.parent) == {"run/a": "older"}


@pytest.mark.parametrize("end", [END, b""])
def test_a_failed_sender_is_not_reported_as_an_error_of_this_disk(tmp_path: Path, run: Path, end: bytes) -> None:
    with pytest.raises(CpuftError, match="exit code 255") as raised:
        results.fetch(run, send(tmp_path, member("a", "x" * 600)[:-512], end=end, code=255), False)
    assert not isinstance(raised.value, NotStoredError)
    assert not run.exists()


def test_a_resumed_run_is_merged_and_conflicting_files_are_renamed(tmp_path: Path, run: Path) -> None:
    for name in ("logs/rank-0.out", "logs-1/rank-0.out", "only-here", "out", "model/weights"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("older")
    names = ("logs/rank-0.out", "logs-1/rank-0.out", "out/file", "model")
    results.fetch(run, send(tmp_path, *(member(name, "newer") for name in names)), True)
    assert tree(run) == {
        **dict.fromkeys(("logs/rank-0.out", "logs-3/rank-0.out", "out/file", "model"), "newer"),
        **dict.fromkeys(("logs-1/rank-0.out", "logs-2/rank-0.out", "only-here"), "older"),
        **dict.fromkeys(("out.old-1", "model.old-1/weights"), "older"),
    }


def test_a_run_whose_folder_the_user_put_on_another_disk_is_merged_there(tmp_path: Path, run: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        run.parent.mkdir()
        run.symlink_to(disk)
        results.fetch(run, send(tmp_path, member("a", "text")), True)
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
    words = [sys.executable, "-m", "cpuft.launch.results", results.NEW, str(run.parent / "other"), *slow]
    with subprocess.Popen(words) as other:
        while not ready.exists():
            assert other.poll() is None
        assert not leftover.exists()
        results.fetch(run, send(tmp_path, member("a", "text")), False)
        (tmp_path / "go").write_text("\n")
    assert other.returncode == 0
    assert [path.name for path in run.parent.iterdir()] == ["run"]


def planned(tmp_path: Path, run: Path, resumed: bool) -> tuple[Cluster, RunPlan, Path]:
    """The plan of a run whose head host is this machine, and its run folder there."""
    work = tmp_path / "there" / "run"
    (work / "out").mkdir(parents=True)
    (work / "out" / "answer").write_text("42")
    cluster = replace(AWAY, command_prefixes={})
    return cluster, RunPlan(results=plan_results(cluster, str(work), str(run), resumed)), work


def test_a_file_that_became_a_folder_loses_nothing(tmp_path: Path, run: Path) -> None:
    cluster, plan, _ = planned(tmp_path, run, resumed=True)
    run.mkdir(parents=True)
    (run / "out").write_text("older")
    fetch_results(plan, str(run), cluster, os.environ, lambda line: None)
    assert tree(run) == {"out/answer": "42", "out.old-1": "older"}


def test_a_fetch_that_takes_long_says_so(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.execute._REMIND_SECONDS", 0.01)
    cluster, plan, _ = planned(tmp_path, run, resumed=False)
    told = list[str]()
    fetch_results(plan, str(run), cluster, os.environ, told.append)
    assert told[0] == "cpuft: fetch the run from a: not finished after 0 s"
    assert tree(run) == {"out/answer": "42"}


def test_results_that_cannot_be_stored_stay_on_the_host(tmp_path: Path, run: Path) -> None:
    cluster, plan, work = planned(tmp_path, run, resumed=False)
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
