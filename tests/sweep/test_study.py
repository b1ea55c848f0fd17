"""The file of a sweep: what it holds after a kill or a full disk, what Optuna chooses, and what is pruned."""

from __future__ import annotations

import builtins
import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from cpuft.errors import CpuftError
from cpuft.sweep.study import (
    DONE,
    FAILED,
    FILE_NAME,
    PRUNED,
    RUNNING,
    create_sweep,
    open_sweep,
    read_sweep,
)
from tests.sweep.searches import GRID, SETTINGS, begin, end, find_rates, make_search, train


def test_a_sweep_is_read_back_as_it_was(tmp_path: Path) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), False, GRID)
    with open_sweep(str(tmp_path / "s")) as sweep:
        first, second, third, _ = sweep.runs
        begin(sweep, first)
        end(sweep, first, DONE, 0.75)
        begin(sweep, second)
        begin(sweep, third, "run-3-attempt-2")
        sweep.note_evaluation(sweep.configurations[0], 10, 0.5)
        sweep.prune(sweep.configurations[1], "worse")
        told = [(run.number, run.values, run.length, run.attempts, run.status) for run in sweep.runs]
    again = read_sweep(str(tmp_path / "s"))
    assert [(run.number, run.values, run.length, run.attempts, run.status) for run in again.runs] == told
    assert [status for *_, status in told] == [DONE, RUNNING, PRUNED, PRUNED]
    assert [run["seed"] for _, run, *_ in told] == ["1", "2", "1", "2"]
    assert (again.settings, again.is_maximized, again.metric) == (sweep.settings, False, "accuracy")
    assert again.configurations[0].curve == {10: 0.5}
    assert [one.values for one in again.configurations] == [{"learning_rate": rate} for rate in ("1e-4", "3e-4")]


def test_optunas_own_programs_read_the_file(tmp_path: Path) -> None:
    """optuna-dashboard opens it like this, and shows the options of a grid as parameters."""
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    with open_sweep(str(tmp_path / "s")) as sweep:
        for run in sweep.configurations[0].runs:
            begin(sweep, run)
            end(sweep, run, DONE, 0.5)
        sweep.conclude(sweep.configurations[0])
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "s" / FILE_NAME))
    study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
    assert [trial.params for trial in study.trials] == [{"learning_rate": 1e-4}, {"learning_rate": 3e-4}]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "WAITING"]
    assert study.best_value == 0.5


def test_what_optunas_dashboard_adds_to_the_file_stays_there(tmp_path: Path) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "s" / FILE_NAME))
    with open_sweep(str(tmp_path / "s")) as sweep:
        study = optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))
        study.set_user_attr("note", "mine")
        begin(sweep, sweep.runs[0])
        assert study.trials[0].state.name == "RUNNING"
    again = read_sweep(str(tmp_path / "s"))
    assert (again.study.user_attrs["note"], again.runs[0].status) == ("mine", RUNNING)


@pytest.mark.parametrize("note", ["x", "x" * 5000])
def test_what_optunas_dashboard_adds_while_a_line_is_written_stays_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, note: str
) -> None:
    """Its line comes between the reading and the writing of the sweep, as another host's may."""
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    path = tmp_path / "s" / FILE_NAME
    known, sync, line = (
        path.read_bytes(),
        os.fsync,
        json.dumps({**json.loads(path.read_text().splitlines()[1]), "worker_id": note}),
    )

    def insert(file: int) -> None:
        sync(file)
        monkeypatch.setattr(os, "fsync", sync)
        path.write_bytes(known + line.encode() + b"\n" + path.read_bytes()[len(known) :])

    with open_sweep(str(tmp_path / "s")) as sweep:
        known = path.read_bytes()
        monkeypatch.setattr(os, "fsync", insert)
        begin(sweep, sweep.runs[0])
        begin(sweep, sweep.runs[1])
    text = path.read_text()
    assert text.count(note) >= 1
    assert all(json.loads(one) for one in text.splitlines())
    assert [run.status for run in read_sweep(str(tmp_path / "s")).runs[:2]] == [RUNNING, RUNNING]


def test_the_file_of_a_large_grid_is_small(tmp_path: Path) -> None:
    rates, kinds = [f"{rate}e-6" for rate in range(1, 101)], ("linear", "cosine")
    runs = [{"learning_rate": rate, "lr_schedule": kind} for rate in rates for kind in kinds]
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=200, search="grid"), True, runs)
    assert (tmp_path / "s" / FILE_NAME).stat().st_size < 200 * 1024
    assert [run.values for run in read_sweep(str(tmp_path / "s")).runs] == runs


def test_what_a_kill_has_cut_off_is_left_out(tmp_path: Path) -> None:
    """After a kill at any byte, the sweep opens again with all whole lines, and can be added to."""
    create_sweep(str(tmp_path / "a"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    begun = (tmp_path / "a" / FILE_NAME).stat().st_size
    with open_sweep(str(tmp_path / "a")) as sweep:
        begin(sweep, sweep.runs[0])
        end(sweep, sweep.runs[0], DONE, 0.5)
    whole = (tmp_path / "a" / FILE_NAME).read_bytes()
    (tmp_path / "b").mkdir()
    for size in range(begun, len(whole), 7):
        (tmp_path / "b" / FILE_NAME).write_bytes(whole[:size])
        assert len(read_sweep(str(tmp_path / "b")).runs) == 4
        with open_sweep(str(tmp_path / "b")) as sweep:
            begin(sweep, sweep.runs[1])
        after = read_sweep(str(tmp_path / "b")).runs
        assert after[1].status == RUNNING
        assert (after[0].status == DONE) == (whole[:size].count(b"\n") == whole.count(b"\n"))


def test_a_line_that_a_full_disk_has_cut_off_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    sync = os.fsync

    def fail(number: int) -> None:
        os.truncate(number, os.fstat(number).st_size - 9)
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_sweep(str(tmp_path / "s")) as sweep:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            begin(sweep, sweep.runs[0])
        monkeypatch.setattr(os, "fsync", sync)
        begin(sweep, sweep.runs[1])
    assert [run.status for run in read_sweep(str(tmp_path / "s")).runs] == ["", RUNNING, "", ""]


def test_a_damaged_last_line_is_cut_off_and_another_one_is_refused(tmp_path: Path) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    whole = (tmp_path / "s" / FILE_NAME).read_bytes()
    (tmp_path / "s" / FILE_NAME).write_bytes(whole + b'{"op_code": 8, "wor' + bytes(4096))
    with open_sweep(str(tmp_path / "s")) as sweep:
        begin(sweep, sweep.runs[0])
    assert not (tmp_path / "s" / FILE_NAME).read_bytes().count(0)
    assert read_sweep(str(tmp_path / "s")).runs[0].status == RUNNING
    lines = whole.splitlines(keepends=True)
    (tmp_path / "s" / FILE_NAME).write_bytes(b"".join([*lines[:2], b"{\n", *lines[3:]]))
    with pytest.raises(CpuftError, match=r"sweep\.jsonl is not a sweep of this version"):
        read_sweep(str(tmp_path / "s"))


def test_a_sweep_that_another_command_has_begun_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    create_sweep(folder, replace(SETTINGS, search_seed=2), True)
    with pytest.raises(
        CpuftError, match=f"made the folder {folder} meanwhile: if it is another cpuft sweep, continue it with"
    ):
        create_sweep(folder, SETTINGS, True)
    assert [path.name for path in (tmp_path / "s").iterdir()] == [FILE_NAME]
    assert read_sweep(folder).settings.search_seed == 2


def test_a_choice_that_was_not_stored_is_not_waited_for(tmp_path: Path) -> None:
    """The sweep was killed after Optuna had begun a trial, and before its runs were stored."""
    create_sweep(str(tmp_path / "s"), SETTINGS, True)
    with open_sweep(str(tmp_path / "s")) as sweep:
        first = sweep.choose_next().values
        sweep.study.ask()
    with open_sweep(str(tmp_path / "s")) as sweep:
        assert [one.values for one in sweep.configurations] == [first]
        assert [trial.state.name for trial in sweep.study.trials] == ["RUNNING", "FAIL"]
        sweep.choose_next()
    assert [run.number for run in read_sweep(str(tmp_path / "s")).runs] == [1, 2]


def test_a_run_that_is_tried_again_counts_once(tmp_path: Path) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    with open_sweep(str(tmp_path / "s")) as sweep:
        one = sweep.configurations[0]
        for run, metric in zip(one.runs, (0.5, math.nan), strict=True):
            begin(sweep, run)
            end(sweep, run, FAILED if math.isnan(metric) else DONE, metric)
        sweep.conclude(one)
        # A run that failed is missing in the mean.
        assert (one.value, one.is_told) == (0.5, True)
    with open_sweep(str(tmp_path / "s")) as sweep:
        one = sweep.configurations[0]
        begin(sweep, one.runs[1], "run-2-attempt-2")
        assert (one.value, one.is_told) == (None, False)
        end(sweep, one.runs[1], DONE, 0.7)
        sweep.conclude(one)
    after = read_sweep(str(tmp_path / "s"))
    assert [run.number for run in after.runs] == [1, 2, 3, 4]
    assert [attempt.status for attempt in after.runs[1].attempts] == [FAILED, DONE]
    assert after.configurations[0].value == pytest.approx(0.6)
    assert [trial.state.name for trial in after.study.trials] == ["COMPLETE", "WAITING", "COMPLETE"]


@pytest.mark.parametrize(
    "changes",
    [
        {"options": ["--", "planted.py"]},
        {"options": ["planted.py"]},
        {"options": ["--mpirun=/tmp/planted"]},
        {"launch": ["--mpirun=/tmp/planted"]},
        {"launch": ["--ssh-config", "/tmp/planted"]},
        {"launch": ["--ssh-config=/tmp/planted"]},
        {"runs": {"run_dir": "/tmp/planted"}},
        {"folder": "../other"},
    ],
)
def test_what_no_sweep_writes_is_not_passed_to_a_launch(tmp_path: Path, changes: dict[str, Any]) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    with open_sweep(str(tmp_path / "s")) as sweep:
        begin(sweep, sweep.runs[0])
    path = tmp_path / "s" / FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if "runs" in changes:
        lines[2]["user_attrs"]["runs"]["1"] = changes["runs"]
    elif "folder" in changes:
        lines[-1]["user_attr"]["run-1"][0]["folder"] = changes["folder"]
    else:
        lines[1]["user_attr"]["settings"] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(CpuftError, match=r"which no sweep writes|is not a sweep of this version"):
        read_sweep(str(tmp_path / "s"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "there is no sweep.jsonl in "),
        ("", "is not a sweep of this version of cpuft"),
        (
            '{"kind": "sweep", "version": 2, "options": []}\n',
            "is not a sweep of this version .*: start the sweep anew, or",
        ),
        ("x\n{}\n", "is not a sweep of this version of cpuft"),
        ('{"op_code":0,"worker_id":"a","study_name":"sweep","directions":[2]}\n', "is not a sweep of this version"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(CpuftError, match=problem) as told:
        read_sweep(str(tmp_path))
    assert told.value.exit_code == 2
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"hosts_per_run":1', '"hosts_per_run":0'),
        ('"parallel":0', '"parallel":-1'),
        ('"directions":[2]', '"directions":[2,2]'),
        ('"step":10', '"step":"10"'),
        ('"intermediate_value":0.25', '"intermediate_value":"0.25"'),
        ('"values":[0.5]', '"values":["0.5"]'),
        ('"values":[0.5]', '"values":[0.5,0.5]'),
    ],
)
def test_numbers_that_no_sweep_has_are_refused(tmp_path: Path, old: str, new: str) -> None:
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, trials=2, search="grid"), True, GRID)
    with open_sweep(str(tmp_path / "s")) as sweep:
        (one, _) = sweep.configurations
        sweep.note_evaluation(one, 10, 0.25)
        for run in one.runs:
            begin(sweep, run)
            end(sweep, run, DONE, 0.5)
        sweep.conclude(one)
    text = (tmp_path / "s" / FILE_NAME).read_text()
    assert old in text
    (tmp_path / "s" / FILE_NAME).write_text(text.replace(old, new))
    with pytest.raises(CpuftError, match="is not a sweep of this version"):
        read_sweep(str(tmp_path / "s"))


def test_without_optuna_the_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *words: Any, **options: Any) -> Any:
        if name == "optuna":
            raise ImportError(name)
        return real(name, *words, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CpuftError, match=r"sweeps are stored by Optuna, which is not installed: .*\[sweep\]") as told:
        create_sweep(str(tmp_path / "s"), SETTINGS, True)
    assert told.value.exit_code == 2
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "space", [{"lora_rank": "4,8"}, {"lora_rank": "4,8", "learning_rate": "1e-5..1.0001e-5"}], ids=["values", "range"]
)
def test_a_sweep_that_could_not_be_written_leaves_no_folder(space: dict[str, str], tmp_path: Path) -> None:
    settings = replace(SETTINGS, search="random", trials=3, spaces=[space])
    with pytest.raises(CpuftError, match=r"hardly any configuration is left after [12]"):
        create_sweep(str(tmp_path / "s"), settings, True)
    assert not (tmp_path / "s").exists()


def test_a_sweep_that_does_not_fit_on_the_disk_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space left"):
        create_sweep(str(tmp_path / "s"), SETTINGS, True)
    assert not (tmp_path / "s").exists()


def test_a_sweep_begins_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    create_sweep(str(tmp_path / "s"), SETTINGS, True)
    assert read_sweep(str(tmp_path / "s")).runs == []


def test_a_large_sweep_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network disk may take 10 ms for each line that has to be on it."""
    waits = list[int]()
    monkeypatch.setattr(os, "fsync", waits.append)
    create_sweep(str(tmp_path / "s"), replace(SETTINGS, search="random", trials=50), True)
    assert len(read_sweep(str(tmp_path / "s")).runs) == 50
    assert len(waits) <= 1


def test_each_configuration_is_trained_with_all_seeds_and_counts_by_their_mean(tmp_path: Path) -> None:
    spaces = [{"learning_rate": "1e-6..1e-2", "seed": "1,2"}]
    sweep, pruner = make_search(tmp_path, replace(SETTINGS, spaces=spaces, seeds=2, trials=3))
    assert sweep.total == 6
    train(sweep, pruner, lambda run: 0.8 if run["seed"] == "1" else 0.6)
    assert [run.values["seed"] for run in sweep.runs] == ["1", "2"]
    assert len({*find_rates(sweep)}) == 1
    assert sweep.total == 6
    assert sweep.configurations[0].value == pytest.approx(0.7)
    assert sweep.study.trials[0].intermediate_values == pytest.approx({10: 0.68, 20: 0.69, 30: 0.7})
    # A run that failed is missing in the mean. Without any metric, Optuna learns of a failure.
    train(sweep, pruner, lambda run: 0.8 if run["seed"] == "1" else math.nan)
    train(sweep, pruner, lambda run: math.nan)
    assert [trial.state.name for trial in sweep.study.trials] == ["COMPLETE", "COMPLETE", "FAIL"]
    assert sweep.study.trials[1].value == 0.8
