"""What travels to hosts with disks of their own, and where it is there."""

from __future__ import annotations

import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft import baggage
from cpuft.baggage import pack, pack_script, pack_training, plan_rows
from cpuft.cluster import Assignment, Cluster, Reach
from cpuft.config import TrainConfig
from cpuft.hostfile import Host
from cpuft.mpi import Flavour
from cpuft.plan import Plan, Step

LONG = "a" * 300
"""No path, but a text."""
AWAY = Cluster(
    (Assignment(Host("a"), 1), Assignment(Host("b"), 1), Assignment(Host("c"), 1)),
    (),
    Flavour("mpirun", "intel"),
    reach=Reach("there.conf", "/opt/cpuft/env/bin/python", ssh_config_there="/opt/config"),
    away=True,
)
SHARED = replace(AWAY, reach=Reach(shares_files=True))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The working directory: a script with its modules, and inputs below it."""
    files = ("code/train.py", "code/other.py", "code/pack/__init__.py", "code/pack/a.py", "code/notes.txt")
    for name in (*files, "rows.csv", "model/config.json", "code/pack/__pycache__/a.pyc"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names_of(parcel: baggage.Parcel) -> list[str]:
    return [name for _, name in baggage._list_files(parcel.sources)]


def test_nothing_travels_where_files_are_shared(work: Path) -> None:
    command = (sys.executable, str(work / "code/train.py"), "rows.csv")
    assert pack_script(SHARED, command) == (command, ())
    assert pack_script(replace(AWAY, away=False), command) == (command, ())
    train = TrainConfig(model="model")
    assert pack_training(SHARED, train) == (train, ())


def test_a_script_takes_its_modules_and_packages_along(work: Path) -> None:
    command, (parcel,) = pack_script(AWAY, (sys.executable, str(work / "code/train.py"), "--lr", "1e-4"))
    assert command == (AWAY.python, f"{parcel.there}/train.py", "--lr", "1e-4")
    assert names_of(parcel) == ["other.py", "pack/__init__.py", "pack/a.py", "train.py"]
    assert parcel.there.startswith("/var/tmp/cpuft-0/inputs/")


def test_files_and_folders_among_the_arguments_travel(work: Path) -> None:
    words = ("rows.csv", "--model=model", "--out=missing", "--flag", ".", "--in=.", "..", "", "a 0", "$HOME", "-", LONG)
    command, parcels = pack_script(AWAY, (sys.executable, str(work / "code/train.py"), *words))
    _, rows, model = parcels
    expected = (f"{rows.there}/rows.csv", f"--model={model.there}/model", *words[2:])
    assert command[2:] == expected
    assert names_of(model) == ["model/config.json"]


def test_a_program_is_sent_when_it_is_a_file_and_looked_for_there_when_it_is_a_name(work: Path) -> None:
    (work / "hostname").write_text("not the program of that name")
    assert pack_script(AWAY, ("hostname", "-f")) == (("hostname", "-f"), ())
    command, (parcel,) = pack_script(AWAY, (str(work / "code/train.py"),))
    assert command == (f"{parcel.there}/train.py",)
    assert names_of(parcel) == ["train.py"]


def test_inputs_of_a_training_travel(work: Path) -> None:
    train = TrainConfig(task="files", model="model", train_file="rows.csv", validation_file="rows.csv")
    changed, parcels = pack_training(AWAY, train)
    assert changed.model == f"{parcels[0].there}/model"
    assert changed.train_file == changed.validation_file == f"{parcels[1].there}/rows.csv"
    assert changed.data_dir == ""
    assert pack_training(AWAY, TrainConfig())[1] == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda work: (work / "code/pack/a.py").write_text("another text"),
        lambda work: (work / "code/pack/a.py").rename(work / "code/pack/b.py"),
        lambda work: (work / "code/train.py").chmod(0o755),
        lambda work: (work / "code/pack/new.py").write_text(""),
    ],
)
def test_whatever_changes_gets_a_new_place(work: Path, change: object) -> None:
    sources = (work / "code/pack", work / "code/train.py")
    before = pack(sources, AWAY.inputs)
    assert pack(sources, AWAY.inputs) == before
    assert callable(change)
    change(work)
    assert pack(sources, AWAY.inputs).there != before.there


def test_links_travel_as_what_they_point_to(work: Path) -> None:
    (work / "model" / "weights").symlink_to(work / "rows.csv")
    parcel = pack((work / "model",), AWAY.inputs)
    baggage._write_tar(parcel, str(work / "model.tar"))
    with tarfile.open(work / "model.tar") as archive:
        assert {member.name: member.isfile() for member in archive} == {
            "model/config.json": True,
            "model/weights": True,
        }


def test_rows_are_given_to_the_other_hosts_after_they_are_prepared() -> None:
    plan = Plan(tuple((Step(name, (name,)),) for name in ("make", "prepare", "start")))
    made = plan_rows(plan, AWAY, "/var/tmp/cpuft-1/run")
    assert [[step.why for step in stage] for stage in made.stages] == [
        ["make"],
        ["prepare"],
        ["give the rows to b", "give the rows to c"],
        ["start"],
    ]
    assert plan_rows(plan, SHARED, "/run") == plan
    assert plan_rows(plan, replace(AWAY, assignments=AWAY.assignments[:1]), "/run") == plan
