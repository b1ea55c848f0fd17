"""The one error a user is meant to see."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpuft
from cpuft.errors import CPU_INDEX, CpuftError, explain_os_error, install_command, suggest_names

PACKAGE = Path(cpuft.__file__).parent


@given(st.text(st.characters()))
def test_every_message_is_one_printable_line(text: str) -> None:
    assert str(CpuftError(text)).isprintable()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("there is no 'é 中': write \\n", "there is no 'é 中': write \\n"),
        ("a\nb\r", "a\\nb\\r"),
        ("\x1b[2J\u2028", "\\x1b[2J\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_would_end_the_line_is_escaped(text: str, shown: str) -> None:
    assert str(CpuftError(text)) == shown


def test_a_working_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "a.csv")
    assert explain_os_error(missing) is None
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        os.getcwd()
    for error in (caught.value, missing):
        assert str(explain_os_error(error)) == "the working folder does not exist any more: change to another one"
    assert explain_os_error(OSError(errno.EIO, "I/O error")) is None
    assert "ulimit -u" in str(explain_os_error(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")))


def test_pip_takes_the_command_that_hints_print() -> None:
    """Of a checkout, as tests are; `--no-index` shows that nothing is missing that the command does not name."""
    command = shlex.split(install_command("plot"))
    assert command[:5] == [sys.executable, "-m", "pip", "install", "-c"]
    more = ("--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet")
    subprocess.run([*command, *more], check=True, timeout=120)


def test_what_trains_comes_without_cuda_and_with_exact_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = shlex.split(install_command("train", "mpi", "demo"))
    pins = str(PACKAGE / "constraints.txt")
    root = str(PACKAGE.parent)
    assert checkout[4:] == ["-c", pins, "--extra-index-url", CPU_INDEX, "-e", f"{root}[train,mpi,demo]"]
    monkeypatch.setattr(cpuft, "__file__", "/env/lib/python3.11/site-packages/cpuft/__init__.py")
    pins = "/env/lib/python3.11/site-packages/cpuft/constraints.txt"
    assert shlex.split(install_command("aws"))[4:] == ["-c", pins, f"cpuft[aws]=={cpuft.__version__}"]


def test_the_install_command_has_the_quotation_marks_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", r"C:\a b\python.exe")
    assert install_command("hub").startswith(r'"C:\a b\python.exe" -m pip install -c /')
    monkeypatch.setattr(sys, "executable", r"C:\a\python.exe")
    assert install_command("hub").startswith(r"C:\a\python.exe -m pip install -c /")


def test_no_hint_has_an_install_command_of_its_own() -> None:
    found = [path for path in PACKAGE.rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")]
    assert found == []


def test_one_typo_has_one_suggestion_unless_several_names_are_as_similar() -> None:
    assert suggest_names("lanch", ("launch", "bench", "cancel")) == "did you mean launch?"
    assert suggest_names("labell", ("label", "labels", "table")) == "did you mean label or labels?"
    many = [f"name{number:02}" for number in range(30)]
    assert suggest_names("xyz", many) == f"choose one of {', '.join(many[:20])} and 10 others"
